"""Rows of a sparse table, and the gradient of its values, in plain torch.

Work and memory go with the non-zeros of the rows that are looked up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dynsparse.ops.linear.naive import block_size_of
from dynsparse.pattern.index_arrays import slots_of


def _positions(
    ids: Tensor, values: Tensor, row_ptr: Tensor, cols: Tensor, slots: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of every block met: which id met it, its slot, the row inside, its columns [blocks, b]."""
    b = block_size_of(values)
    block_row = torch.div(ids, b, rounding_mode="floor")
    first = row_ptr[block_row].long()
    counts = row_ptr[block_row + 1].long() - first
    which = torch.repeat_interleave(torch.arange(len(ids), device=ids.device), counts)
    before = counts.cumsum(0) - counts
    entry = first[which] + torch.arange(len(which), device=ids.device) - before[which]
    inside = (ids % b)[which]
    columns = cols[entry].long()[:, None] * b + torch.arange(b, device=ids.device)
    return which, slots_of(entry, slots).long(), inside, columns


def forward(
    ids: Tensor, values: Tensor, row_ptr: Tensor, cols: Tensor, slots: Tensor, width: int
) -> Tensor:
    """ids int64 [n] -> [n, width]."""
    which, slot, inside, columns = _positions(ids, values, row_ptr, cols, slots)
    entries = values[slot][:, None] if values.dim() == 1 else values[slot, inside]
    rows = values.new_zeros(len(ids), width)
    rows[which[:, None], columns] = entries
    return rows


def grad_weight(
    dy: Tensor, ids: Tensor, values: Tensor, row_ptr: Tensor, cols: Tensor, slots: Tensor
) -> Tensor:
    """dY [n, width] -> the shape of `values`, which is not read; ids met twice add up."""
    which, slot, inside, columns = _positions(ids, values, row_ptr, cols, slots)
    entries = dy[which[:, None], columns].to(values.dtype)
    grad = torch.zeros_like(values)
    if values.dim() == 1:
        return grad.index_add_(0, slot, entries[:, 0])
    b = values.shape[-1]
    grad.view(-1, b).index_add_(0, slot * b + inside, entries)
    return grad
