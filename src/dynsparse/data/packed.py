"""Unpacks gzip, xz and bzip2, told by content, up to a limit."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from dynsparse.files.limits import HOW_TO_RAISE, LimitError, read_limit

GZIP_MAGIC = b"\x1f\x8b"
DAMAGE = (OSError, EOFError, ValueError, lzma.LZMAError, zlib.error)
"""What unpacking a damaged stream raises."""

_CHUNK = 1 << 20
_INPUT = 1 << 16
_DICTIONARY = 256 << 20  # xz -9 asks for 65 MiB


def unpacked(content: bytes) -> bytes:
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
