"""Downloads with a checksum and a progress bar, and decompression of gzip, xz and bzip2."""

from __future__ import annotations

import bz2
import gzip
import logging
import lzma
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dynsparse._core.files.limits import HOW_TO_RAISE, LimitError, check_regular, read_limit

# A header of xz names the memory that unpacking takes, up to 4 GiB.
DAMAGE = (OSError, EOFError, ValueError, MemoryError, lzma.LZMAError, zlib.error)
"""What unpacking a damaged stream raises."""

_CHUNK = 1 << 20
_PACKED: dict[bytes, Any] = {
    b"\x1f\x8b": gzip.open,
    b"\xfd7zXZ": lzma.open,
    b"BZh": bz2.open,
}


def read_unpacked(path: Path) -> bytes:
    """The content of a file, unpacked if it begins as gzip, xz or bzip2 do.

    Raises:
        ValueError: a damaged stream, or one that unpacks to more than `read_limit` allows for the
            file's size.
        OSError: the file cannot be read.
    """
    parts: list[bytes] = []
    with open(path, "rb") as file:
        start = file.read(8)
        file.seek(0)
        unpacker = next((kind for magic, kind in _PACKED.items() if start.startswith(magic)), None)
        if unpacker is None:
            return file.read()
        left = read_limit(os.fstat(file.fileno()).st_size)
        try:
            with unpacker(file) as stream:
                while left >= 0 and (part := stream.read(_CHUNK)):
                    parts.append(part)
                    left -= len(part)
        except DAMAGE as error:
            raise ValueError(f"{path}: damaged stream ({error!r}); get the file again") from None
    if left < 0:
        raise LimitError(
            f"{path}: expected it to unpack to at most {read_limit(path.stat().st_size):,} bytes, "
            f"got more: {HOW_TO_RAISE}, or unpack it yourself"
        )
    return b"".join(parts)


_TIMEOUT_SECONDS = 30


def fetch(urls: Sequence[str], file: str, checksum: str, folder: Path) -> Path:
    """`file` in `folder`, downloaded from the first of `urls` that gives it, unless it is there.

    A file with another checksum is never left in the folder: pooch writes beside it and moves the
    finished file.

    Args:
        urls: folders that hold the file, ending in a slash.
        file: its name.
        checksum: "algorithm:hex".
        folder: where it goes; created if it does not exist.

    Raises:
        ValueError: what was downloaded has another checksum.
        OSError: no address answered, or the folder cannot be written.
    """
    import pooch
    import requests

    check_regular(folder / file)
    logging.getLogger("pooch").setLevel(logging.WARNING)  # the progress bar replaces its messages
    for url in urls:
        with _Bar(file) as bar:
            try:
                path = pooch.retrieve(
                    url + file,
                    known_hash=checksum,
                    fname=file,
                    path=folder,
                    downloader=pooch.HTTPDownloader(progressbar=bar, timeout=_TIMEOUT_SECONDS),
                )
                return Path(path)
            except requests.exceptions.RequestException as error:
                reason = f"{url}{file}: {_describe_failure(error)}"
            except ValueError:
                raise ValueError(
                    f"{url}{file}: expected the checksum {checksum}, got another: the download is "
                    "damaged or the file has changed; try again, or put the file in a data folder"
                ) from None
    raise OSError(
        f"cannot download {file} ({reason}): check the connection, or pass a folder that "
        "has the files"
    )


def _describe_failure(error: Exception) -> str:
    """A short phrase, since requests' own text for a refused connection has five lines."""
    response = getattr(error, "response", None)
    if response is not None:
        return f"the server answered {response.status_code}"
    return {
        "ConnectTimeout": "no answer in time",
        "ReadTimeout": "no answer in time",
        "ChunkedEncodingError": "the connection was lost",
    }.get(type(error).__name__, "no connection")


class _Bar:
    """A rich progress bar with the four names pooch calls on one: total, update, reset, close."""

    def __init__(self, file: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._progress.add_task(f"downloading {file}", total=None, visible=False)

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    @property
    def total(self) -> Any:
        return self._progress.tasks[0].total

    @total.setter
    def total(self, size: int) -> None:
        self._progress.update(self._task, total=size or None, visible=True)

    def update(self, size: int) -> None:
        self._progress.update(self._task, advance=size)

    def reset(self) -> None:
        self._progress.update(self._task, completed=0)

    def close(self) -> None:
        """Pooch calls this when the file is complete; the bar stops with its context."""
