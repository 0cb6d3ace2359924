"""Gradients of positions outside the pattern, from x and dY, at the positions asked for alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dynsparse.ops.conv.patches import matrices
from dynsparse.ops.linear import grad_weight
from dynsparse.pattern import PatternIndex, SparsePattern

Pair = tuple[Tensor, Tensor]


def gradient_at(pairs: Sequence[Pair], pattern: SparsePattern) -> Tensor:
    """The sum over `pairs` of dY^T X at the blocks of `pattern`: [nnz] or [nnz, b, b].

    The positions need not be those of a layer. Memory and time are in proportion to them. 16-bit
    activations are accumulated in float32.

    Args:
        pairs: (x [batch, in], dY [batch, out]) of every backward pass; at least one.

    Raises:
        ValueError: no pairs.
    """
    if not pairs:
        raise ValueError("expected at least one pair (x, dY), got none: no backward pass was kept")
    tensors = [tensor for pair in pairs for tensor in pair]
    dtype = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
    device = tensors[0].device
    total = torch.zeros(pattern.values_shape, dtype=dtype, device=device)
    if pattern.nnz == 0:
        return total
    index = pattern._index_on(device)
    for x, dy in pairs:
        for first, left, right in matrices(x, dy, 0, pattern.shape[0]):
            part, to = index, total
            if len(left) != pattern.shape[0]:  # a group of a convolution's channels
                part, slots = _rows_of(pattern, first, len(left), device)
                to = total[slots]
            to += grad_weight(left.t().to(dtype), right.to(dtype), torch.empty_like(to), part)
    return total


def _rows_of(
    pattern: SparsePattern, first: int, count: int, device: torch.device
) -> tuple[PatternIndex, slice]:
    """The index of some rows of a pattern as one of their own, and their slots."""
    b, width = pattern.block_size, pattern.grid[1]
    begin, end = pattern.row_ptr[first // b], pattern.row_ptr[(first + count) // b]
    slots = slice(int(begin), int(end))
    flat = pattern.flat[slots] - first // b * width
    part = SparsePattern.from_flat(flat, shape=(count, pattern.shape[1]), block_size=b)
    return PatternIndex(*(tensor.to(device) for tensor in part.index)), slots
