"""What an update is going to do to all layers, before it does anything to one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dynsparse.nn import SparseLinear
from dynsparse.nn.backends import scores_of
from dynsparse.nn.sharded import gathered, is_sharded
from dynsparse.pattern import Rewiring, SparsePattern
from dynsparse.ranks import (
    ALONE,
    DeferredError,
    GrowRequest,
    Ranks,
    collective_errors,
    key_bits,
    sum_over_ranks,
)
from dynsparse.tracing import span
from dynsparse.training.budgets import Budget, Counts, Survey
from dynsparse.training.change import (
    Change,
    check_fill,
    check_one_per_block,
    check_scores,
    naming,
)
from dynsparse.training.drop import lowest_over_ranks
from dynsparse.training.grow import Growth
from dynsparse.training.history import History, LastStep, gradient_of
from dynsparse.training.initial import GradientStep, GrownValue, learning_rate_of
from dynsparse.training.memory import release_memory
from dynsparse.training.plan_there import Decided, carried_out, decided
from dynsparse.training.schedule import Schedule
from dynsparse.training.spread import Spread, extents, spreads_of


@dataclass
class _Layer:
    """One layer on the way to its change."""

    name: str
    layer: SparseLinear
    counts: Counts
    spread: Spread | None = None
    drop: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    grow: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))

    def __post_init__(self) -> None:
        self.taken = self.layer.pattern  # once `drop` has left

    @property
    def pattern(self) -> SparsePattern:
        return self.layer.pattern


def begin_budget(budget: Budget, layers: Mapping[str, SparseLinear], ranks: Ranks) -> None:
    """Show a budget the layers that it will decide about; every rank calls this."""
    found = extents(layers, ranks)
    with collective_errors(ranks):
        budget.begin(found)
    if budget.changes_capacity:
        for layer in layers.values():
            layer.resizable = True


def hold_slots(layers: Mapping[str, SparseLinear]) -> None:
    """From now on these layers hold a slot for each entry, so that updates change the order of
    slots but no tensor's size: nothing is compiled or captured anew."""
    for layer in layers.values():
        if layer.keeps_slots and not layer.resizable and layer.pattern._is_row_major:
            layer._install(layer.pattern._with_slots())


