"""Tensor-parallel layers: what computes a layer or an attention of which a rank holds a shard.

The collectives on activations are those of Shoeybi et al. 2019, "Megatron-LM: Training
Multi-Billion Parameter Language Models Using Model Parallelism", section 3, and have its names: the
gradient of a sum is the identity, and the other way round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dynsparse.distributed.placement import slice_pattern
from dynsparse.nn import SparseLinear, SparseMultiheadAttention
from dynsparse.nn.sharded import gather_full
from dynsparse.ops.linear import linear
from dynsparse.pattern import SparsePattern
from dynsparse.ranks import DimShard, Ranks, ShardSpec


@dataclass(frozen=True, eq=False)
class ShardBackend(ShardSpec):
    """A backend (`nn.backends`) for a layer that holds a 2-D shard, with its pattern and values.

    Rank (i, j, z) computes Y_i = sum over j of X_j W_ij^T for its samples: forward is a sum over
    the axis of the columns, the gradient of the input one over the axis of the rows, as the passes
    of PopSparse are over tiles. The gradient of the weights is a sum over z, which data parallelism
    adds.
    """

    target = None

    def __call__(self, layer: SparseLinear, x: Tensor) -> Tensor:
        """x [..., in], or its shard, -> [..., out], or this rank's shard."""
        placement = self.placement
        rows, cols = self.dim_shards
        inputs = DimShard(self.grid.ranks_along(placement.input), self.input_borders)
        first, last = inputs.ends
        if x.shape[-1] != last - first:
            raise ValueError(
                f"expected {last - first} features on rank {inputs.ranks.rank} of the axis "
                f"{placement.input!r} (None: all features), got x {list(x.shape)}"
            )
        if placement.input != placement.cols:
            x = scatter_to(gather_from(x, inputs), cols)
        x = copy_to(x, rows.ranks)
        bias = layer.bias
        if placement.cols is None:
            y = self._product(layer, x, bias)
        else:
            y = reduce_from(self._product(layer, x, None), cols.ranks)
            y = y if bias is None else y + bias.to(y.dtype)
        return gather_from(y, rows) if placement.gather_output else y

    def _product(self, layer: SparseLinear, x: Tensor, bias: Tensor | None) -> Tensor:
        if self.active is not None:
            return self.active.product(layer, x, bias)
        values, index = layer.snapshot()
        return linear(x, values, index, bias)

    def kernel(self, batch: int, backward: bool) -> str:
        return "tensor parallel"

    def for_pattern(self, pattern: SparsePattern) -> Any:
        """Patterns change inside the shard, whose borders stay; the active slots are dropped."""
        return self.replace_active(None)


def spec_of(layer: SparseLinear) -> ShardBackend | None:
    """The shard that a layer holds; None for a full layer."""
    return layer.executor if isinstance(layer.executor, ShardBackend) else None


@torch.no_grad()
def keep_shard(layer: SparseLinear, spec: ShardBackend) -> None:
    """Keep only this rank's shard of a full layer; its Parameters become new ones."""
    pattern, slots = slice_pattern(layer.pattern, spec.rows, spec.cols)
    values = layer.values.detach()[slots.to(layer.values.device)].clone()
    bias = layer.bias
    layer.values = nn.Parameter(values, layer.values.requires_grad)
    layer.out_features, layer.in_features = pattern.shape
    if bias is not None and spec.placement.rows is not None:
        local = spec.dim_shards[0].narrow(bias.detach(), 0).clone()
        layer.bias = nn.Parameter(local, bias.requires_grad)
        layer.dim_shards = {"bias": (spec.dim_shards[0], 0)}
    layer.executor = spec
    layer._install(pattern)


