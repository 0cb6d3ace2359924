"""Which connections are dropped: the blocks with the lowest scores."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dynsparse._core.checks import check_not_negative, check_tensor, check_types
from dynsparse.nn.sharded import gather_full, is_sharded, local_part, primary_range
from dynsparse.ops.grow import select
from dynsparse.pattern import SparsePattern
from dynsparse.pattern.index_arrays import empty, membership_mask, nonzero_positions, to_slot_order
from dynsparse.pattern.on_device import to_device
from dynsparse.ranks import (
    ALONE,
    Ranks,
    chunk_of,
    gather_sorted,
    masked_positions,
    select_over_ranks,
)
from dynsparse.training.deferred_checks import NAN_SCORES
from dynsparse.training.layer_shards import LayerShard

DropScore = Callable[[Tensor], Tensor]
"""From a layer's values [nnz] or [nnz, b, b] to one score per block [nnz]; low scores are dropped.

It is called with the Parameter itself, whose `grad` is the gradient of the last step.
"""


def magnitude(values: Tensor) -> Tensor:
    """|w| of an element, the sum of |w| of a block: [nnz].

    Source: Mocanu et al. 2018 (SET) and Evci et al. 2020 (RigL) drop the smallest magnitudes; the
    sum over a block follows Graphcore's dynamic sparsity application.
    """
    check_tensor("values", values)
    if values.dim() not in (1, 3) or not values.is_floating_point():
        raise ValueError(
            "values must be floating point, [nnz] or [nnz, b, b], "
            f"got {values.dtype} {list(values.shape)}"
        )
    values = values.detach()
    if values.dim() == 3:
        return values.abs().sum((1, 2))
    if is_sharded(values):
        return values.abs()
    return torch.abs(
        values, out=empty(len(values), dtype=values.dtype, device=values.device, brief=True)
    )


class MagnitudeGradient:
    """|w| + gradient_weight |dL/dw| of an element, their sum over a block: [nnz].

    A small weight with a large gradient stays. The gradient is that of the last step, after
    clipping.

    Source: Yuan et al. 2021, "MEST: Accurate and Fast Memory-Economic Sparse Training Framework on
    the Edge", section 3.

    Raises:
        ValueError: a `gradient_weight` that is negative or not finite.
        RuntimeError: values without a gradient.
    """

    def __init__(self, gradient_weight: float = 0.01) -> None:
        self.gradient_weight = check_not_negative("gradient_weight", gradient_weight)

    @property
    def needs_gradients(self) -> bool:
        """Whether a layer without gradient has no score."""
        return self.gradient_weight > 0

    def __call__(self, values: Tensor) -> Tensor:
        score = magnitude(values)
        if not self.needs_gradients:
            return score
        if values.grad is None:
            raise RuntimeError(
                "the drop score needs the gradient, but the values have none: call "
                "trainer.step() after loss.backward() and before the gradients are set to None"
            )
        return score.add_(magnitude(values.grad), alpha=self.gradient_weight)


@check_types
def lowest(scores: Tensor, count: int) -> Tensor:
    """The slots of the `count` lowest of `scores` [nnz], ascending, int64 [count], on the CPU.

    Among equal scores the smaller slots come first.

    Raises:
        ValueError: scores that are not one per slot, NaN among them, or too large a count.
    """
    if scores.dim() != 1 or scores.is_complex():
        raise ValueError(f"expected one drop score per block, [nnz], got {list(scores.shape)}")
    if not 0 <= count <= len(scores):
        raise ValueError(f"cannot drop {count} of {len(scores)} blocks")
    if len(scores) and math.isnan(scores.min().item()):
        raise ValueError(NAN_SCORES)
    return select(scores, count, largest=False).cpu()


def lowest_over_ranks(
    ranks: Ranks,
    scores: Sequence[Tensor],
    counts: Sequence[int],
    patterns: Sequence[SparsePattern],
    shards: Sequence[LayerShard | None],
    bits: int | None = None,
) -> list[Tensor]:
    """`lowest` for each layer, decided once: each rank ranks its part of the slots.

    Args:
        ranks: that drop together; every one of them calls this.
        scores: one tensor [nnz] per layer, on every rank or sharded.
        counts: how many blocks leave each layer.
        patterns: of the layers; among equal scores the first in row-major order come first.
        shards: of tensor-parallel layers: scores and the returned slots are those of this rank's
            shard, counts those of the full layer.
        bits: see `select_over_ranks`.

    Raises:
        ValueError: as `lowest`.
    """
    none = torch.zeros(0, dtype=torch.int32, device="cpu")
    orders = [p.slots if p._device.type == "cpu" else none for p in patterns]
    if ranks.alone:
        scores = [gather_full(s) for s in scores]
    scores = [
        # index_select takes a third of the time of s[order].
        s.index_select(0, order.to(s.device)) if len(order) and not is_sharded(s) else s
        for s, order in zip(scores, orders, strict=True)
    ]
    if ranks.alone:
        lowest_entries = [lowest(s, count) for s, count in zip(scores, counts, strict=True)]
    else:
        lowest_entries = _lowest_over_ranks(ranks, scores, counts, shards, bits, orders)
    return [
        _slots_of_entries(entries, order)
        for entries, order in zip(lowest_entries, orders, strict=True)
    ]


def _slots_of_entries(entries: Tensor, order: Tensor) -> Tensor:
    """Slots, ascending, of entries in row-major order."""
    if not len(order):
        return entries
    return nonzero_positions(membership_mask(order.index_select(0, entries).long(), len(order)))


def _lowest_over_ranks(
    ranks: Ranks,
    scores: Sequence[Tensor],
    counts: Sequence[int],
    shards: Sequence[LayerShard | None],
    bits: int | None,
    orders: Sequence[Tensor],
) -> list[Tensor]:
    parts, slots = _local_scores(ranks, scores, shards, orders)
    limits = _limits(scores, shards)
    chosen = select_over_ranks(
        ranks.all_ranks,
        parts,
        slots,
        counts,
        largest=False,
        below=max(limits, default=0),
        bits=bits,
    )
    local = [
        masked_positions(slot, mask).sort().values for slot, mask in zip(slots, chosen, strict=True)
    ]
    dropped = gather_sorted(ranks.all_ranks, local, limits)
    return [
        entries if shard is None else shard.slots(entries)
        for entries, shard in zip(dropped, shards, strict=True)
    ]


def count_lowest(
    scores: Sequence[Tensor],
    count: int,
    most: Sequence[int],
    ranks: Ranks = ALONE,
    shards: Sequence[LayerShard | None] | None = None,
) -> list[int]:
    """How many of the `count` lowest scores of all layers together are in each layer.

    No layer has more than its `most`. Among equal scores the first layer comes first.

    Args:
        scores: one tensor [nnz] per layer.
        count: how many in all layers; at most the sum of `most`.
        most: the largest number per layer.
        ranks: that drop together; every one of them calls this.
        shards: see `lowest_over_ranks`; `most` is that of the full layer.

    Raises:
        ValueError: scores that hold NaN, or too large a count.
    """
    shards = [None] * len(scores) if shards is None else shards
    # Only a layer's `most` lowest scores matter, in whatever slots.
    if not ranks.alone:
        limits = [
            min(m, len(s)) if shard is None else m
            for s, m, shard in zip(scores, most, shards, strict=True)
        ]
        return _count_lowest_over_ranks(ranks, scores, count, limits, shards)
    for s in scores:
        if len(s) and bool(torch.isnan(s.min())):
            raise ValueError(NAN_SCORES)
    return count_lowest_on_device(scores, count, most).tolist()


def count_lowest_on_device(scores: Sequence[Tensor], count: int, most: Sequence[int]) -> Tensor:
    """`count_lowest` of one rank, on the device of the first scores: int64 [layers].

    The host does not wait, and NaN is not detected.
    """
    device = scores[0].device
    limits = [min(m, len(s)) for s, m in zip(scores, most, strict=True)]
    candidates = [
        s.detach().index_select(0, select(s, limit, largest=False)).double().to(device)
        for s, limit in zip(scores, limits, strict=True)
    ]
    chosen = select(torch.cat(candidates), count, largest=False)
    ends = to_device(torch.tensor(limits, device="cpu").cumsum(0), device)
    counts = torch.searchsorted(chosen, ends)
    return counts.diff(prepend=counts.new_zeros(1))


def _limits(scores: Sequence[Tensor], shards: Sequence[LayerShard | None]) -> list[int]:
    """An upper bound of each layer's slots, or of its positions in the full layer."""
    return [
        len(s) if shard is None else shard.limit for s, shard in zip(scores, shards, strict=True)
    ]


