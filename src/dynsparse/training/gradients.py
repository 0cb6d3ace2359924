"""Gradients of positions outside the pattern, from x and dY, at the positions asked for alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dynsparse.ops.linear import grad_weight
from dynsparse.pattern import SparsePattern

__all__ = ["Pair", "gradient_at"]

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
        total += grad_weight(dy.to(dtype), x.to(dtype), torch.empty_like(total), index)
    return total
