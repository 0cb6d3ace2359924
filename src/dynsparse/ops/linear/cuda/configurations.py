"""How the kernels divide their work: tile sizes by chip, and lists derived from the pattern.

There is one table for Hopper, measured on an H100 by `benchmarks/gpu.py`, and a conservative one
for all other chips, which was not measured: it holds what compiles to tensor core instructions with
asynchronous copies and without spilled registers (`tests/ops/cuda` compiles both), in 99 KB of
shared memory. Nothing is tuned during training, which would stop the first step, and each new batch
size, for seconds.

The lists have shapes that depend on the sizes of a layer alone, and nothing synchronises, so they
can be rebuilt in place, inside a captured graph too.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dynsparse.ops.linear.cuda.chip import Chip, Numbers, numbers_of
from dynsparse.ops.linear.layer_index import LayerIndex
from dynsparse.pattern.on_device import find_slots

BLOCKS = (16, 32, 64, 128)


class Rows(NamedTuple):
    """Configuration of the kernel for forward and the gradient of the input.

    Attributes:
        samples, inputs: sizes of a tile of X; if `inputs` is larger than a block, a step takes
            several blocks.
        warps: number of warps of a program.
        stages: number of stages of its pipeline.
        group: number of tiles of samples that take all block rows before the next tiles.
        tma: whether the copy engine loads tiles, where the activations allow it.
    """

    samples: int
    inputs: int
    warps: int
    stages: int
    group: int = 2
    tma: bool = False


class Gradient(NamedTuple):
    """Configuration of the kernel for the gradient of the values.

    Attributes:
        blocks: number of blocks of one row that a program computes.
        samples: number of samples of one step of the sum.
        warps: number of warps of a program.
        stages: number of stages of its pipeline.
        split: least number of programs that the samples are divided among.
        tma: whether the copy engine loads tiles, where the activations allow it; up to two blocks.
    """

    blocks: int
    samples: int
    warps: int
    stages: int
    split: int = 1
    tma: bool = False


class Table(NamedTuple):
    """The configurations of the kernels by block size.

    Attributes:
        rows: tiles by falling size; the first that gives every multiprocessor enough is used.
        gradient: the configuration for the gradient of the values.
    """

    rows: dict[int, tuple[Rows, ...]]
    gradient: dict[int, Gradient]


HOPPER: dict[Numbers, Table] = {
    "16-bit": Table(
        {
            16: (Rows(256, 64, 8, 2), Rows(128, 64, 4, 4)),
            32: (Rows(256, 32, 4, 3), Rows(128, 64, 4, 3)),
            64: (Rows(128, 64, 4, 3, tma=True), Rows(64, 64, 4, 3, tma=True)),
            128: (Rows(128, 64, 4, 3, tma=True), Rows(64, 64, 4, 3, tma=True)),
        },
        {
            16: Gradient(16, 64, 8, 3),
            32: Gradient(8, 64, 4, 3),
            64: Gradient(2, 64, 4, 4, tma=True),
            128: Gradient(1, 64, 8, 4, tma=True),
        },
    ),
    "tf32": Table(
        {
            16: (Rows(128, 32, 4, 4), Rows(64, 32, 4, 3)),
            32: (Rows(128, 32, 8, 3), Rows(64, 32, 4, 3)),
            64: (Rows(128, 32, 4, 4), Rows(64, 32, 4, 3)),
            128: (Rows(128, 32, 8, 3), Rows(64, 32, 4, 3)),
        },
        {
            16: Gradient(8, 32, 4, 3),
            32: Gradient(4, 32, 4, 4),
            64: Gradient(2, 32, 4, 4),
            128: Gradient(1, 32, 8, 3),
        },
    ),
    # Sums that are split take twice the registers.
    "tf32x3": Table(
        {
            16: (Rows(64, 32, 4, 3),),
            32: (Rows(128, 32, 8, 3), Rows(64, 32, 4, 3)),
            64: (Rows(64, 32, 4, 3),),
            128: (Rows(128, 32, 8, 3), Rows(64, 32, 4, 3)),
        },
        {
            16: Gradient(8, 32, 4, 4),
            32: Gradient(4, 32, 4, 4),
            64: Gradient(2, 32, 4, 4),
            128: Gradient(1, 32, 8, 3),
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
        {
            **{b: (Rows(128, 64, 4, 3), Rows(64, 64, 4, 3)) for b in (16, 32, 64)},
            128: (Rows(128, 64, 8, 3), Rows(64, 64, 4, 3)),
        },
        {
            **{b: Gradient(128 // b, 64, 4, 3) for b in (16, 32, 64)},
            128: Gradient(1, 64, 8, 3),
        },
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
    """Return the configurations for numbers of `dtype` on a chip."""
    return (HOPPER if chip.capability == (9, 0) else OTHERS)[numbers_of(dtype)]


def choose_rows(b: int, dtype: torch.dtype, batch: int, rows: int, chip: Chip) -> Rows:
    """Choose the configuration for `rows` block rows of blocks of `b` over a batch.

    The tiles are large if there are at least four for each multiprocessor.
    """
    tiles = table_of(dtype, chip).rows[b]
    for config in tiles[:-1]:
        if -(-batch // config.samples) * rows >= 4 * chip.multiprocessors:
            return config
    return tiles[-1]


def choose_gradient(
    b: int, dtype: torch.dtype, nnz: int, rows: int, batch: int, chip: Chip
) -> Gradient:
    """Choose the configuration for `nnz` blocks of `b` in `rows` block rows, over a batch.

    Few large blocks make few programs: samples are then divided among several, as long as each
    has enough of them and all of them run at the same time.
    """
    c = table_of(dtype, chip).gradient[b]
    # The last program of a row has half of its blocks.
    programs = nnz / c.blocks + rows / 2 * (c.blocks > 1)
    split = c.split
    while (
        split < 8
        and 2 * split * programs <= chip.multiprocessors
        and batch >= 8 * split * c.samples
    ):
        split *= 2
    return c._replace(split=split)


def smallest_tile_rows(chip: Chip) -> int:
    """Return the rows of the smallest tile of the tensor cores.

    A matrix of ones has so many rows; its product with dY is the gradient of a bias.
    """
    return 64 if chip.capability[0] in (9, 10, 11) else 16


# ---- lists derived from a pattern ----


def rows_by_length(p: LayerIndex) -> Tensor:
    """Return the block rows by falling number of blocks, equal ones in order: int32 [out / b, 8].

    Each record holds the row, the start and end of its list, and the block column and slot of its
    first entry; the rest is unused.
    """
    return p.get_derived("rows by length", lambda p: _sort_by_length(p.row_ptr, p.cols, p.slots))


def columns_by_length(p: LayerIndex) -> Tensor:
    """Return the block columns likewise: int32 [in / b, 8]."""
    return p.get_derived(
        "columns by length", lambda p: _sort_by_length(p.col_ptr, *p.column_order())
    )


def chunks(p: LayerIndex, size: int) -> Tensor:
    """Return row and first slot of each chunk of up to `size` blocks of one row: int32 [2, n].

    n = nnz // size + rows is an upper bound for every pattern; unused entries have the row -1.
    """
    return p.get_derived(("chunks", size), lambda p: _chunks(p.row_ptr, p.nnz, size))


# These tensors may be those of several layers of equal shape and number of blocks, [layers, ...].


def _sort_by_length(ptr: Tensor, blocks: Tensor, slots: Tensor) -> Tensor:
    order = ptr.diff().argsort(dim=-1, descending=True, stable=True)
    begin, end = ptr.narrow(-1, 0, order.shape[-1]), ptr.narrow(-1, 1, order.shape[-1])
    fields = [order.int(), begin.gather(-1, order), end.gather(-1, order)]
    if blocks.shape[-1]:
        first = fields[1].clamp(max=blocks.shape[-1] - 1)
        fields += [blocks.gather(-1, first.long()), find_slots(first, slots)]
    fields += [torch.zeros_like(fields[0])] * (8 - len(fields))
    return torch.stack(fields, -1)


def _chunks(ptr: Tensor, nnz: int, size: int) -> Tensor:
    rows = ptr.shape[-1] - 1
    # Rows without blocks have a chunk too, which sums their gradient of the bias.
    each = ((ptr.diff() + (size - 1)) // size).clamp_(min=1)
    ends = each.cumsum(-1)
    number = torch.arange(nnz // size + rows, device=ptr.device).repeat(*ptr.shape[:-1], 1)
    row = torch.searchsorted(ends, number, right=True)
    valid = row.clamp(max=rows - 1)
    start = ptr.gather(-1, valid) + (number - (ends - each).gather(-1, valid)) * size
    return torch.stack([torch.where(row < rows, row, -1), start], -2).int()
