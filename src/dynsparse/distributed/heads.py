"""Attention by heads: a rank computes those heads whose rows of the projections it holds."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dynsparse.distributed.moves import gathered, summed
from dynsparse.distributed.rectangle import Rectangle, spec_of
from dynsparse.nn import SparseLinear, SparseMultiheadAttention


def _part(attention: SparseMultiheadAttention) -> Rectangle | None:
    """Of the queries' projection, if heads are spread over ranks."""
    projection = attention.q_proj
    spec = spec_of(projection) if isinstance(projection, SparseLinear) else None
    return None if spec is None or spec.placement.rows is None else spec


@torch.no_grad()
def split_heads(attention: SparseMultiheadAttention) -> None:
    """Let an attention whose projections are split compute this rank's heads only."""
    spec = _part(attention)
    if spec is None:
        return
    head_dim = spec.shape[0] // attention.num_heads
    heads = attention.num_heads
    slab = spec.dim_shards[0]
    first, last = slab.ends
    attention.num_heads = (last - first) // head_dim
    attention.shares_heads = True
    attention.dim_shards = {}
    for name in ("bias_k", "bias_v"):
        row = getattr(attention, name)
        if row is not None:
            own = slab.narrow(row.detach(), -1).clone()
            setattr(attention, name, nn.Parameter(own, row.requires_grad))
            attention.dim_shards[name] = slab, -1
    borders = tuple(border // head_dim for border in spec.row_borders)
    attention.register_forward_hook(_Weights(spec, heads, borders))


class _Weights:
    """Makes the attention weights of all heads of those of this rank's."""

    def __init__(self, spec: Rectangle, heads: int, borders: tuple[int, ...]) -> None:
        self.line = spec.grid.line(spec.placement.rows)
        self.heads = heads
        self.borders = borders

    def __call__(self, attention: Any, args: Any, output: Any) -> Any:
        result, weights = output
        if weights is None:
            return output
        if weights.dim() == result.dim():  # the mean over heads
            return result, summed(weights * (attention.num_heads / self.heads), self.line)
        moved = gathered(weights.movedim(-3, -1), self.line, self.borders)
        return result, moved.movedim(-1, -3)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Weights:
        return self
