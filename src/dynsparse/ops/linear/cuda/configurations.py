"""How the kernels divide their work: one table for Hopper, one for other chips, as data.

No configuration is searched for while somebody trains: a search would stop the first step for
seconds, and again at every new batch. Neither table was measured: they hold what compiles cleanly,
onto the tensor cores, with asynchronous copies and without spilled registers (`tests/ops/cuda`
compiles them), for Hopper and, in 99 KB of shared memory, for every other chip. `benchmarks/gpu.py`
measures candidates and prints the table for compute capability 9.0 anew.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from dynsparse.ops.linear.cuda.chip import Chip
from dynsparse.ops.linear.cuda.precision import Numbers, numbers_of

BLOCKS = (16, 32, 64, 128)


class Rows(NamedTuple):
    """Of the kernel for forward and the gradient of the input.

    Attributes:
        samples, inputs: of a tile of X; `inputs` beyond the block's size join several blocks.
        warps, stages: of a program, and of its pipeline.
        tma: whether the copy engine moves the tiles, from capability 9.0 on (`rows_tma.py`).
        group: how many tiles of samples meet all block rows before the next.
    """

    samples: int
    inputs: int
    warps: int
    stages: int
    tma: bool = False
    group: int = 8


class Gradient(NamedTuple):
    """Of the kernel for the gradient of the values.

    Attributes:
        blocks: of one row that a program computes.
        samples: at a step of the sum.
        warps, stages: of a program, and of its pipeline.
        split: among how many programs the samples are divided at least.
        registers: of a thread at most, where the gradient of a bias comes with that of the values.
    """

    blocks: int
    samples: int
    warps: int
    stages: int
    split: int = 1
    registers: int | None = None


class Table(NamedTuple):
    """By block: tiles by falling size, of which the first is taken that occupies every
    multiprocessor; and the gradient's."""

    rows: dict[int, tuple[Rows, ...]]
    gradient: dict[int, Gradient]


# The tiles of a step in all stages take less than half of the shared memory where blocks are up to
# 64: two programs share a multiprocessor, and one loads while the other begins or ends.
HOPPER: dict[Numbers, Table] = {
    "16-bit": Table(
        {
            16: (Rows(128, 64, 4, 4), Rows(64, 64, 4, 4)),
            32: (Rows(128, 64, 4, 4), Rows(64, 64, 4, 4)),
            64: (Rows(128, 64, 4, 4), Rows(64, 64, 4, 4)),
            128: (Rows(128, 64, 8, 3), Rows(64, 64, 4, 3)),
        },
        {
            16: Gradient(8, 64, 4, 4),
            32: Gradient(4, 64, 4, 4),
            64: Gradient(2, 64, 4, 4),
            128: Gradient(1, 64, 8, 3),
        },
    ),
    "tf32": Table(
        {
            16: (Rows(128, 32, 4, 4), Rows(64, 32, 4, 4)),
            32: (Rows(128, 32, 4, 4), Rows(64, 32, 4, 4)),
            64: (Rows(128, 32, 4, 4), Rows(64, 32, 4, 4)),
            128: (Rows(128, 32, 8, 3), Rows(64, 32, 4, 3)),
        },
        {
            16: Gradient(8, 32, 4, 4),
            32: Gradient(4, 32, 4, 4),
            64: Gradient(2, 32, 4, 4),
            128: Gradient(1, 32, 8, 3),
        },
    ),
    # Sums that end take twice the registers.
    "tf32x3": Table(
        {
            16: (Rows(128, 32, 8, 4), Rows(64, 32, 4, 3)),
            32: (Rows(128, 32, 8, 3), Rows(64, 32, 4, 3)),
            64: (Rows(128, 32, 8, 4), Rows(64, 32, 4, 3)),
            128: (Rows(64, 32, 8, 3),),
        },
        {
            16: Gradient(8, 32, 4, 4),
            32: Gradient(4, 32, 8, 3),
            64: Gradient(2, 32, 8, 4),
            128: Gradient(1, 16, 8, 4),
        },
    ),
}

_FLOAT32 = {
    16: Gradient(8, 32, 4, 3),
    32: Gradient(4, 32, 8, 3),
    64: Gradient(2, 32, 8, 3),
    128: Gradient(1, 16, 8, 3),
}

OTHERS: dict[Numbers, Table] = {
    "16-bit": Table(
        {b: (Rows(128, 64, 4 if b < 128 else 8, 3), Rows(64, 64, 4, 3)) for b in BLOCKS},
        {b: Gradient(128 // b, 64, 4 if b < 128 else 8, 3) for b in BLOCKS},
    ),
    "tf32": Table({b: (Rows(64, 32, 4, 3),) for b in BLOCKS}, _FLOAT32),
    "tf32x3": Table(
        {
            16: (Rows(64, 32, 4, 3),),
            32: (Rows(64, 32, 4, 3),),
            64: (Rows(64, 16, 4, 3),),
            128: (Rows(64, 16, 8, 3),),
        },
        _FLOAT32,
    ),
}


def table_of(dtype: torch.dtype, chip: Chip) -> Table:
    """The configurations for numbers of `dtype` on a chip."""
    return (HOPPER if chip.capability == (9, 0) else OTHERS)[numbers_of(dtype)]


def rows_for(b: int, dtype: torch.dtype, batch: int, rows: int, chip: Chip) -> Rows:
    """The configuration for `rows` block rows of blocks of `b` over a batch."""
    known = table_of(dtype, chip).rows[b]
    for one in known[:-1]:
        if -(-batch // one.samples) * rows >= chip.multiprocessors:
            return one
    return known[-1]


def gradient_for(
    b: int, dtype: torch.dtype, nnz: int, rows: int, batch: int, chip: Chip
) -> Gradient:
    """The configuration for `nnz` blocks of `b` in `rows` block rows, over a batch.

    Few large blocks make few programs: then samples are divided among several, as long as that
    leaves each enough of them.
    """
    c = table_of(dtype, chip).gradient[b]
    programs = nnz / c.blocks + rows / 2  # a row's last lacks half of its blocks
    split = c.split
    while split < 8 and programs * split < chip.multiprocessors and batch >= 8 * split * c.samples:
        split *= 2
    return c._replace(split=split)


def sums_of(chip: Chip) -> int:
    """Rows of the smallest tile of the tensor cores: of ones, whose product with dY is the gradient
    of a bias."""
    return 64 if chip.capability[0] in (9, 10, 11) else 16


def group_of(samples: int, features: int, dtype: torch.dtype, chip: Chip) -> int:
    """How many tiles of samples meet all block rows before the next: these tiles of X take up to a
    third of the L2 cache."""
    return max(1, min(8, chip.cache // 3 // (samples * features * dtype.itemsize)))
