"""Arrays of numbers in npz files, each compared with its promised size before it is unpacked.

`numpy.load` makes room for what an array's header promises and evaluates the header as Python; here
the header must be written as NumPy writes it, and the archive must hold what it promises.
"""

from __future__ import annotations

import math
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np

from dynsparse.files.limits import HOW_TO_RAISE, LimitError, read_limit

DAMAGE = (
    OSError, ValueError, EOFError, NotImplementedError, RuntimeError, struct.error,
    zipfile.BadZipFile, zlib.error,
)  # fmt: skip
"""What opening and reading a damaged archive raises; RuntimeError: an encrypted one."""

_MAGIC = b"\x93NUMPY\x01\x00"
_HEADER = re.compile(
    rb"\{'descr': '([<>|=](?:[iu][1248]|f[248]|b1))', 'fortran_order': (?:True|False), "
    rb"'shape': \(((?:\d{1,18}, ?)*(?:\d{1,18})?)\), *\} *\n"
)
_MOST_MEMBERS = 100_000


class Arrays:
    """The arrays of an open npz file."""

    def __init__(self, archive: zipfile.ZipFile, limit: int) -> None:
        self._archive, self._limit = archive, limit
        members = archive.infolist()
        if len(members) > _MOST_MEMBERS:
            raise LimitError(f"expected at most {_MOST_MEMBERS:,} arrays, got {len(members):,}")
        self._members = {one.filename.removesuffix(".npy"): one for one in members}

    @property
    def names(self) -> list[str]:
        return list(self._members)

    def __contains__(self, name: str) -> bool:
        return name in self._members

    def read(self, name: str) -> np.ndarray:
        """The array `name`, of integers, floats or bools.

        Raises:
            KeyError: no such array.
            LimitError: one that is larger than the file's size allows.
            What `DAMAGE` lists: an array that is damaged or holds something else.
        """
        member = self._members[name]
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError(f"expected arrays stored or deflated, got {member.compress_type}")
        with self._archive.open(member) as stream:
            dtype, shape, start = _read_header(stream)
            size = math.prod(shape) * dtype.itemsize
            if start + size != member.file_size:
                raise ValueError(
                    f"expected {start + size:,} bytes for an array of the shape {shape}, the "
                    f"archive promises {member.file_size:,}"
                )
            if size > self._limit:
                raise LimitError(
                    f"expected at most {self._limit:,} bytes for an array in a file of this size, "
                    f"got {size:,}: {HOW_TO_RAISE}"
                )
            content = stream.read(size)
            # The checksum is compared where the end is met.
            if len(content) != size or stream.read(1):
                raise EOFError(f"expected {size:,} bytes, got {len(content):,}")
        return np.frombuffer(content, dtype).reshape(shape)


@contextmanager
def open_arrays(file: Path) -> Iterator[Arrays]:
    """The arrays of the npz file `file`.

    Raises:
        What `DAMAGE` lists: no npz file, or a damaged one.
    """
    limit = read_limit(file.stat().st_size)
    try:
        archive = zipfile.ZipFile(file)
    except zipfile.BadZipFile as error:
        raise ValueError(f"not an npz archive ({error})") from None
    with archive:
        yield Arrays(archive, limit)


def _read_header(stream: IO[bytes]) -> tuple[np.dtype, tuple[int, ...], int]:
    """Type and shape, and where the array's bytes begin."""
    magic = stream.read(10)
    if len(magic) < 10 or magic[:8] != _MAGIC:
        raise ValueError("expected an array as NumPy writes it")
    length = struct.unpack("<H", magic[8:])[0]
    match = _HEADER.fullmatch(stream.read(length))
    if match is None:
        raise ValueError("expected an array of numbers as NumPy writes it")
    shape = tuple(int(part) for part in match[2].decode().split(",") if part.strip())
    if len(shape) > 8:
        raise ValueError(f"expected at most 8 dimensions, got {len(shape)}")
    return np.dtype(match[1].decode()), shape, 10 + length
