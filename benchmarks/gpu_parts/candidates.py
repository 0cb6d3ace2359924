"""Configurations to measure beside those of the tables, by what is multiplied and block.

Only a measurement tells whether tiles of 256 samples with two stages beat two programs of 128 on a
multiprocessor, how many blocks of the gradient a program should take, among how many programs to
divide the samples, and whether the copy engine beats pointers.
"""

from __future__ import annotations

from dynsparse.ops.linear.cuda.chip import Numbers
from dynsparse.ops.linear.cuda.configurations import Gradient, Rows

_NARROW = (
    Rows(128, 64, 4, 4), Rows(128, 64, 4, 3), Rows(256, 64, 8, 2), Rows(256, 64, 8, 3),
    Rows(256, 32, 4, 4), Rows(128, 128, 4, 3), Rows(64, 64, 4, 4),
)  # fmt: skip
ROWS: dict[Numbers, dict[int, tuple[Rows, ...]]] = {
    "16-bit": {
        16: _NARROW,
        32: _NARROW,
        64: (
            Rows(128, 64, 4, 4), Rows(128, 64, 4, 3), Rows(256, 64, 8, 2), Rows(256, 64, 8, 3),
            Rows(64, 64, 4, 4),
        ),
        128: (
            Rows(128, 64, 8, 3), Rows(128, 64, 8, 2), Rows(64, 64, 4, 3),
        ),
    },
    "tf32": {
        16: (Rows(128, 32, 4, 4), Rows(128, 32, 8, 4), Rows(64, 32, 4, 3)),
        32: (Rows(128, 32, 4, 4), Rows(128, 32, 8, 3), Rows(64, 32, 4, 3)),
        64: (Rows(128, 32, 4, 4), Rows(128, 32, 8, 4), Rows(64, 32, 4, 3)),
        128: (Rows(128, 32, 8, 3), Rows(64, 32, 4, 3), Rows(64, 32, 8, 3)),
    },
    "tf32x3": {
        16: (Rows(128, 32, 8, 4), Rows(128, 32, 4, 4), Rows(64, 32, 4, 3)),
        32: (Rows(128, 32, 8, 3), Rows(128, 32, 4, 4), Rows(64, 32, 4, 3)),
        64: (Rows(128, 32, 8, 4), Rows(128, 16, 8, 4), Rows(64, 32, 4, 3)),
        128: (Rows(64, 32, 8, 3), Rows(64, 16, 8, 3), Rows(128, 16, 8, 3)),
    },
}  # fmt: skip

TMA: dict[int, tuple[Rows, ...]] = {
    64: (Rows(128, 64, 4, 4), Rows(128, 64, 4, 3), Rows(256, 64, 8, 2)),
    128: (Rows(128, 64, 8, 3), Rows(128, 64, 8, 2)),
}
"""Of `tma.rows`, for 16-bit numbers."""

GRADIENT: dict[Numbers, dict[int, tuple[Gradient, ...]]] = {
    "16-bit": {
        16: (Gradient(8, 64, 4, 4), Gradient(8, 64, 4, 3), Gradient(16, 64, 8, 3)),
        32: (
            Gradient(4, 64, 4, 4), Gradient(4, 64, 4, 3), Gradient(8, 64, 8, 2),
            Gradient(8, 64, 8, 3),
        ),
        64: (
            Gradient(2, 64, 4, 4), Gradient(2, 64, 4, 3), Gradient(4, 64, 8, 2),
            Gradient(4, 64, 8, 3), Gradient(2, 64, 4, 4, split=2),
            Gradient(4, 64, 8, 3, split=2), Gradient(2, 128, 4, 3),
        ),
        128: (
            Gradient(1, 64, 8, 3), Gradient(1, 64, 8, 3, split=2), Gradient(1, 64, 8, 3, split=4),
            # With bias its programs take too many registers for two on a multiprocessor.
            Gradient(1, 64, 8, 3, registers=128), Gradient(1, 64, 8, 3, split=2, registers=128),
            Gradient(2, 64, 8, 3, split=2),
        ),
    },
    "tf32": {
        16: (Gradient(8, 32, 4, 4), Gradient(8, 32, 4, 3)),
        32: (Gradient(4, 32, 4, 4), Gradient(4, 32, 8, 3)),
        64: (Gradient(2, 32, 4, 4), Gradient(2, 32, 8, 4)),
        128: (Gradient(1, 32, 8, 3), Gradient(1, 32, 8, 3, split=2)),
    },
    "tf32x3": {
        16: (Gradient(8, 32, 4, 4), Gradient(8, 32, 4, 3)),
        32: (Gradient(4, 32, 4, 3), Gradient(4, 32, 8, 3)),
        64: (Gradient(2, 32, 8, 4), Gradient(2, 32, 8, 3)),
        128: (Gradient(1, 16, 8, 4), Gradient(1, 16, 8, 4, split=2)),
    },
}  # fmt: skip
