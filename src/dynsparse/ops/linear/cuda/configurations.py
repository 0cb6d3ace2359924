"""How the kernels divide their work: tables by chip, kind of number and block, as data.

No configuration is searched for while somebody trains: a search would stop the first step for
seconds, and again at every new batch. The first entries of the tables hold what compiles cleanly
for each family of chips: onto the tensor cores, with asynchronous copies, without spilled
registers (`tests/ops/cuda` compiles all of them). Which is fastest only measurements can say;
`benchmarks/gpu.py` times the candidates.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from dynsparse.ops.linear.cuda.chip import Chip
from dynsparse.ops.linear.cuda.precision import precision_of

__all__ = [
    "BLOCKS",
    "GRADIENT",
    "ROWS",
    "Family",
    "Gradient",
    "Numbers",
    "Rows",
    "family_of",
    "gradient_for",
    "group_of",
    "numbers_of",
    "rows_for",
    "split_of",
    "sums_of",
]

BLOCKS = (16, 32, 64, 128)

Family = Literal["80", "86", "90", "100"]
Numbers = Literal["16-bit", "tf32", "tf32x3"]
Way = Literal["pointers", "tma", "swapped"]


class Rows(NamedTuple):
    """Of the kernel for forward and the gradient of the input.

    Attributes:
        samples, inputs: of a tile of X; `inputs` beyond the block's size join several blocks.
        warps, stages: of a program, and of its pipeline.
        way: who moves the tiles: "pointers"; or from capability 9.0 on the copy engine: "tma", and
            "swapped", which computes Y^T = W X^T (`rows_tma.py`).
    """

    samples: int
    inputs: int
    warps: int
    stages: int
    way: Way = "pointers"


class Gradient(NamedTuple):
    """Of the kernel for the gradient of the values.

    Attributes:
        blocks: of one row that a program computes.
        samples: at a step of the sum.
        warps, stages: of a program, and of its pipeline.
    """

    blocks: int
    samples: int
    warps: int
    stages: int


def family_of(capability: tuple[int, int]) -> Family:
    """The chips that a capability is like: by tensor cores, and by shared memory for a program.

    "80": `mma.sync`, 163 KB (8.0, 8.7); "86": `mma.sync`, 99 KB (8.6, 8.9, 12, and what is not
    known); "90": `wgmma`, 227 KB; "100": `tcgen05`, 227 KB (10, 11).
    """
    major, minor = capability
    if major == 8:
        return "80" if minor in (0, 7) else "86"
    if major == 9:
        return "90"
    return "100" if major in (10, 11) else "86"


def numbers_of(dtype: torch.dtype) -> Numbers:
    """What the tensor cores multiply."""
    return precision_of(dtype) if dtype is torch.float32 else "16-bit"


RowsTable = dict[int, tuple[Rows, ...]]
"""By block; by falling size of the tile, the first that occupies every multiprocessor is taken."""

GradientTable = dict[int, Gradient]
"""By block."""

# The tiles of a step in all stages take less than half of the shared memory where blocks are up to
# 64: two programs share a multiprocessor, and one loads while the other begins or ends.
_ROWS: RowsTable = {
    16: (Rows(128, 64, 4, 4), Rows(64, 64, 4, 4)),
    32: (Rows(128, 64, 4, 4), Rows(64, 64, 4, 4)),
    64: (Rows(128, 64, 4, 4), Rows(64, 64, 4, 4)),
    128: (Rows(128, 64, 8, 3), Rows(64, 64, 4, 3)),
}
_GRADIENT: GradientTable = {
    16: Gradient(8, 64, 4, 4),
    32: Gradient(4, 64, 4, 4),
    64: Gradient(2, 64, 4, 4),
    128: Gradient(1, 64, 8, 3),
}
# As many bytes of float32.
_ROWS_32: RowsTable = {b: tuple(c._replace(inputs=32) for c in cs) for b, cs in _ROWS.items()}
_GRADIENT_32: GradientTable = {b: c._replace(samples=32) for b, c in _GRADIENT.items()}

# What spills registers elsewhere: `mma.sync` takes both operands from registers, three times over;
# and some tiles of tf32 on the latest chips.
_ROWS_80_TF32X3: RowsTable = _ROWS_32 | {
    64: (Rows(128, 32, 8, 4), Rows(64, 32, 4, 4)),
    128: (Rows(64, 32, 8, 4),),
}
_GRADIENT_80_TF32X3: GradientTable = _GRADIENT_32 | {64: Gradient(2, 32, 8, 4)}
_ROWS_100_TF32: RowsTable = _ROWS_32 | {
    32: (Rows(128, 32, 8, 4), Rows(64, 32, 4, 4)),
    64: (Rows(128, 32, 4, 4), Rows(64, 32, 8, 4)),
}


def _three_stages(rows: RowsTable) -> RowsTable:
    """For chips whose shared memory would hold one program of four."""
    return {b: tuple(c._replace(stages=3) for c in cs) for b, cs in rows.items()}


def _three_stages_too(gradient: GradientTable) -> GradientTable:
    return {b: c._replace(stages=3) for b, c in gradient.items()}


ROWS: dict[Family, dict[Numbers, RowsTable]] = {
    "80": {"16-bit": _ROWS, "tf32": _ROWS_32, "tf32x3": _ROWS_80_TF32X3},
    "86": {
        "16-bit": _three_stages(_ROWS),
        "tf32": _three_stages(_ROWS_32),
        "tf32x3": _three_stages(_ROWS_80_TF32X3),
    },
    "90": {"16-bit": _ROWS, "tf32": _ROWS_32, "tf32x3": _ROWS_32},
    "100": {"16-bit": _ROWS, "tf32": _ROWS_100_TF32, "tf32x3": _ROWS_32},
}

GRADIENT: dict[Family, dict[Numbers, GradientTable]] = {
    "80": {"16-bit": _GRADIENT, "tf32": _GRADIENT_32, "tf32x3": _GRADIENT_80_TF32X3},
    "86": {
        "16-bit": _three_stages_too(_GRADIENT),
        "tf32": _three_stages_too(_GRADIENT_32),
        "tf32x3": _three_stages_too(_GRADIENT_80_TF32X3),
    },
    "90": {"16-bit": _GRADIENT, "tf32": _GRADIENT_32, "tf32x3": _GRADIENT_32},
    "100": {"16-bit": _GRADIENT, "tf32": _GRADIENT_32, "tf32x3": _GRADIENT_32},
}


def rows_for(b: int, dtype: torch.dtype, batch: int, rows: int, chip: Chip) -> Rows:
    """The configuration for `rows` block rows of blocks of `b` over a batch."""
    known = ROWS[family_of(chip.capability)][numbers_of(dtype)][b]
    for one in known[:-1]:
        if -(-batch // one.samples) * rows >= chip.multiprocessors:
            return one
    return known[-1]


def gradient_for(b: int, dtype: torch.dtype, chip: Chip) -> Gradient:
    """The configuration for blocks of `b`."""
    return GRADIENT[family_of(chip.capability)][numbers_of(dtype)][b]


def sums_of(chip: Chip) -> int:
    """Rows of the smallest tile of the tensor cores: of ones, whose product with dY is the gradient
    of a bias."""
    return 64 if family_of(chip.capability) in ("90", "100") else 16


def group_of(samples: int, features: int, dtype: torch.dtype, chip: Chip) -> int:
    """How many tiles of samples meet all block rows before the next: these tiles of X take up to a
    third of the L2 cache."""
    return max(1, min(8, chip.cache // 3 // (samples * features * dtype.itemsize)))


def split_of(
    c: Gradient, b: int, nnz: int, rows: int, batch: int, itemsize: int, chip: Chip
) -> int:
    """Among how many programs the samples of a chunk are divided.

    Few large blocks make few programs; and a few programs more than the multiprocessors take at
    once make a second wave as long as the first. Time is counted in loops over the whole batch;
    the partial sums, written and read in float32 from memory, cost what they cost beside the
    reading of X from the L2 cache, about twice as fast. A tenth must be gained: the model is not
    finer than that.
    """
    programs = nnz / c.blocks + rows / 2  # half a chunk a row is missing on average
    at_once = 2 * chip.multiprocessors
    best, least = 1, float("inf")
    for split in (1, 2, 4, 8):
        if split > 1 and batch < 4 * split * c.samples:
            break
        waves = -(-programs * split // at_once) / split
        sums = 0.0 if split == 1 else split * 16 * b / (batch * itemsize) * programs / at_once
        if waves + sums < 0.9 * least:
            best, least = split, waves + sums
    return best