def plan_changes(
    step: int,
    layers: Mapping[str, SparseLinear],
    *,
    schedule: Schedule,
    growth: Growth,
    budget: Budget,
    history: History,
    optimizer: torch.optim.Optimizer,
    regrow_dropped: bool,
    initial_value: GrownValue,
    scores: Callable[[str, SparseLinear], Tensor],
    ranks: Ranks = ALONE,
) -> dict[str, Change]:
    """The changes by layer name, all of them checked. Nothing has changed but random generators.

    Args:
        step: that ends in the update.
        layers: that it may change.
        scores: from a layer's name and the layer to its drop scores [nnz].
        schedule, growth, budget, history, optimizer, regrow_dropped, initial_value: see
            `SparseTrainer`.
        ranks: that take the update together: each of them plans, and all come to the same.

    Raises:
        RuntimeError, TypeError, ValueError: with the layer's name, where something does not fit.
    """

    all_there = ranks.alone and all(map(_decides_there, layers.values()))

    def checked_scores(name: str) -> Tensor:
        with naming(name):
            found, nnz = scores(name, layers[name]), layers[name].pattern.nnz
            if all_there:
                check_one_per_block(found, nnz)
                return found
            return gathered(check_scores(found, nnz))  # whole, as budgets look at all of them

    spreads = spreads_of(layers)
    survey = Survey(
        step=step,
        schedule=schedule,
        patterns=extents(layers, ranks),
        scores=checked_scores,
        history=history,
        regrow_dropped=regrow_dropped,
        ranks=ranks,
        spreads=spreads,
        there=all_there,
    )
    wanted = [
        _Layer(name, layers[name], counts, spreads.get(name))
        for name, counts in _counts(budget, survey).items()
        if counts.drop > 0 or counts.grow > 0
    ]
    changes: dict[str, Change] = {}
    there: list[Decided] = []
    # Alone one layer after the other, which takes the least memory; ranks choose for all layers in
    # the same moves.
    for group in [[one] for one in wanted] if ranks.alone else [wanted] if wanted else []:
        largest = max((one.layer.values for one in group), key=lambda values: values.nbytes)
        names = ", ".join(one.name for one in group)
        with naming(group[0].name) if ranks.alone else nullcontext():
            if ranks.alone and _decides_there(group[0].layer):
                one = group[0]
                there.append(
                    decided(
                        one.name,
                        one.layer,
                        one.counts,
                        scores,
                        growth,
                        history,
                        step,
                        regrow_dropped,
                    )
                )
                continue
            release_memory(largest, within=True)
            with span("drop", layer=names):
                _choose_drops(group, scores, ranks, regrow_dropped)
            with span("grow", layer=names):
                _choose_growth(group, growth, history, step, ranks, regrow_dropped)
            steps = _gradient_steps(group, initial_value, history, optimizer, ranks)
            release_memory(largest, within=True)
            if steps is None and not callable(initial_value):
                steps = [initial_value] * len(group)
            with collective_errors(ranks):
                with span("rewire", layer=names):
                    rewirings = _rewirings(group)
                release_memory(largest)
                if steps is not None:
                    changes |= _planned(group, rewirings, steps, optimizer)
            if steps is None:
                starts = _starts(group, initial_value, rewirings, ranks)
                with collective_errors(ranks):
                    changes |= _planned(group, rewirings, starts, optimizer)
    changes |= carried_out(
        there, initial_value=initial_value, history=history, optimizer=optimizer, step=step
    )
    return {one.name: changes[one.name] for one in wanted}


def _decides_there(layer: SparseLinear) -> bool:
    """Whether the device that a layer is on decides about it, where no other rank does, too."""
    return layer.is_elsewhere and not is_sharded(layer.values)


def _counts(budget: Budget, survey: Survey) -> dict[str, Counts]:
    """What the budget of the first rank says."""
    ranks = survey.ranks
    if ranks.alone:
        return budget.counts(survey)
    failed = DeferredError()
    said: dict[str, Counts] = {}
    with failed:
        said = budget.counts(survey)
    names = list(survey.patterns)
    found = [-1] * 2 * len(names)
    with collective_errors(ranks, found):
        failed.raise_pending()
        if ranks.rank == 0:
            found[:] = [int(n) for name in names for n in said.get(name, (-1, -1))]
    rows = zip(names, found[::2], found[1::2], strict=True)
    return {name: Counts(drop, grow) for name, drop, grow in rows if drop >= 0}


def _choose_drops(
    group: Sequence[_Layer],
    scores: Callable[[str, SparseLinear], Tensor],
    ranks: Ranks,
    regrow_dropped: bool,
) -> None:
    """The slots that leave, and the positions that are taken once they have left."""
    ranked, bits = [], [0]
    with collective_errors(ranks.all_ranks, bits):
        for one in group:
            with naming(one.name):
                found = scores(one.name, one.layer)
                if not ranks.alone:  # then they are looked through where they are ranked
                    check_scores(found, one.pattern.nnz)
                    bits[0] = max(bits[0], key_bits(found.dtype))
                ranked.append(found)
    drops = lowest_over_ranks(
        ranks,
        ranked,
        [one.counts.drop for one in group],
        [one.spread for one in group],
        *bits,
        patterns=[one.pattern for one in group],
    )
    del ranked
    for one, drop in zip(group, drops, strict=True):
        one.drop = drop
        if regrow_dropped and one.counts.drop:
            stays = torch.ones(one.pattern.nnz, dtype=torch.bool)
            stays[drop] = False
            one.taken = SparsePattern.from_flat(
                one.pattern.sorted_flat[one.pattern.by_rows(stays)],
                shape=one.pattern.shape,
                block_size=one.pattern.block_size,
            )


