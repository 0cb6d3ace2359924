"""The three passes in plain torch: the oracle of the compiled kernels, and what runs without them.

Feature-major, for any device, dtype and block size. Works on chunks of blocks to bound the
memory. Elements are blocks of size 1.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from dynsparse.pattern import PatternIndex
from dynsparse.pattern.index_arrays import to_slot_order
from dynsparse.pattern.on_device import expand_row_pointers

_CHUNK_ELEMENTS = 1 << 22


def block_size_of(values: Tensor) -> int:
    """Return the block size of values [nnz] or [nnz, b, b]."""
    return 1 if values.dim() == 1 else values.shape[-1]


def rows_of(index: PatternIndex) -> Tensor:
    """Return the block row of every slot, int64 [nnz]."""
    return to_slot_order(expand_row_pointers(index.row_ptr, len(index.cols)), index.slots)


def cols_of(index: PatternIndex) -> Tensor:
    """Return the block column of every slot, int64 [nnz]."""
    return to_slot_order(index.cols.long(), index.slots)


def _chunks(count: int, elements_each: int) -> Iterator[slice]:
    step = max(1, _CHUNK_ELEMENTS // max(1, elements_each))
    return (slice(i, i + step) for i in range(0, count, step))


def _to_blocks(matrix: Tensor, b: int) -> Tensor:
    """Reshape [batch, features] to [features / b, b, batch], contiguous."""
    return matrix.t().reshape(matrix.shape[1] // b, b, matrix.shape[0])


def _scatter(values: Tensor, source: Tensor, take: Tensor, put: Tensor, count: int) -> Tensor:
    """Add up values[s] @ source[take[s]] at put[s] over slots s: [batch, count * b]."""
    b, batch = source.shape[1:]
    out = source.new_zeros(count, b, batch)
    for part in _chunks(len(values), b * max(b, batch)):
        out.index_add_(0, put[part], values[part] @ source[take[part]])
    return out.reshape(count * b, batch).t().contiguous()


def forward(x: Tensor, values: Tensor, index: PatternIndex, bias: Tensor | None) -> Tensor:
    """Compute Y = X W^T + bias, [batch, out], of x [batch, in]; values [nnz] or [nnz, b, b]."""
    b = block_size_of(values)
    y = _scatter(
        values.reshape(-1, b, b),
        _to_blocks(x, b),
        cols_of(index),
        rows_of(index),
        len(index.row_ptr) - 1,
    )
    return y if bias is None else y + bias


def grad_input(dy: Tensor, values: Tensor, index: PatternIndex) -> Tensor:
    """Compute dX = dY W, [batch, in], of dy [batch, out]."""
    b = block_size_of(values)
    return _scatter(
        values.reshape(-1, b, b).transpose(1, 2),
        _to_blocks(dy, b),
        rows_of(index),
        cols_of(index),
        len(index.col_ptr) - 1,
    )


def grad_weight(dy: Tensor, x: Tensor, values: Tensor, index: PatternIndex) -> Tensor:
    """Compute dW = dY^T X at the pattern's positions: the shape of `values`."""
    b = block_size_of(values)
    dyt, xt = _to_blocks(dy, b), _to_blocks(x, b)
    rows, cols = rows_of(index), cols_of(index)
    out = x.new_empty(len(values), b, b)
    for part in _chunks(len(values), b * max(b, x.shape[0])):
        out[part] = dyt[rows[part]] @ xt[cols[part]].transpose(1, 2)
    return out.reshape(values.shape)
