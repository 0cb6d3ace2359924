"""Attention by heads: a rank computes those heads whose rows of the projections it holds."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dynsparse.distributed.moves import gathered, summed
from dynsparse.distributed.rectangle import Rectangle, part_of
from dynsparse.nn import SparseLinear, SparseMultiheadAttention


def _part(attention: SparseMultiheadAttention) -> Rectangle | None:
    """Of the queries' projection, if heads are spread over ranks."""
    projection = attention.q_proj
    part = part_of(projection) if isinstance(projection, SparseLinear) else None
    return None if part is None or part.placement.rows is None else part


@torch.no_grad()
def split_heads(attention: SparseMultiheadAttention) -> None:
    """Let an attention whose projections are split compute this rank's heads only."""
    part = _part(attention)
    if part is None:
        return
    head_dim = part.shape[0] // attention.num_heads
    heads = attention.num_heads
    slab = part.slabs[0]
    first, last = slab.ends
    attention.num_heads = (last - first) // head_dim
    attention.shares_heads = True
    attention.slabs = {}
    for name in ("bias_k", "bias_v"):
        row = getattr(attention, name)
        if row is not None:
            own = slab.cut(row.detach(), -1).clone()
            setattr(attention, name, nn.Parameter(own, row.requires_grad))
            attention.slabs[name] = slab, -1
    borders = tuple(border // head_dim for border in part.row_borders)
    attention.register_forward_hook(_Weights(part, heads, borders))


class _Weights:
    """Makes the attention weights of all heads of those of this rank's."""

    def __init__(self, part: Rectangle, heads: int, borders: tuple[int, ...]) -> None:
        self.line = part.grid.line(part.placement.rows)
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
