"""Rows of a sparse table on a device: through the table laid out, for the moment of one product.

What `naive.py` does makes the host wait for the number of blocks that are met, and adds up in an
order that differs from run to run. Here sizes are known beforehand, and torch's own gradient of a
table adds up what belongs to one row in order: the same bits on every run.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding

from dynsparse.ops.linear.cuda.dense import lines_of
from dynsparse.ops.linear.naive import block_size_of


def forward(
    ids: Tensor, values: Tensor, row_ptr: Tensor, cols: Tensor, slots: Tensor, width: int
) -> Tensor:
    """ids int64 [...] -> [..., width]."""
    b = block_size_of(values)
    vocabulary = (len(row_ptr) - 1) * b
    table = values.new_zeros(vocabulary * width // b, b)
    table.index_copy_(0, lines_of(row_ptr, cols, slots, b, width // b), values.reshape(-1, b))
    return embedding(ids, table.view(vocabulary, width))


def grad_weight(
    dy: Tensor, ids: Tensor, values: Tensor, row_ptr: Tensor, cols: Tensor, slots: Tensor
) -> Tensor:
    """dY [n, width], ids [n] -> the shape of `values`, which is not read; ids met twice add up."""
    b, width = block_size_of(values), dy.shape[-1]
    vocabulary = (len(row_ptr) - 1) * b
    table = torch.ops.aten.embedding_dense_backward(
        dy.to(values.dtype).contiguous(), ids, vocabulary, -1, False
    )
    lines = lines_of(row_ptr, cols, slots, b, width // b)
    return table.view(-1, b).index_select(0, lines).view(values.shape)


def pair(dy: Tensor, ids: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """x [n, width] and dY [n, vocabulary] whose dY^T X is the dense gradient: dY, and one-hots of
    the ids [n]."""
    one_hot = dy.new_zeros(len(ids), vocabulary)
    return dy, one_hot.scatter_(1, ids.view(-1, 1), 1.0)
