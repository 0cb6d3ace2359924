"""The IDX format of the MNIST files (Y. LeCun, "The MNIST database of handwritten digits").

Two zero bytes, a type code, the number of dimensions, the dimensions as big-endian uint32, then the
elements. Only unsigned bytes (type 8) occur in the MNIST sets, and only they are read.
"""

from __future__ import annotations

import gzip
import io
import math
import os
import struct
import zlib
from pathlib import Path

import numpy as np

from dynsparse.data.packed import GZIP_MAGIC
from dynsparse.files.limits import HOW_TO_RAISE, read_limit
from dynsparse.typed import typed

_UNSIGNED_BYTE = 8


@typed
def read_idx(path: str | Path, dimensions: int) -> np.ndarray:
    """The array in an IDX file of unsigned bytes, plain or gzip (told by content): uint8.

    Args:
        path: the file.
        dimensions: how many dimensions the array must have; 3 for pictures, 1 for labels.

    Raises:
        ValueError: not such a file: wrong magic number, another number of dimensions, fewer or
            more bytes than its header promises, a damaged gzip stream, or one that promises more
            than `dynsparse.files.limits.read_limit` allows.
        OSError: the file is missing or cannot be read.
    """
    path = Path(path)
    with open(path, "rb") as raw:
        zipped = raw.read(2) == GZIP_MAGIC
        raw.seek(0)
        if not zipped:
            return _read(raw, path, dimensions, None)
        limit = read_limit(os.fstat(raw.fileno()).st_size)
        try:
            with gzip.GzipFile(fileobj=raw) as stream:
                return _read(stream, path, dimensions, limit)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{path}: damaged gzip stream ({error}); get the file again") from None


def _read(stream: io.BufferedIOBase, path: Path, dimensions: int, limit: int | None) -> np.ndarray:
    magic = stream.read(4)
    if len(magic) < 4:
        raise ValueError(f"{path}: expected an IDX file, got only {len(magic)} bytes")
    zero, code, rank = struct.unpack(">HBB", magic)
    if zero != 0 or code != _UNSIGNED_BYTE or rank != dimensions:
        raise ValueError(
            f"{path}: expected an IDX file of unsigned bytes with {dimensions} dimension(s) "
            f"(magic 0000080{dimensions}), got the magic {magic.hex()}"
        )
    header = stream.read(4 * rank)
    if len(header) < 4 * rank:
        raise ValueError(f"{path}: truncated inside the header; get the file again")
    shape = struct.unpack(f">{rank}I", header)
    size = math.prod(shape)
    if limit is not None and size > limit:
        raise ValueError(
            f"{path}: expected at most {limit:,} bytes for a packed file of this size, got the "
            f"shape {shape}: {HOW_TO_RAISE}, or unpack it yourself"
        )
    # One byte more than promised tells a file that is too long. The array is not allocated from
    # the header's numbers: a damaged header may promise terabytes.
    chunks = []
    missing = size + 1
    while missing > 0 and (chunk := stream.read(min(missing, 1 << 24))):
        chunks.append(chunk)
        missing -= len(chunk)
    body = b"".join(chunks)
    if len(body) < size:
        raise ValueError(
            f"{path}: truncated: expected {size} bytes for the shape {shape}, got {len(body)}; "
            "get the file again"
        )
    if len(body) > size:
        raise ValueError(f"{path}: more bytes than the {size} of the shape {shape}")
    return np.frombuffer(body, np.uint8).reshape(shape)
