"""IDX files, plain or validly compressed, with any header."""

from __future__ import annotations

import gzip
import struct

import numpy as np

from dynsparse.data import read_idx
from targets.common import folder, refused_as

_IMAGES = struct.pack(">HBB3I", 0, 8, 3, 2, 3, 4) + bytes(range(24))
_LABELS = struct.pack(">HBBI", 0, 8, 1, 5) + bytes(range(5))
_WAYS = 4

SEEDS = [
    b"\0" + _IMAGES,
    b"\1" + _LABELS,
    b"\2" + _IMAGES,
    b"\3" + _LABELS,
    b"\0" + gzip.compress(_IMAGES, mtime=0),
    b"\1" + gzip.compress(_LABELS, mtime=0),
]


def run(data: bytes) -> None:
    way, content = data[0] % _WAYS if data else 0, data[1:]
    dimensions = 1 if way & 1 else 3
    file = folder() / "idx"
    file.write_bytes(gzip.compress(content, 1, mtime=0) if way & 2 else content)
    with refused_as(ValueError):
        found = read_idx(file, dimensions)
        assert found.ndim == dimensions
        assert found.dtype == np.uint8
        assert found.size <= len(content) or not way & 2
