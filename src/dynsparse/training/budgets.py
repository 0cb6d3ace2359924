"""Budgets: how many blocks each layer loses and gains in an update.

A schedule gives the share of a number of blocks that an update replaces; a budget turns it into a
number of blocks to drop and one to grow per layer. Budgets that move blocks between layers, or
prune, change the layers' capacity: their values, optimizer state and index change their size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dynsparse._core.checks import check_choice, check_integer, check_types, check_within
from dynsparse.allocation import allocate
from dynsparse.pattern import SparsePattern
from dynsparse.pattern.on_device import fetch_scalars
from dynsparse.ranks import ALONE, Ranks, collective_errors, sum_over_ranks
from dynsparse.training.deferred_checks import NAN_SCORES
from dynsparse.training.drop import count_lowest, count_lowest_on_device
from dynsparse.training.history import History, gradient_of
from dynsparse.training.layer_shards import LayerShard, sum_shards
from dynsparse.training.schedule import GradualSchedule, Schedule


class Counts(NamedTuple):
    """Blocks that leave a layer, and blocks that join it."""

    drop: int
    grow: int


@dataclass(frozen=True)
class Survey:
    """The inputs of a budget: the layers that an update can change, before the update.

    Attributes:
        step: the step that ends in the update.
        schedule: of the trainer.
        patterns: name -> pattern of the layer.
        scores: returns the drop scores [nnz] of a layer by its name; computed at each call.
        history: which gradient growth uses.
        regrow_dropped: whether an update may grow what it drops.
        ranks: the ranks that update together. Each calls its budget; the first rank's result is
            used.
        shards: of tensor-parallel layers: `scores` are the shard's; `patterns` has the full layer's
            size.
        on_device: whether scores and gradients are on devices, and not checked yet: the methods
            make the host wait, once for all layers.
    """

    step: int
    schedule: Schedule
    patterns: Mapping[str, SparsePattern]
    scores: Callable[[str], Tensor]
    history: History
    regrow_dropped: bool
    ranks: Ranks = ALONE
    shards: Mapping[str, LayerShard] = field(default_factory=dict)
    on_device: bool = False

    def count_lowest(self, count: int, most: Sequence[int]) -> list[int]:
        """Count how many of the `count` lowest scores of all layers are in each layer, at most its
        `most`."""
        with collective_errors(self.ranks):
            scores = [self.scores(name) for name in self.patterns]
        if self.on_device and scores:
            return self._fetch_counts(scores, count_lowest_on_device(scores, count, most))
        shards = [self.shards.get(name) for name in self.patterns]
        return count_lowest(scores, count, most, self.ranks, shards)

    def _fetch_counts(self, scores: Sequence[Tensor], counts: Tensor) -> list[int]:
        """Copy counts [layers] from a device; raise ValueError where scores hold NaN."""
        has_nan = [score.isnan().any() for score in scores]
        numbers = [int(number) for number in fetch_scalars([*counts, *has_nan])]
        for name, is_nan in zip(self.patterns, numbers[len(scores) :], strict=True):
            if is_nan:
                raise ValueError(f"layer {name!r}: {NAN_SCORES}")
        return numbers[: len(scores)]

    def count_below_zero(self) -> list[int]:
        """Count the scores below zero in each layer."""
        if self.on_device:
            scores = [self.scores(name) for name in self.patterns]
            below = [(score < 0).sum().to(scores[0].device) for score in scores]
            return self._fetch_counts(scores, torch.stack(below)) if below else []
        with collective_errors(self.ranks):
            counts = [int((self.scores(name) < 0).sum()) for name in self.patterns]
        return self._sum_shards(counts) if self.shards else counts

    def mean_momentum(self) -> list[float]:
        """The mean magnitude of the history's gradient at the weights of each layer; 0.0 without
        weights."""
        with collective_errors(self.ranks):
            local = [
                gradient_of(self.history, name, self._local_pattern(name), self.ranks)
                if pattern.nnz
                else None
                for name, pattern in self.patterns.items()
            ]
        summed = iter(sum_over_ranks(self.ranks, [g for g in local if g is not None]))
        gradients = [None if g is None else next(summed) for g in local]
        if not self.shards:
            means = iter(fetch_scalars([g.abs().mean() for g in gradients if g is not None]))
            return [0.0 if g is None else next(means) for g in gradients]
        totals = [0.0 if g is None else g.abs().sum(dtype=torch.float64) for g in gradients]
        sums = self._sum_shards([float(total) for total in totals])
        return [
            total / max(1, p.nnz * p.block_size**2)
            for total, p in zip(sums, self.patterns.values(), strict=True)
        ]

    def _local_pattern(self, name: str) -> SparsePattern:
        return self.shards[name].pattern if name in self.shards else self.patterns[name]

    def _sum_shards(self, numbers: Sequence[float]) -> list[Any]:
        return sum_shards(self.ranks, [self.shards.get(name) for name in self.patterns], numbers)

    def room(self, name: str, drop: int) -> int:
        """How many blocks may be grown in a layer that drops `drop`."""
        pattern = self.patterns[name]
        return pattern.total - pattern.nnz + (drop if self.regrow_dropped else 0)

    def drop_count(self, nnz: int) -> int:
        """How many of `nnz` blocks the schedule replaces."""
        count = self.schedule.drop_count(self.step, nnz)
        return check_integer("the schedule's drop_count", count, 0)

    def replacements(self, name: str, nnz: int) -> int:
        """How many of `nnz` blocks the schedule replaces, no more than there is room for."""
        count = min(self.drop_count(nnz), nnz)
        return count if self.regrow_dropped else min(count, self.room(name, 0))


class Budget:
    """The base of all budgets: it has no state.

    Attributes:
        changes_capacity: whether layers may end an update with another number of blocks.
        options: settings that must agree when a training is resumed; plain types.
    """

    changes_capacity = False

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}

    def begin(self, patterns: Mapping[str, SparsePattern]) -> None:
        """Prepare for these layers; called once, when the trainer is made."""

    def counts(self, survey: Survey) -> dict[str, Counts]:
        """Layer name -> how many blocks leave and join; layers left out stay as they are."""
        raise TypeError("a budget must say how many blocks leave and join: define counts")

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise ValueError unless `state` can be loaded."""


