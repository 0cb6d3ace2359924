"""All functions with dense matrices in plain torch: the oracle."""

from __future__ import annotations

import torch
from torch import Tensor

from dynsparse.pattern import SparsePattern


def dense_of(values: Tensor, pattern: SparsePattern) -> Tensor:
    """Lay out values [..., nnz] or [..., nnz, b, b] in matrices [..., m, n] of zeros."""
    shape = pattern.values_shape
    batch = values.shape[: values.dim() - len(shape)]
    matrices = [pattern.to_dense(matrix) for matrix in values.reshape(batch.numel(), *shape)]
    return torch.stack(matrices).reshape(*batch, *pattern.shape) if len(batch) else matrices[0]


def _softmax(scores: Tensor, mask: Tensor) -> Tensor:
    """Return the softmax over the entries of a mask; zeros elsewhere, also in empty rows."""
    has_entries = mask.any(-1, keepdim=True)
    weights = scores.masked_fill(~mask & has_entries, -torch.inf).softmax(-1)
    return weights * (mask & has_entries)


def softmax(values: Tensor, pattern: SparsePattern, subblock_mask: str = "none") -> Tensor:
    mask = pattern.to_mask()
    if subblock_mask == "zero_upper_triangle":
        mask = mask.tril()
    elif subblock_mask == "zero_lower_triangle":
        mask = mask.triu()
    weights = _softmax(dense_of(values, pattern), mask)
    matrices = weights.reshape(-1, *pattern.shape)
    return torch.stack([pattern.values_of(m) for m in matrices]).reshape(values.shape)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pattern: SparsePattern,
    causal: bool = False,
    away: Tensor | None = None,
    kept: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Compute attention of [N, heads, L, E], [N, heads, S, E], [N, heads, S, V]: [N, heads, L, V].

    Args:
        away: bool [N, S], True for keys to ignore.
        kept: factors of the weights, [N, heads, L, S], in place of dropout.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    mask = pattern.to_mask()
    if causal:
        mask = mask.tril()
    mask = mask.expand(len(query), 1, -1, -1)
    if away is not None:
        mask = mask & ~away[:, None, None]
    weights = _softmax(query @ key.transpose(-2, -1) * scale, mask)
    return (weights if kept is None else weights * kept) @ value
