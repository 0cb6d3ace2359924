"""One text of a checkpoint's `extra`, without reading its tensors."""

from __future__ import annotations

import pickletools
import zipfile
from pathlib import Path

_LARGEST = 1 << 28  # bytes of what describes the tensors; far more than any training's


def glance(path: Path, key: str) -> str | None:
    """The text `extra[key]`; None where the checkpoint has none, or is damaged or foreign.

    It costs what the names and shapes of the tensors take, however large the tensors are. Nothing
    is executed, and the digest is not compared: `read_extra` does that.

    Args:
        key: a text that is a key nowhere else in the checkpoint.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            described = next(i for i in archive.infolist() if i.filename.endswith("/data.pkl"))
            if described.compress_type != zipfile.ZIP_STORED or described.file_size > _LARGEST:
                return None
            return _text_after(key, archive.read(described))
    except OSError:
        raise
    except Exception:  # of any kind: it is what a damaged archive makes zipfile and pickletools do
        return None


def _text_after(key: str, pickled: bytes) -> str | None:
    found = False
    for operation, argument, _ in pickletools.genops(pickled):
        if "PUT" in operation.name or operation.name == "MEMOIZE":
            continue  # notes the value before it, which stays the last
        if found and isinstance(argument, str) and "UNICODE" in operation.name:
            return argument
        found = argument == key
    return None
