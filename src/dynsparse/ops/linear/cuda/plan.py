"""What the kernels over blocks derive from a pattern, on its device: who computes what, and when.

Shapes depend on the sizes of a layer alone and nothing waits for the device, so that all of it can
be made anew in place, inside a captured graph too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dynsparse.encoding import slots_of
from dynsparse.ops.linear.layer_index import LayerIndex


def rows_in_turn(p: LayerIndex) -> Tensor:
    """The block rows, the longest first, equal ones in order: int32 [out / b, 8].

    Of each: the row, where its list starts and ends, and the block column and the slot of its first
    entry; the rest is not used.
    """
    return p.derived("rows in turn", lambda p: _longest_first(p.row_ptr, p.cols, p.slots))


def columns_in_turn(p: LayerIndex) -> Tensor:
    """The block columns, likewise: int32 [in / b, 8]."""
    return p.derived("columns in turn", lambda p: _longest_first(p.col_ptr, *p.by_columns()))


def chunks(p: LayerIndex, size: int) -> Tensor:
    """Block row and first slot of every chunk, up to `size` blocks of one row: int32 [2, n].

    n = nnz // size + rows is an upper bound for every pattern. Where no chunk is left, the row is
    -1.
    """
    return p.derived(("chunks", size), lambda p: _chunks(p.row_ptr, p.nnz, size))


def _longest_first(ptr: Tensor, blocks: Tensor, slots: Tensor) -> Tensor:
    order = ptr.diff().argsort(descending=True, stable=True)
    records = ptr.new_zeros(len(order), 8)
    records[:, 0] = order
    records[:, 1], records[:, 2] = ptr[:-1][order], ptr[1:][order]
    if len(blocks):
        first = records[:, 1].clamp(max=len(blocks) - 1)
        records[:, 3] = blocks[first]
        records[:, 4] = slots_of(first, slots)
    return records


def _chunks(ptr: Tensor, nnz: int, size: int) -> Tensor:
    rows = len(ptr) - 1
    # Rows without blocks have one, too, which adds up their part of the gradient of the bias.
    each = ((ptr.diff() + (size - 1)) // size).clamp_(min=1)
    ends = each.cumsum(0)
    number = torch.arange(nnz // size + rows, device=ptr.device)
    row = torch.searchsorted(ends, number, right=True)
    there = row.clamp(max=rows - 1)
    start = ptr[there] + (number - (ends - each)[there]) * size
    return torch.stack([torch.where(row < rows, row, -1), start]).int()
