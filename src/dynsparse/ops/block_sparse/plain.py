"""Attention at blocks in plain torch: any type and device, at the cost of the blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dynsparse.ops.block_sparse.kernels import Settings
from dynsparse.ops.block_sparse.products import diagonal_mask, softmax_weights, sum_by_index
from dynsparse.pattern.on_device import expand_row_pointers


def _gather_blocks(tensor: Tensor, block: int, which: Tensor) -> Tensor:
    """Gather blocks [N, heads, nnz, block, features] of tokens [N, heads, tokens, features]."""
    return tensor.unflatten(2, (-1, block)).index_select(2, which)


def _sum_blocks(parts: Tensor, which: Tensor, tokens: int) -> Tensor:
    """Add up blocks [N, heads, nnz, block, features] by tokens: [N, heads, tokens, features]."""
    return sum_by_index(parts, which, 2, tokens // parts.shape[3]).flatten(2, 3)


def _scores(
    q: Tensor, k: Tensor, rows: Tensor, cols: Tensor, bias: Tensor | None, s: Settings
) -> Tensor:
    queries, keys = _gather_blocks(q, s.block, rows), _gather_blocks(k, s.block, cols)
    scores = queries @ keys.transpose(-2, -1) * s.scale
    if bias is not None:
        scores = scores + bias.unflatten(1, (-1, s.block))[:, cols][:, None, :, None]
    if s.causal:
        scores = scores.masked_fill(diagonal_mask(rows, cols, s.block, upper=True), -torch.inf)
    return scores


def _dropout_factors(weights: Tensor, s: Settings) -> Tensor | None:
    """Return the factors of weights under dropout, or None; the same for the same seed."""
    if not s.keep_scale:
        return None
    generator = torch.Generator(weights.device).manual_seed(s.seed)
    drawn = torch.rand(
        weights.shape, dtype=weights.dtype, device=weights.device, generator=generator
    )
    return (drawn >= s.dropout).to(weights.dtype) * s.keep_scale


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    row_ptr: Tensor,
    cols: Tensor,
    bias: Tensor | None,
    s: Settings,
) -> tuple[Tensor, Tensor]:
    """Compute the same as `kernels.forward`."""
    rows, cols = expand_row_pointers(row_ptr, len(cols)), cols.long()
    weights, sums = softmax_weights(_scores(q, k, rows, cols, bias, s), rows, len(row_ptr) - 1)
    factors = _dropout_factors(weights, s)
    weights = weights if factors is None else weights * factors
    out = _sum_blocks(weights @ _gather_blocks(v, s.block, cols), rows, q.shape[2])
    return out, sums.flatten(2)


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    row_ptr: Tensor,
    cols: Tensor,
    bias: Tensor | None,
    s: Settings,
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """Compute the same as `kernels.backward`."""
    rows, cols = expand_row_pointers(row_ptr, len(cols)), cols.long()
    of_rows = sums.unflatten(2, (-1, s.block)).index_select(2, rows)
    weights = (_scores(q, k, rows, cols, bias, s) - of_rows[..., None]).exp()
    factors = _dropout_factors(weights, s)
    of_out = _gather_blocks(grad, s.block, rows)
    to_weights = of_out @ _gather_blocks(v, s.block, cols).transpose(-2, -1)
    dropped = weights
    if factors is not None:
        dropped, to_weights = weights * factors, to_weights * factors
    shares = (grad * out).sum(-1, keepdim=True)
    to_scores = weights * (to_weights - _gather_blocks(shares, s.block, rows)) * s.scale
    gradients: list[Tensor | None] = [None, None, None]
    if needed[0]:
        gradients[0] = _sum_blocks(to_scores @ _gather_blocks(k, s.block, cols), rows, q.shape[2])
    if needed[1]:
        transposed = to_scores.transpose(-2, -1)
        gradients[1] = _sum_blocks(transposed @ _gather_blocks(q, s.block, rows), cols, k.shape[2])
    if needed[2]:
        gradients[2] = _sum_blocks(dropped.transpose(-2, -1) @ of_out, cols, v.shape[2])
    return gradients
