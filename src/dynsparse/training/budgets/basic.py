"""How many blocks each layer loses and gains in an update.

A schedule says when, and which share of so many blocks an update replaces; a budget makes of it one
number of blocks to drop and one to grow per layer. Budgets that move blocks between layers, or use
up fewer and fewer, change the layers' capacity: their values, optimizer state and index really
become larger or smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dynsparse.pattern import SparsePattern
from dynsparse.pattern.on_device import told
from dynsparse.ranks import ALONE, Ranks, StackedRanks, collective_errors, ranks_of, sum_over_ranks
from dynsparse.training.drop import UNRANKED, lowest_of_all, lowest_there
from dynsparse.training.history import History, gradient_of
from dynsparse.training.schedule import Schedule
from dynsparse.training.spread import Spread
from dynsparse.typed import typed


class Counts(NamedTuple):
    """Blocks that leave a layer, and blocks that join it."""

    drop: int
    grow: int


@dataclass(frozen=True)
class Survey:
    """What a budget may look at: the layers that an update can change, before it."""

    step: int
    schedule: Schedule
    patterns: Mapping[str, SparsePattern]
    scores: Callable[[str], Tensor]
    """From a layer's name to its drop scores [nnz]; computed at each call."""
    history: History
    regrow_dropped: bool
    ranks: Ranks = ALONE
    """That take the update together. Each asks its budget; what that of the first says counts."""
    spreads: Mapping[str, Spread] = field(default_factory=dict)
    """The layers in rectangles: `scores` are those of this rank's; `patterns` has their extents."""
    there: bool = False
    """Whether scores and gradients are on devices, and not looked through: what is asked here makes
    the host wait, once for all layers."""

    def lowest_of_all(self, count: int, most: Sequence[int], stages: Ranks = ALONE) -> list[int]:
        """How many of the `count` lowest scores of all layers, those of all `stages` of a pipeline,
        are in each layer, at most its `most`."""
        among = self.ranks
        if not stages.alone:
            among = StackedRanks(self.ranks.all_ranks, stages)
        with collective_errors(among):
            scores = [self.scores(name) for name in self.patterns]
        if self.there and stages.alone and scores:
            return self._told(scores, lowest_there(scores, count, most))
        spreads = [self.spreads.get(name) for name in self.patterns]
        return lowest_of_all(scores, count, most, self.ranks, spreads, stages)

    def _told(self, scores: Sequence[Tensor], counts: Tensor) -> list[int]:
        """What devices have counted [layers], unless scores hold NaN."""
        odd = [score.isnan().any() for score in scores]
        found = [int(number) for number in told([*counts, *odd])]
        for name, is_odd in zip(self.patterns, found[len(odd) :], strict=True):
            if is_odd:
                raise ValueError(f"layer {name!r}: {UNRANKED}")
        return found[: len(odd)]

    def below_zero(self) -> list[int]:
        """For each layer how many scores are below zero."""
        if self.there:
            scores = [self.scores(name) for name in self.patterns]
            below = [(score < 0).sum().to(scores[0].device) for score in scores]
            return self._told(scores, torch.stack(below)) if below else []
        with collective_errors(self.ranks):
            found = [int((self.scores(name) < 0).sum()) for name in self.patterns]
        if not self.spreads:
            return found
        axes = [self.spreads[n].part.axes if n in self.spreads else () for n in self.patterns]
        own = [n if self.ranks.is_lead_rank(one) else 0 for n, one in zip(found, axes, strict=True)]
        counts = torch.tensor(own, device=self.ranks.device)
        return self.ranks.all_ranks.sum(counts).tolist()

    def mean_momentum(self) -> list[float]:
        """For each layer the mean magnitude of the history's gradient at its weights; 0.0 where it
        has none."""
        with collective_errors(self.ranks):
            found = [
                gradient_of(self.history, n, self._held(n), self.ranks) if p.nnz else None
                for n, p in self.patterns.items()
            ]
        summed = sum_over_ranks(self.ranks, [part for part in found if part is not None])
        if self.spreads:
            return self._means_over_mesh(found, summed)
        means = iter(told([part.abs().mean() for part in summed]))
        return [0.0 if part is None else next(means) for part in found]

    def _held(self, name: str) -> SparsePattern:
        """The pattern that this rank has of a layer."""
        return self.spreads[name].pattern if name in self.spreads else self.patterns[name]

    def _means_over_mesh(self, found: Sequence[Tensor | None], summed: list[Tensor]) -> list[float]:
        own = iter(summed)
        totals = torch.zeros(len(found), dtype=torch.float64)
        for i, (name, part) in enumerate(zip(self.patterns, found, strict=True)):
            spread = self.spreads.get(name)
            axes = () if spread is None else spread.part.axes
            held = None if part is None else next(own)
            if held is not None and self.ranks.is_lead_rank(axes):
                totals[i] = held.abs().sum(dtype=torch.float64)
        sums = self.ranks.all_ranks.sum(totals.to(self.ranks.device)).tolist()
        return [
            total / max(1, p.nnz * p.block_size**2)
            for total, p in zip(sums, self.patterns.values(), strict=True)
        ]

    def room(self, name: str, drop: int) -> int:
        """How many blocks may be grown in a layer that drops `drop`."""
        pattern = self.patterns[name]
        return pattern.total - pattern.nnz + (drop if self.regrow_dropped else 0)

    def replaced(self, name: str, nnz: int) -> int:
        """How many of `nnz` blocks the schedule replaces, no more than there is room for."""
        count = min(self.schedule.drop_count(self.step, nnz), nnz)
        return count if self.regrow_dropped else min(count, self.room(name, 0))


