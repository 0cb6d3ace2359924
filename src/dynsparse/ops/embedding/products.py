"""Rows of a sparse table and the gradient of its values, in plain torch.

On a CPU work and memory are proportional to the non-zeros of the rows. On an accelerator that would
synchronise to learn how many blocks there are, and sum in an order that differs between runs. There
the table is laid out densely for the time of a product: all sizes are known beforehand, and torch's
gradient of a table sums in order, with the same bits on every run.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding

from dynsparse.ops.linear.cuda.dense import lines_of
from dynsparse.ops.linear.naive import block_size_of
from dynsparse.pattern.index_arrays import slots_of


def _find_blocks(
    ids: Tensor, values: Tensor, row_ptr: Tensor, cols: Tensor, slots: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For every block of the rows: the position in ids, slot, row inside, columns [blocks, b]."""
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
    which, slot, inside, columns = _find_blocks(ids, values, row_ptr, cols, slots)
    entries = values[slot][:, None] if values.dim() == 1 else values[slot, inside]
    rows = values.new_zeros(len(ids), width)
    rows[which[:, None], columns] = entries
    return rows


def grad_weight(
    dy: Tensor, ids: Tensor, values: Tensor, row_ptr: Tensor, cols: Tensor, slots: Tensor
) -> Tensor:
    """dY [n, width] -> the shape of `values`, which is not read; repeated ids are summed."""
    which, slot, inside, columns = _find_blocks(ids, values, row_ptr, cols, slots)
    entries = dy[which[:, None], columns].to(values.dtype)
    grad = torch.zeros_like(values)
    if values.dim() == 1:
        return grad.index_add_(0, slot, entries[:, 0])
    b = values.shape[-1]
    grad.view(-1, b).index_add_(0, slot * b + inside, entries)
    return grad


def forward_on_device(
    ids: Tensor, values: Tensor, row_ptr: Tensor, cols: Tensor, slots: Tensor, width: int
) -> Tensor:
    """ids int64 [...] -> [..., width]."""
    b = block_size_of(values)
    vocabulary = (len(row_ptr) - 1) * b
    table = values.new_zeros(vocabulary * width // b, b)
    table.index_copy_(0, lines_of(row_ptr, cols, slots, b, width // b), values.reshape(-1, b))
    return embedding(ids, table.view(vocabulary, width))


def grad_weight_on_device(
    dy: Tensor, ids: Tensor, values: Tensor, row_ptr: Tensor, cols: Tensor, slots: Tensor
) -> Tensor:
    """dY [n, width], ids [n] -> the shape of `values`, not read; repeated ids are summed."""
    b, width = block_size_of(values), dy.shape[-1]
    vocabulary = (len(row_ptr) - 1) * b
    table = torch.ops.aten.embedding_dense_backward(
        dy.to(values.dtype).contiguous(), ids, vocabulary, -1, False
    )
    lines = lines_of(row_ptr, cols, slots, b, width // b)
    return table.view(-1, b).index_select(0, lines).view(values.shape)


def pair_on_device(dy: Tensor, ids: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """x [n, width] and dY [n, vocabulary] whose dY^T X is the dense gradient: dY, and one-hots of
    the ids [n]."""
    one_hot = dy.new_zeros(len(ids), vocabulary)
    return dy, one_hot.scatter_(1, ids.view(-1, 1), 1.0)
