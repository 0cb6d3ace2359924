"""Configurations of `configurations.py` that measurements should compare, by block.

For 16-bit numbers on Hopper, where little is known before it is measured: whether the copy engine
beats pointers, whether a tile of 256 samples beats two programs that share a multiprocessor, how
many blocks of the gradient a program should take and among how many programs to split the samples.
"""

from __future__ import annotations

from dynsparse.ops.linear.cuda.configurations import Gradient, Rows

__all__ = ["GRADIENT_CANDIDATES", "ROWS_CANDIDATES"]

ROWS_CANDIDATES: dict[int, tuple[Rows, ...]] = {
    16: (
        Rows(128, 64, 4, 4),
        Rows(256, 64, 8, 3),
        Rows(128, 128, 4, 3),
        Rows(256, 32, 4, 4),
    ),
    32: (
        Rows(128, 64, 4, 4),
        Rows(256, 64, 8, 3),
        Rows(256, 32, 4, 4),
        Rows(128, 128, 4, 3),
    ),
    64: (
        Rows(128, 64, 4, 4),
        Rows(256, 64, 8, 3),
        Rows(128, 64, 4, 4, "tma"),
        Rows(128, 64, 4, 3, "tma"),
        Rows(256, 64, 8, 3, "tma"),
        Rows(256, 64, 4, 2, "swapped"),
        Rows(256, 64, 4, 4, "swapped"),
    ),
    128: (
        Rows(128, 64, 8, 3),
        Rows(128, 64, 8, 3, "tma"),
        Rows(128, 64, 4, 3, "tma"),
        Rows(128, 128, 8, 2, "tma"),
        Rows(256, 64, 8, 3, "tma"),
        Rows(256, 64, 8, 3, "swapped"),
    ),
}

GRADIENT_CANDIDATES: dict[int, tuple[tuple[Gradient, int], ...]] = {
    16: ((Gradient(8, 64, 4, 4), 1), (Gradient(16, 64, 8, 3), 1)),
    32: ((Gradient(4, 64, 4, 4), 1), (Gradient(8, 64, 8, 3), 1)),
    64: (
        (Gradient(2, 64, 4, 4), 1),
        (Gradient(2, 128, 4, 3), 1),
        (Gradient(4, 64, 8, 3), 1),
        (Gradient(4, 64, 8, 3), 2),
    ),
    128: (
        (Gradient(1, 64, 8, 3), 1),
        (Gradient(1, 64, 8, 3), 2),
        (Gradient(1, 64, 4, 4), 2),
        (Gradient(2, 64, 8, 3), 2),
    ),
}
"""Each with the number of programs that the samples of a chunk are divided among."""