class Budget:
    """The base of all budgets: it needs no numbers from the start and remembers nothing.

    Attributes:
        changes_capacity: whether layers may end an update with another number of blocks.
        options: what must agree when a training is resumed; plain types.
    """

    changes_capacity = False

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}

    def begin(self, patterns: Mapping[str, SparsePattern]) -> None:
        """Look at the layers as they are when the trainer is made."""

    def counts(self, survey: Survey) -> dict[str, Counts]:
        """Layer name -> how many blocks leave and join; layers left out stay as they are."""
        raise TypeError("a budget must say how many blocks leave and join: define counts")

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken."""

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise ValueError unless `state` can be loaded."""


class LayerBudget(Budget):
    """Each layer replaces the schedule's share of its own blocks."""

    def counts(self, survey: Survey) -> dict[str, Counts]:
        replaced = {name: survey.replaced(name, p.nnz) for name, p in survey.patterns.items()}
        return {name: Counts(k, k) for name, k in replaced.items()}


class GlobalBudget(Budget):
    """The lowest scores of all layers together leave; each layer grows as many as it lost.

    So the layers differ in how much of them is replaced, and keep their capacity. Scores of
    different layers are compared as they are: weights of a layer with a large fan-in are small from
    the start, and such a layer changes more.

    Args:
        stages: in a pipeline, the process group (or the mesh) along which the stages lie: each of
            its ranks holds other layers, and the lowest scores of all stages leave. All stages then
            update at the same steps.
    """

    def __init__(self, stages: Any = None) -> None:
        super().__init__()
        self.stages = ranks_of(stages)

    def begin(self, patterns: Mapping[str, SparsePattern]) -> None:
        check_one_block_size(patterns, "a global budget")

    @typed
    def counts(self, survey: Survey) -> dict[str, Counts]:
        patterns = survey.patterns
        self.stages.barrier(
            f"step {survey.step} of this stage ends in an update of all stages; call "
            "trainer.step() as often in every stage"
        )
        most = [p.nnz if survey.regrow_dropped else survey.room(n, 0) for n, p in patterns.items()]
        most = [min(m, p.nnz) for m, p in zip(most, patterns.values(), strict=True)]
        blocks, at_most = sum(p.nnz for p in patterns.values()), sum(most)
        if not self.stages.alone:
            sizes = torch.tensor([blocks, at_most], device=self.stages.device)
            blocks, at_most = self.stages.sum(sizes).tolist()
        total = min(survey.schedule.drop_count(survey.step, blocks), at_most)
        drops = survey.lowest_of_all(total, most, self.stages)
        return {name: Counts(k, k) for name, k in zip(patterns, drops, strict=True)}


class SoftBudget(Budget):
    """Layers grow beyond their blocks of the start, train, and are cut back at the next update.

    An update drops what a layer has beyond the number it had when the trainer was made, then grows
    the schedule's share of that number. So new blocks compete with old ones only after they have
    been trained. The last update, which the schedule must have, grows nothing.

    Source: Yuan et al. 2021, "MEST", the soft memory bound (&S).
    """

    changes_capacity = True

    def begin(self, patterns: Mapping[str, SparsePattern]) -> None:
        self.blocks = {name: pattern.nnz for name, pattern in patterns.items()}

    def counts(self, survey: Survey) -> dict[str, Counts]:
        found = {}
        for name, pattern in survey.patterns.items():
            blocks = self.blocks[name]
            drop = max(0, pattern.nnz - blocks)
            grow = survey.schedule.drop_count(survey.step, blocks)
            found[name] = Counts(drop, min(grow, survey.room(name, drop)))
        return found

    def state_dict(self) -> dict[str, Any]:
        return {"blocks": dict(self.blocks)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.blocks = dict(state["blocks"])

    def check_state(self, state: dict[str, Any]) -> None:
        check_blocks(state, "blocks", self.blocks)


def check_one_block_size(patterns: Mapping[str, SparsePattern], what: str) -> None:
    """Raise unless all layers have blocks of one size, so that counts and scores compare."""
    sizes = {name: pattern.block_size for name, pattern in patterns.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(
            f"{what} compares the blocks of all layers, so they must have one block size, got "
            + ", ".join(f"{size} in {name!r}" for name, size in sizes.items())
        )


def check_blocks(state: Any, key: str, own: Mapping[str, int]) -> None:
    """Raise ValueError unless `state` holds a number of blocks for each layer of `own`."""
    found = state.get(key) if isinstance(state, dict) else None
    if not isinstance(found, dict) or found.keys() != own.keys():
        raise ValueError(f"the budget must hold {key!r}, the blocks of each of {sorted(own)}")
    for name, count in found.items():
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise ValueError(
                f"the {key!r} of layer {name!r} must be a number of blocks, got {count!r}"
            )