class LayerBudget(Budget):
    """Each layer replaces the schedule's share of its own blocks."""

    def counts(self, survey: Survey) -> dict[str, Counts]:
        replaced = {name: survey.replacements(name, p.nnz) for name, p in survey.patterns.items()}
        return {name: Counts(k, k) for name, k in replaced.items()}


class GlobalBudget(Budget):
    """The lowest scores of all layers together leave; each layer grows as many as it lost.

    Layers keep their capacity, but replace different shares. Scores of different layers are
    compared unscaled: weights of a layer with a large fan-in start small, so that it changes more.
    """

    def begin(self, patterns: Mapping[str, SparsePattern]) -> None:
        _check_one_block_size(patterns, "a global budget")

    @check_types
    def counts(self, survey: Survey) -> dict[str, Counts]:
        patterns = survey.patterns
        most = [p.nnz if survey.regrow_dropped else survey.room(n, 0) for n, p in patterns.items()]
        most = [min(m, p.nnz) for m, p in zip(most, patterns.values(), strict=True)]
        blocks = sum(p.nnz for p in patterns.values())
        total = min(survey.drop_count(blocks), sum(most))
        drops = survey.count_lowest(total, most)
        return {name: Counts(k, k) for name, k in zip(patterns, drops, strict=True)}


