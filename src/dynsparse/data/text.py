"""Texts to learn from: any UTF-8 file, plain or compressed, and the standard library's source."""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path

from dynsparse.data.packed import DAMAGE, unpacked
from dynsparse.files.limits import LimitError

STDLIB = "stdlib"
"""The name of the text that every Python carries."""

_STDLIB_BYTES = 4 << 20
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "lib2to3", "idlelib", "__pycache__"}


def read_text(source: str | Path) -> str:
    """The text of `source`: "stdlib" or a file in UTF-8, which may be packed by gzip, xz or bzip2.

    A byte order mark is left out; line ends stay as they are.

    Raises:
        ValueError: an empty file, one that is not UTF-8 text, a packed one that is damaged or
            unpacks to more than `dynsparse.files.limits.read_limit` allows.
        OSError: a file that cannot be read.
    """
    if str(source) == STDLIB:
        return read_stdlib()
    path = Path(source)
    content = path.read_bytes()
    try:
        content = unpacked(content)
    except LimitError as error:
        raise ValueError(f"{path}: {error}") from None
    except DAMAGE as error:
        raise ValueError(f"{path}: expected a packed text, got a damaged file: {error}") from None
    return _decoded(content, path)


def _decoded(content: bytes, path: Path) -> str:
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: expected text in UTF-8, got the byte 0x{content[error.start]:02x} at "
            f"position {error.start}: convert the file, or name a text file"
        ) from None
    text = text.removeprefix("\ufeff")
    if "\0" in text:
        raise ValueError(
            f"{path}: expected text, got a binary file (a zero byte at position "
            f"{content.index(0)}): name a text file"
        )
    if not text.strip():
        what = "an empty file" if not text else "white space alone"
        raise ValueError(f"{path}: expected text, got {what}")
    return text


def read_stdlib(most_bytes: int = _STDLIB_BYTES) -> str:
    """Source text of the running Python's standard library, at most `most_bytes` of UTF-8.

    Whole files in the order of the SHA-256 of their names, which mixes the packages and is the same
    on every machine; the tests are left out. The text depends on the Python version alone.

    Raises:
        OSError: this Python carries no source files.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*.py"))
    chosen = (name for name in names if not _LEFT_OUT & set(name.split("/")))
    ordered = sorted(chosen, key=lambda name: hashlib.sha256(name.encode()).digest())
    parts: list[str] = []
    size = 0
    for name in ordered:
        content = (folder / name).read_bytes()
        try:
            text = content.decode()
        except UnicodeDecodeError:
            continue  # a few files show other encodings
        if "\0" in text or not text.strip():
            continue
        if size + len(content) > most_bytes:
            break
        parts.append(text)
        size += len(content)
    if not parts:
        raise OSError(
            f"{folder}: expected the standard library's source files, got none: name a text file"
        )
    return "\n".join(parts)
