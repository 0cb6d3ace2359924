"""Growth with most of the gradient computed in bfloat16 only.

Where the processor multiplies bfloat16, the dense gradient costs a third. It is off by a known
bound and so says for most positions that they cannot be among the largest; for the others the
gradient is computed in float32. The choice is that of the float32 gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dynsparse import native
from dynsparse.encoding import empty
from dynsparse.ops.grow.free_positions import positions_between
from dynsparse.ops.grow.scores import Pair
from dynsparse.ops.linear.kernels import sparse
from dynsparse.pattern import SparsePattern

__all__ = ["bfloat16_products", "candidates", "serves"]

# Of the gradient in bfloat16.
_CHUNK_BYTES = 4 << 20

# Multiply-adds of the gradient below which what goes before and after costs more than is saved.
_WORTHWHILE = 1 << 28

# Where more positions than this share of a chunk may be large, float32 is as fast.
MOST = 1 / 8

# bfloat16 has the range of float32. Inside these bounds nothing overflows, and what underflows in
# products and squares stays below a thousandth of the threshold.
_LARGEST = 1e15
_UNDERFLOW = 1e-15


def serves(pairs: Sequence[Pair], threshold: float) -> bool:
    """Whether it pays on this processor, and the bound holds for these numbers."""
    if native.bfloat16_unit() == "float32" or not bfloat16_products():
        return False
    tensors = [tensor for pair in pairs for tensor in pair]
    samples = sum(len(x) for x, _ in pairs)
    if samples * pairs[0][0].shape[1] * pairs[0][1].shape[1] < _WORTHWHILE:
        return False
    if any(t.dtype != torch.float32 for t in tensors):
        return False
    largest = max(float(torch.stack(t.aminmax()).abs().max()) for t in tensors if len(t))
    return largest < _LARGEST and threshold > _UNDERFLOW * samples * largest


def bfloat16_products() -> bool:
    """Whether torch accumulates products of bfloat16 matrices in float32."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def candidates(
    pairs: Sequence[Pair],
    pattern: SparsePattern,
    exclude: Tensor,
    threshold: float,
    offset: int = 0,
) -> tuple[Tensor, Tensor] | None:
    """All free positions whose gradient exceeds the threshold, and some more, with its magnitude.

    Flat positions int64 [any], in order, and float32 [any]; None where they are too many for this
    to pay.

    Args:
        pairs: (x [batch, in], dY [batch, rows]) float32 on the CPU.
        pattern: of single elements; its positions are not free.
        exclude: further positions that are not free: int64 [any], sorted.
        offset: the row of the pattern that dY begins with.
    """
    library = native.load()
    assert library is not None
    height, width = pairs[0][1].shape[1], pattern.shape[1]
    low_x, col_bounds, x_errors = _rounded([x for x, _ in pairs])
    low_dy, row_bounds, dy_errors = _rounded([dy for _, dy in pairs])
    # A dot product is off by at most |dY's error| |x| + |rounded dY| |x's error| (Cauchy-Schwarz),
    # and by 2^-24 |dY| |x| for every term that float32 adds, as these lengths themselves may be.
    sums = 2.0**-23 * len(low_x)
    worst = float((x_errors / col_bounds).nan_to_num_().max()) + sums
    row_bounds = (dy_errors + (row_bounds + dy_errors) * worst) * (1 + sums)
    rows = max(1, _CHUNK_BYTES // (2 * width))
    gradient = empty(min(rows, height), width, dtype=torch.bfloat16)
    room = int(MOST * gradient.numel())
    found_cols = empty(room, dtype=torch.int32)
    counts = torch.zeros(height + 1, dtype=torch.int32)
    pieces = []
    for first in range(0, height, rows):
        last = min(first + rows, height)
        grad = gradient[: last - first]
        torch.mm(low_dy[:, first:last].t(), low_x, out=grad)
        row = offset + first
        excluded = positions_between(exclude, row * width, (offset + last) * width)
        if len(excluded):
            grad.view(-1)[excluded] = float("nan")
        found = library.dynsparse_grow_screen(
            grad.data_ptr(),
            *grad.shape,
            pattern.row_ptr.data_ptr() + row * pattern.row_ptr.itemsize,
            pattern.cols.data_ptr(),
            row_bounds.data_ptr() + first * row_bounds.itemsize,
            col_bounds.data_ptr(),
            0.999 * threshold,
            counts.data_ptr() + (first + 1) * counts.itemsize,
            found_cols.data_ptr(),
            room,
            torch.get_num_threads(),
        )
        if found > room:
            return None
        pieces.append(found_cols[:found].clone())
    del low_x, low_dy, gradient, found_cols
    cols = torch.cat(pieces)
    row_ptr = counts.cumsum(0, dtype=torch.int32)
    scores = sparse.dot_products(pairs[0][1], pairs[0][0], row_ptr, cols)
    for x, dy in pairs[1:]:
        scores += sparse.dot_products(dy, x, row_ptr, cols)
    starts = torch.arange(offset, offset + height) * width
    flat = starts.repeat_interleave(counts[1:], output_size=len(cols)).add_(cols)
    return flat, scores.abs_()


def _rounded(matrices: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """The matrices stacked in bfloat16, the lengths of the columns, and those of their errors."""
    library = native.load()
    assert library is not None
    samples, features = sum(map(len, matrices)), matrices[0].shape[1]
    low = empty(samples, features, dtype=torch.bfloat16)
    lengths, errors = torch.zeros(2, features)
    first = 0
    for matrix in matrices:
        library.dynsparse_grow_round(
            matrix.data_ptr(),
            *matrix.stride(),
            *matrix.shape,
            low.data_ptr() + first * features * low.itemsize,
            lengths.data_ptr(),
            errors.data_ptr(),
            torch.get_num_threads(),
        )
        first += len(matrix)
    return low, lengths.sqrt_(), errors.sqrt_()