@torch.no_grad()
def gather_layer(layer: SparseLinear) -> dict[str, Tensor]:
    """Pattern and values of the full layer, on every rank, as its `state_dict` has them.

    All ranks of the grid call it at the same time.
    """
    spec = spec_of(layer)
    if spec is None:
        return layer.state_dict()
    b = layer.block_size
    values = gather_full(layer.values.detach())
    flat = spec.to_full(layer.pattern.flat, b).to(values.device)
    for axis in (spec.placement.cols, spec.placement.rows):
        line = spec.grid.ranks_along(axis)
        flat, values = torch.cat(line.all_gather(flat)), torch.cat(line.all_gather(values))
    order = flat.argsort()
    flat = flat[order]
    width = spec.shape[1] // b
    return {
        "values": values[order],
        "rows": (flat // width).int(),
        "cols": (flat % width).int(),
    }


@torch.no_grad()
def split_heads(attention: SparseMultiheadAttention) -> None:
    """Let an attention whose projections are split compute this rank's heads only."""
    queries = attention.q_proj
    spec = spec_of(queries) if isinstance(queries, SparseLinear) else None
    if spec is None or spec.placement.rows is None:
        return
    head_dim = spec.shape[0] // attention.num_heads
    shard = spec.dim_shards[0]
    first, last = shard.ends
    attention.num_heads = (last - first) // head_dim
    attention.shares_heads = True
    attention.dim_shards = {}
    for name in ("bias_k", "bias_v"):
        row = getattr(attention, name)
        if row is not None:
            local = shard.narrow(row.detach(), -1).clone()
            setattr(attention, name, nn.Parameter(local, row.requires_grad))
            attention.dim_shards[name] = shard, -1
    borders = tuple(border // head_dim for border in spec.row_borders)
    attention.register_forward_hook(_GatherWeights(DimShard(shard.ranks, borders)))


class _GatherWeights:
    """Gathers the attention weights of all heads from those of this rank's."""

    def __init__(self, heads: DimShard) -> None:
        self.heads = heads

    def __call__(self, attention: Any, args: Any, output: Any) -> Any:
        result, weights = output
        if weights is None:
            return output
        if weights.dim() == result.dim():  # the mean over heads
            share = attention.num_heads / self.heads.borders[-1]
            return result, reduce_from(weights * share, self.heads.ranks)
        moved = gather_from(weights.movedim(-3, -1), self.heads)
        return result, moved.movedim(-1, -3)

    def __deepcopy__(self, memo: dict[int, Any]) -> _GatherWeights:
        return self


def copy_to(x: Tensor, ranks: Ranks) -> Tensor:
    """`x`, which all ranks have in full; its gradient is the sum over ranks."""
    return x if ranks.alone else _apply(x, _view, partial(_sum, ranks))


def reduce_from(y: Tensor, ranks: Ranks) -> Tensor:
    """The sum over ranks; the gradient of each summand is that of the sum."""
    return y if ranks.alone else _apply(y, partial(_sum, ranks), _view)


def scatter_to(x: Tensor, shard: DimShard) -> Tensor:
    """This rank's features of x [..., features], which all ranks have in full.

    The gradients of all shards are gathered.
    """
    return x if shard.ranks.alone else _apply(x, partial(_narrow, shard), partial(_gather, shard))


def gather_from(y: Tensor, shard: DimShard) -> Tensor:
    """All features of y [..., shard], of which each rank has a shard.

    All ranks must use them alike, so that their gradients are equal: each keeps that of its shard.
    """
    return y if shard.ranks.alone else _apply(y, partial(_gather, shard), partial(_narrow, shard))


def _view(x: Tensor) -> Tensor:
    return x.view_as(x)


def _sum(ranks: Ranks, x: Tensor) -> Tensor:
    return ranks.sum(x.clone(memory_format=torch.contiguous_format))


def _narrow(shard: DimShard, x: Tensor) -> Tensor:
    return shard.narrow(x, -1).contiguous()


def _gather(shard: DimShard, x: Tensor) -> Tensor:
    return shard.all_gather(x, -1)


class _WithGradient(torch.autograd.Function):
    """A linear function of one tensor, and the function of its gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        function: Callable[[Tensor], Tensor],
        gradient: Callable[[Tensor], Tensor],
    ) -> Tensor:
        ctx.gradient = gradient
        return function(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.gradient(grad), None, None


_apply = _WithGradient.apply
