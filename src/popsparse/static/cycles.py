"""Instruction counts of the static kernels (section 6.3 of docs/popsparse-formulas.md).

All results are cycles of a tile; a worker's instruction takes `workers` of them. Arguments may be
arrays. Partial sums have the type of the data.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from popsparse.planning.data_types import DataType

Numbers = Any
_PATH_BYTES = 8  # The data path, and a load of weights: 64 bits.


def element_product(rows: Numbers, nz: Numbers, n: int, dtype: DataType) -> Numbers:
    """Instructions of a worker with `rows` rows of `nz` elements in all, times n columns.

    The printed form counts k elements for every one of m rows; here m k is the number of elements,
    so it serves for rows of any length.
    """
    rows, more = np.asarray(rows), np.asarray(nz) - rows  # Each row's first element is apart.
    if dtype.size == 2:
        if n == 4:
            return 31 + rows * 7 + more * 2
        if n == 8:
            return 31 + rows * 8 + more * 3
        whole, rest = n // 8, n % 8 != 0
        return 33 + rows * (11 + whole * 14 + rest * 9) + more * (whole * 3 + rest * 2)
    if n == 2:
        return 29 + rows * 5 + more * 2
    if n == 4:
        return 30 + rows * 6 + more * 3
    whole, rest = n // 4, n % 4 != 0
    return 31 + rows * (12 + (whole + rest) * 10) + more * (whole * 3 + rest * 2)


def _block_constants(block: int, n: int, dtype: DataType) -> tuple[int, int, int]:
    """Of a worker with n columns: start, each row, each block."""
    if dtype.size == 2:
        if block == 4:
            return 17, 1, (7 if n <= 2 else 13) + n
        return 13, 1, 14 + 2 * (n - 1) if block == 8 else 19 + 4 * (n - 1)
    if block == 4:
        return 13, 1, 12 + 4 * (n - 1)
    if block == 8:
        return 13, 4, 19 + 8 * (n - 1)
    # A block is stored as two halves of 16 x 8.
    return 16, 4, 58 if n == 1 else 2 * (37 + 8 * (n - 1))


def block_product(
    rows: Numbers, blocks: Numbers, n: int, block: int, dtype: DataType, workers: int
) -> Numbers:
    """Cycles of a tile with `rows` block rows of `blocks` blocks in all; workers share n."""
    start, by_row, by_block = _block_constants(block, -(-n // workers), dtype)
    load = block * block * dtype.size // _PATH_BYTES
    return (
        30
        + start * workers
        + np.asarray(rows) * (by_row * workers + 17)
        + np.asarray(blocks) * (16 + load + by_block * workers)
    )


def zero(rows: Numbers, n: int, block: int, dtype: DataType, workers: int) -> Numbers:
    """Zeroing the partials; only 8 x 8 and 16 x 16 float32 blocks need it."""
    if dtype.size == 2 or block < 8:
        return 0 * np.asarray(rows)
    words = np.asarray(rows) * block * n * dtype.size // _PATH_BYTES
    return workers * (12 + -(-words // workers))


def reduce(vectors: Numbers, partials: Numbers, dtype: DataType, workers: int) -> Numbers:
    """Cycles of a tile that adds `partials` vectors into `vectors` results.

    The printed form has `depth` partials for every result; partials = vectors x depth gives it.
    A vector is 8 float16 or 4 float32 numbers.
    """
    store = 8 if dtype.size == 2 else 5
    share = -(-np.asarray(vectors) // workers)
    added = -(-np.asarray(partials) // workers)
    return workers * (16 + share * (5 + store) + added)