def _choose_growth(
    group: Sequence[_Layer],
    growth: Growth,
    history: History,
    step: int,
    ranks: Ranks,
    regrow_dropped: bool,
) -> None:
    """The positions that join; those that leave and join at once do neither."""
    wanted = [
        GrowRequest(
            one.name,
            history.pairs(one.name),
            one.taken,
            one.counts.grow,
            part=None if one.spread is None else one.spread.part,
            # Older steps are not on a target any more.
            scores=scores_of(one.layer) if isinstance(history, LastStep) else None,
        )
        for one in group
    ]
    chosen = growth.choose_parts(wanted, step, ranks)
    for one, grow in zip(group, chosen, strict=True):
        one.grow = grow
        if regrow_dropped and one.counts.drop:
            with naming(one.name):
                one.drop = one.drop[~torch.isin(one.pattern.flat[one.drop], grow)]
                one.grow = grow[~one.pattern.contains(grow)]


def _gradient_steps(
    group: Sequence[_Layer],
    start: GrownValue,
    history: History,
    optimizer: torch.optim.Optimizer,
    ranks: Ranks,
) -> list[object] | None:
    """What grown weights start with where that is a step against their gradient."""
    if not isinstance(start, GradientStep):
        return None
    parts = []
    with collective_errors(ranks):
        for one in group:
            with naming(one.name):
                grown = SparsePattern.from_flat(
                    one.grow.sort().values,
                    shape=one.pattern.shape,
                    block_size=one.pattern.block_size,
                )
                parts.append(gradient_of(history, one.name, grown, ranks))
    made: list[object] = []
    for one, gradient in zip(group, sum_over_ranks(ranks, parts), strict=True):
        with naming(one.name):
            # The gradient of a data parallel training is the mean over its ranks.
            rate = learning_rate_of(optimizer, one.layer.values) / ranks.size
            made.append(start.of(gradient, rate))
    return made


def _rewirings(group: Sequence[_Layer]) -> list[Rewiring]:
    made = []
    for one in group:
        with naming(one.name):
            sorts = not one.layer.keeps_slots
            made.append(Rewiring.make(one.pattern, one.drop, one.grow, row_major=sorts))
    return made


def _planned(
    group: Sequence[_Layer],
    rewirings: Sequence[Rewiring],
    starts: Sequence[object],
    optimizer: torch.optim.Optimizer,
) -> dict[str, Change]:
    changes = {}
    for one, rewiring, start in zip(group, rewirings, starts, strict=True):
        with naming(one.name):
            changes[one.name] = Change.planned(one.layer, rewiring, start, optimizer)
    return changes


def _starts(
    group: Sequence[_Layer], given: GrownValue, rewirings: Sequence[Rewiring], ranks: Ranks
) -> list[object]:
    """What grown weights start with: a number, or what a function of the first rank says."""
    if not callable(given):
        return [given] * len(group)
    found: list[object] = []
    with collective_errors(ranks):
        for one, rewiring in zip(group, rewirings, strict=True):
            with naming(one.name):
                start = given(one.layer, rewiring)
                found.append(start if ranks.alone else _spread(start, rewiring, one.layer))
    return [ranks.broadcast(start) if isinstance(start, Tensor) else start for start in found]


def _spread(start: object, rewiring: Rewiring, layer: SparseLinear) -> Tensor:
    """A tensor with one entry per grown weight, as it can be sent."""
    values = layer.values
    fill = check_fill(start, rewiring, values)
    spread = torch.empty((len(rewiring.grown), *values.shape[1:]), dtype=values.dtype)
    spread = spread.to(values.device)
    return spread.copy_(fill) if isinstance(fill, Tensor) else spread.fill_(fill)