def _local_scores(
    ranks: Ranks,
    scores: Sequence[Tensor],
    shards: Sequence[LayerShard | None],
    orders: Sequence[Tensor] | None = None,
) -> tuple[list[Tensor], list[Tensor | int]]:
    """The scores that this rank ranks, by layer, and their slots or positions.

    `orders` has the slots in row-major order; shards with other orders of slots get the places in
    row-major order.
    """
    parts: list[Tensor] = []
    slots: list[Tensor | int] = []
    orders = [torch.zeros(0, device="cpu")] * len(scores) if orders is None else orders
    for full, shard, order in zip(scores, shards, orders, strict=True):
        if is_sharded(full):
            first, last = primary_range(full)
            part = local_part(full.detach())[: last - first]
        else:
            first, last = chunk_of(ranks, len(full))
            if not ranks.is_lead_group(() if shard is None else shard.spec.axes):
                last = first
            part = full.detach()[first:last]
        parts.append(part)
        if is_sharded(full) and len(order):
            slots.append(
                to_slot_order(torch.arange(len(order), device="cpu"), order)[first:last].to(
                    part.device
                )
            )
        elif shard is None:
            slots.append(first)
        else:
            slots.append(shard.positions(first, last).to(part.device))
    return parts, slots


def _count_lowest_over_ranks(
    ranks: Ranks,
    scores: Sequence[Tensor],
    count: int,
    limits: Sequence[int],
    shards: Sequence[LayerShard | None],
) -> list[int]:
    parts, slots = _local_scores(ranks, scores, shards)
    masks = select_over_ranks(ranks.all_ranks, parts, slots, limits, largest=False)
    # Layers in order, so that among equal scores the first layer comes first.
    ends = torch.tensor([0, *_limits(scores, shards)], device="cpu").cumsum(0).tolist()
    candidates = [part[mask].double() for part, mask in zip(parts, masks, strict=True)]
    positions = [
        masked_positions(s, mask) + e for s, mask, e in zip(slots, masks, ends[:-1], strict=True)
    ]
    all_scores = torch.cat([c.to(ranks.device) for c in candidates])
    all_positions = torch.cat([p.to(ranks.device) for p in positions])
    (dropped,) = select_over_ranks(
        ranks.all_ranks, [all_scores], [all_positions], [count], largest=False
    )
    by_layer = dropped.split([len(c) for c in candidates])
    return ranks.all_ranks.sum(torch.stack([mask.sum() for mask in by_layer])).tolist()
