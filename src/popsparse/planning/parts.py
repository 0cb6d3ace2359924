"""Cutting sizes into parts."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np


def ceil_div(a: Any, b: Any) -> Any:
    """a / b rounded up, of integers or integer arrays."""
    return -(-a // b)


@lru_cache(maxsize=8)
def all_partitions(tiles: int) -> np.ndarray:
    """Every (x, y, z) with x * y * z <= tiles, in ascending order: integers [3, count]."""
    pairs = [(x, y) for x in range(1, tiles + 1) for y in range(1, tiles // x + 1)]
    x, y = np.array(pairs, np.int64).reshape(-1, 2).T
    depth = tiles // (x * y)
    ends = np.cumsum(depth)
    z = np.arange(ends[-1]) - np.repeat(ends - depth, depth) + 1
    found = np.stack([np.repeat(x, depth), np.repeat(y, depth), z])
    found.setflags(write=False)
    return found


def even_parts(groups: int, parts: Any) -> Any:
    """The fewest parts that leave as many groups in the fullest part as `parts` do."""
    return -(-groups // -(-groups // parts))
