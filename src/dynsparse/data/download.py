"""Downloads with a checksum and a progress bar, and unpacking of gzip, xz and bzip2."""

from __future__ import annotations

import bz2
import gzip
import io
import logging
import lzma
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from dynsparse._core.files.limits import HOW_TO_RAISE, LimitError, read_limit

GZIP_MAGIC = b"\x1f\x8b"
DAMAGE = (OSError, EOFError, ValueError, lzma.LZMAError, zlib.error)
"""What unpacking a damaged stream raises."""

_CHUNK = 1 << 20
_INPUT = 1 << 16
_DICTIONARY = 256 << 20  # xz -9 asks for 65 MiB


def unpack(content: bytes) -> bytes:
    """`content` unpacked; as it is where it is not packed.

    A file that is packed twice is unpacked twice, in the order gzip, xz, bzip2.

    Raises:
        LimitError: it unpacks to more than `read_limit` allows for its size.
        OSError, EOFError, lzma.LZMAError, zlib.error: it is damaged.
    """
    limit = read_limit(len(content))
    for magic, chunks in _PACKED.items():
        if not content.startswith(magic):
            continue
        parts: list[bytes] = []
        size = 0
        for part in chunks(io.BytesIO(content), limit):
            size += len(part)
            if size > limit:
                raise LimitError(
                    f"expected it to unpack to at most {limit:,} bytes, got more: {HOW_TO_RAISE}, "
                    "or unpack it yourself"
                )
            parts.append(part)
        content = b"".join(parts)
    return content


def _gzip(file: BinaryIO, limit: int) -> Iterator[bytes]:
    with gzip.GzipFile(fileobj=file) as stream:
        while part := stream.read(_CHUNK):
            yield part


def _xz(file: BinaryIO, limit: int) -> Iterator[bytes]:
    # The header names the memory that unpacking takes: up to 4 GiB, whatever the file's size.
    memory = max(limit, _DICTIONARY)
    return _streams(file, lambda: lzma.LZMADecompressor(memlimit=memory))


def _bzip2(file: BinaryIO, limit: int) -> Iterator[bytes]:
    return _streams(file, bz2.BZ2Decompressor)


_PACKED: dict[bytes, Callable[[BinaryIO, int], Iterator[bytes]]] = {
    GZIP_MAGIC: _gzip,
    b"\xfd7zXZ": _xz,
    b"BZh": _bzip2,
}


def _streams(file: BinaryIO, begin: Callable[[], Any]) -> Iterator[bytes]:
    """All streams of `file`, one after another; what follows the last and is none is left out.

    Input goes in by small pieces, since each stream gives back a copy of what follows it: a file of
    many short streams would take the square of its size.
    """
    stream = begin()
    while True:
        if stream.eof:
            data = stream.unused_data or file.read(_INPUT)
            if not data:
                return
            stream = begin()
            try:
                part = stream.decompress(data, _CHUNK)
            except (OSError, lzma.LZMAError):
                return
        elif stream.needs_input:
            data = file.read(_INPUT)
            if not data:
                raise EOFError("it ends before its stream does")
            part = stream.decompress(data, _CHUNK)
        else:
            part = stream.decompress(b"", _CHUNK)
        yield part


_TIMEOUT_SECONDS = 30


def fetch(urls: Sequence[str], file: str, checksum: str, folder: Path) -> Path:
    """`file` in `folder`, downloaded from the first of `urls` that gives it, unless it is there.

    A file with another checksum is never left in the folder: pooch writes beside it and moves the
    finished file.

    Args:
        urls: folders that hold the file, ending in a slash.
        file: its name.
        checksum: "algorithm:hex".
        folder: where it goes; made if it does not exist.

    Raises:
        ValueError: what was downloaded has another checksum.
        OSError: no address answered, or the folder cannot be written.
    """
    import pooch
    import requests

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
                reason = f"{url}{file}: {_reason(error)}"
            except ValueError:
                raise ValueError(
                    f"{url}{file}: expected the checksum {checksum}, got another: the download is "
                    "damaged or the file has changed; try again, or put the file in a data folder"
                ) from None
    raise OSError(
        f"cannot download {file} ({reason}): check the connection, or put the files in a folder "
        "and name it as the data folder"
    )


def _reason(error: Exception) -> str:
    """One short phrase: requests' own text for a refused connection runs over five lines."""
    response = getattr(error, "response", None)
    if response is not None:
        return f"the server answered {response.status_code}"
    return {
        "ConnectTimeout": "no answer in time",
        "ReadTimeout": "no answer in time",
        "ChunkedEncodingError": "the connection broke off",
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
        """Pooch calls this when the file is whole; the bar stops with its context."""