class SoftBudget(Budget):
    """Layers grow beyond their initial size, train, and are cut back in the next update.

    An update drops what a layer has beyond the number it had when the trainer was made, then grows
    the schedule's share of that number. So new blocks compete with old ones only once they have
    been trained. The last update must grow nothing: see `ElasticSchedule`.

    Source: Yuan et al. 2021, "MEST", the soft memory bound (&S).
    """

    changes_capacity = True

    def begin(self, patterns: Mapping[str, SparsePattern]) -> None:
        self.blocks = {name: pattern.nnz for name, pattern in patterns.items()}

    def counts(self, survey: Survey) -> dict[str, Counts]:
        _check_known(self.blocks, survey.patterns)
        counts = {}
        for name, pattern in survey.patterns.items():
            blocks = self.blocks[name]
            drop = max(0, pattern.nnz - blocks)
            grow = survey.drop_count(blocks)
            counts[name] = Counts(drop, min(grow, survey.room(name, drop)))
        return counts

    def state_dict(self) -> dict[str, Any]:
        return {"blocks": dict(self.blocks)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.blocks = dict(state["blocks"])

    def check_state(self, state: dict[str, Any]) -> None:
        _check_blocks(state, "blocks", self.blocks)


_SCOPES = ("layer", "global")


class GradualBudget(Budget):
    """Layers shrink from their initial number of blocks to that of a final density.

    With a `GradualSchedule` that also replaces blocks, each update first prunes, and then replaces
    the schedule's share of what is left.

    Args:
        final_density: of all layers together at the end, in (0, 1]; None only when `densities`
            names every layer.
        scope: "layer": every layer follows the cubic to its own final number of blocks. "global":
            the total follows it, and the lowest scores of all layers leave; at least one block
            stays in every layer.
        allocation: how the final density is shared among layers, with scope "layer": "uniform",
            "er" or "erk".
        densities: layer name -> its own final density, with scope "layer".

    Raises:
        ValueError: a final density out of range or above that of the start, an unknown scope or
            allocation, layers of several block sizes in one scope.
    """

    changes_capacity = True

    @check_types
    def __init__(
        self,
        final_density: float | None,
        *,
        scope: str = "layer",
        allocation: str = "uniform",
        densities: Mapping[str, float] | None = None,
    ) -> None:
        check_choice("scope", scope, _SCOPES)
        if scope == "global" and (densities or allocation != "uniform"):
            raise ValueError(
                'with scope "global" the scores decide the densities of the layers: leave out '
                "allocation and densities"
            )
        if final_density is not None:
            check_within("final_density", final_density, "(0, 1]")
        self.final_density = final_density
        self.scope = scope
        self.allocation = allocation
        self.densities = dict(densities or {})
        self.options: dict[str, Any] = {
            "final_density": final_density,
            "scope": scope,
            "allocation": allocation,
            "densities": self.densities,
        }

    def begin(self, patterns: Mapping[str, SparsePattern]) -> None:
        if self.scope == "global":
            _check_one_block_size(patterns, 'scope "global"')
        self.first = {name: pattern.nnz for name, pattern in patterns.items()}
        self.final = allocate(
            {name: pattern.shape for name, pattern in patterns.items()},
            self.final_density,
            method=self.allocation,
            block_size={name: pattern.block_size for name, pattern in patterns.items()},
            densities=self.densities,
        )
        if self.scope == "global":
            first, final = sum(self.first.values()), sum(self.final.values())
            if final > first:
                raise ValueError(
                    f"pruning cannot end with {final} blocks in all layers, which have {first} now"
                )
            return
        for name, final in self.final.items():
            if final > self.first[name]:
                raise ValueError(
                    f"pruning cannot end with {final} blocks in layer {name!r}, which has "
                    f"{self.first[name]} now: begin denser, or lower the final density"
                )

    def counts(self, survey: Survey) -> dict[str, Counts]:
        schedule = survey.schedule
        if not isinstance(schedule, GradualSchedule):
            raise TypeError(f"expected a GradualSchedule, got {type(schedule).__name__}")
        _check_known(self.first, survey.patterns)
        left = schedule.remaining(survey.step)
        count_drops = self._global_drops if self.scope == "global" else self._layer_drops
        pruned = count_drops(survey, left)
        counts = {}
        for name, drop in pruned.items():
            replaced = survey.replacements(name, survey.patterns[name].nnz - drop)
            counts[name] = Counts(drop + replaced, replaced)
        return counts

    def _layer_drops(self, survey: Survey, left: float) -> dict[str, int]:
        drops = {}
        for name, pattern in survey.patterns.items():
            final = self.final[name]
            target = final + round((self.first[name] - final) * left)
            drops[name] = max(0, pattern.nnz - target)
        return drops

    def _global_drops(self, survey: Survey, left: float) -> dict[str, int]:
        patterns = survey.patterns
        final = sum(self.final[name] for name in patterns)
        target = final + round((sum(self.first[name] for name in patterns) - final) * left)
        most = [max(0, pattern.nnz - 1) for pattern in patterns.values()]
        drop = min(max(0, sum(p.nnz for p in patterns.values()) - target), sum(most))
        counts = survey.count_lowest(drop, most)
        return dict(zip(patterns, counts, strict=True))

    def state_dict(self) -> dict[str, Any]:
        return {"first": dict(self.first), "final": dict(self.final)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.first, self.final = dict(state["first"]), dict(state["final"])

    def check_state(self, state: dict[str, Any]) -> None:
        _check_blocks(state, "first", self.first)
        _check_blocks(state, "final", self.final)


class MomentumBudget(Budget):
    """Each layer drops the schedule's share; the total is grown in proportion to mean momentum.

    A layer's share is the mean |momentum| of its present weights before the update over the sum of
    these means. What a layer has no room for goes to the others. The total stays the same, and
    every layer keeps at least one block.

    Source: Dettmers and Zettlemoyer 2019, "Sparse Networks from Scratch", section 3.
    """

    changes_capacity = True

    def begin(self, patterns: Mapping[str, SparsePattern]) -> None:
        _check_one_block_size(patterns, "redistribution")
        self.names = frozenset(patterns)

    def counts(self, survey: Survey) -> dict[str, Counts]:
        _check_known(self.names, survey.patterns)
        drops, means, room = [], [], []
        momentum = survey.mean_momentum()
        for (name, pattern), mean in zip(survey.patterns.items(), momentum, strict=True):
            count = survey.drop_count(pattern.nnz)
            drop = min(count, max(0, pattern.nnz - 1))
            drops.append(drop)
            means.append(mean)
            room.append(survey.room(name, drop))
            if not math.isfinite(means[-1]):
                raise ValueError(
                    f"the momentum of layer {name!r} is {means[-1]}, so layers cannot be ranked: "
                    "the training has diverged"
                )
        # Where not all dropped blocks have room to grow, fewer are dropped: the total stays.
        while (short := sum(drops) - sum(room)) > 0:
            largest = max(range(len(drops)), key=drops.__getitem__)
            drops[largest] -= min(short, drops[largest])
            room = [survey.room(n, d) for n, d in zip(survey.patterns, drops, strict=True)]
        grows = apportion(sum(drops), means if any(means) else [float(d) for d in drops], room)
        pairs = zip(survey.patterns, drops, grows, strict=True)
        return {name: Counts(drop, grow) for name, drop, grow in pairs}


def apportion(total: int, weights: Sequence[float], most: Sequence[int]) -> list[int]:
    """Divide `total` into whole numbers in proportion to `weights`, none above its `most`.

    What exceeds a `most` is shared among the others in proportion to their weights, or evenly where
    all of these are zero. Rounding is by largest remainder, the first of equals first.

    Raises:
        ValueError: a total that all `most` together cannot hold.
    """
    if total > sum(most):
        raise ValueError(f"cannot share {total} among layers with room for {sum(most)}")
    shares = [0] * len(weights)
    with_room = [i for i in range(len(weights)) if most[i] > 0]
    left = total
    while left:
        scale = math.fsum(weights[i] for i in with_room)
        quota = {i: left * (weights[i] / scale if scale else 1 / len(with_room)) for i in with_room}
        full = [i for i in with_room if quota[i] >= most[i]]
        if not full:
            for i in with_room:
                shares[i] = math.floor(quota[i])
            order = sorted(with_room, key=lambda i: (math.floor(quota[i]) - quota[i], i))
            for i in order[: total - sum(shares)]:
                shares[i] += 1
            break
        for i in full:
            shares[i] = most[i]
            left -= most[i]
        with_room = [i for i in with_room if i not in full]
    return shares


def _check_one_block_size(patterns: Mapping[str, SparsePattern], what: str) -> None:
    """Raise unless all layers have blocks of one size, so that counts and scores compare."""
    sizes = {name: pattern.block_size for name, pattern in patterns.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(
            f"{what} compares the blocks of all layers, so they must have one block size, got "
            + ", ".join(f"{size} in {name!r}" for name, size in sizes.items())
        )


def _check_known(known: Collection[str], patterns: Mapping[str, SparsePattern]) -> None:
    """Raise RuntimeError for a layer that `Budget.begin` did not get."""
    for name in patterns:
        if name not in known:
            raise RuntimeError(
                f"layer {name!r} was frozen when the trainer was made, which shares out the blocks "
                "among the others: make a new trainer"
            )


def _check_blocks(state: Any, key: str, layers: Mapping[str, int]) -> None:
    """Raise ValueError unless `state` holds a number of blocks for each of these layers."""
    saved = state.get(key) if isinstance(state, dict) else None
    if not isinstance(saved, dict) or saved.keys() != layers.keys():
        raise ValueError(f"the budget must hold {key!r}, the blocks of each of {sorted(layers)}")
    for name, count in saved.items():
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise ValueError(
                f"the {key!r} of layer {name!r} must be a number of blocks, got {count!r}"
            )
