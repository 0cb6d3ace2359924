"""Plan an update: how many blocks leave and join each layer, and which, chosen on the host.

`plan_on_host` here and `plan_on_device` of `update_on_device.py` take the same request and counts,
and return a checked `Change` for each layer. Nothing has changed then but random generators.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dynsparse.nn import SparseLinear
from dynsparse.nn.backends import scores_of
from dynsparse.nn.sharded import gathered
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
from dynsparse.training.change import Change, check_fill
from dynsparse.training.deferred_checks import check_one_per_block, check_scores, layer_errors
from dynsparse.training.drop import lowest_over_ranks
from dynsparse.training.grow import GradientStep, GrownValue, Growth
from dynsparse.training.history import History, LastStep, gradient_of
from dynsparse.training.layer_shards import LayerShard, find_shards, layer_sizes
from dynsparse.training.memory import release_memory
from dynsparse.training.optimizer_state import learning_rate_of
from dynsparse.training.schedule import Schedule


@dataclass(frozen=True)
class UpdateRequest:
    """What an update follows from.

    Attributes:
        step: the step that ends in the update.
        layers: those that the update may change, by name.
        scores: from a layer's name and the layer to its drop scores [nnz].
        schedule, growth, budget, history, optimizer, regrow_dropped, initial_value: see
            `SparseTrainer`.
        ranks: that take the update together: each of them plans, with the same result.
    """

    step: int
    layers: Mapping[str, SparseLinear]
    schedule: Schedule
    growth: Growth
    budget: Budget
    history: History
    optimizer: torch.optim.Optimizer
    regrow_dropped: bool
    initial_value: GrownValue
    scores: Callable[[str, SparseLinear], Tensor]
    ranks: Ranks = ALONE


def begin_budget(budget: Budget, layers: Mapping[str, SparseLinear], ranks: Ranks) -> None:
    """Let a budget look at its layers before the first step; every rank calls this."""
    sizes = layer_sizes(layers, ranks)
    with collective_errors(ranks):
        budget.begin(sizes)
    if budget.changes_capacity:
        for layer in layers.values():
            layer.resizable = True


def keep_slots(layers: Mapping[str, SparseLinear]) -> None:
    """Let these layers hold a slot for each entry, so that updates change the order of slots but no
    tensor's size: nothing is compiled or captured anew."""
    for layer in layers.values():
        if layer.keeps_slots and not layer.resizable and layer.pattern._is_row_major:
            layer._install(layer.pattern._with_slots())


def count_blocks(request: UpdateRequest, *, on_device: bool) -> dict[str, Counts]:
    """How many blocks leave and join each layer that changes, as the first rank's budget says.

    Args:
        on_device: whether all layers are updated on devices, where scores are not checked yet.
    """
    layers, ranks = request.layers, request.ranks

    def scores(name: str) -> Tensor:
        with layer_errors(name):
            local, nnz = request.scores(name, layers[name]), layers[name].pattern.nnz
            if on_device:
                check_one_per_block(local, nnz)
                return local
            return gathered(check_scores(local, nnz))  # budgets look at all of them

    survey = Survey(
        step=request.step,
        schedule=request.schedule,
        patterns=layer_sizes(layers, ranks),
        scores=scores,
        history=request.history,
        regrow_dropped=request.regrow_dropped,
        ranks=ranks,
        shards=find_shards(layers),
        on_device=on_device,
    )
    counts = _counts_of_first(request.budget, survey)
    return {name: count for name, count in counts.items() if count.drop > 0 or count.grow > 0}


def _counts_of_first(budget: Budget, survey: Survey) -> dict[str, Counts]:
    ranks = survey.ranks
    if ranks.alone:
        return budget.counts(survey)
    failed = DeferredError()
    counts: dict[str, Counts] = {}
    with failed:
        counts = budget.counts(survey)
    names = list(survey.patterns)
    numbers = [-1] * 2 * len(names)
    with collective_errors(ranks, numbers):
        failed.raise_pending()
        if ranks.rank == 0:
            numbers[:] = [int(n) for name in names for n in counts.get(name, (-1, -1))]
    rows = zip(names, numbers[::2], numbers[1::2], strict=True)
    return {name: Counts(drop, grow) for name, drop, grow in rows if drop >= 0}


@dataclass
class _LayerPlan:
    """One layer, with the slots to drop and the positions to grow once they are chosen."""

    name: str
    layer: SparseLinear
    counts: Counts
    shard: LayerShard | None
    drop: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64, device="cpu"))
    grow: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64, device="cpu"))

    def __post_init__(self) -> None:
        self.taken = self.layer.pattern  # where nothing can grow

    @property
    def pattern(self) -> SparsePattern:
        return self.layer.pattern


def plan_on_host(request: UpdateRequest, counts: Mapping[str, Counts]) -> dict[str, Change]:
    """The changes by layer name, decided on the host, by all ranks together.

    Raises:
        RuntimeError, TypeError, ValueError: with the layer's name, where something does not fit.
    """
    shards = find_shards(request.layers)
    plans = [
        _LayerPlan(name, request.layers[name], count, shards.get(name))
        for name, count in counts.items()
    ]
    changes: dict[str, Change] = {}
    if not request.ranks.alone:  # the same few collectives for all layers
        return _plan_group(request, plans) if plans else changes
    for plan in plans:  # one layer after the other, which takes the least memory
        with layer_errors(plan.name):
            changes |= _plan_group(request, [plan])
    return changes


def _plan_group(request: UpdateRequest, plans: Sequence[_LayerPlan]) -> dict[str, Change]:
    largest = max((plan.layer.values for plan in plans), key=lambda values: values.nbytes)
    names = ", ".join(plan.name for plan in plans)
    release_memory(largest, within=True)
    with span("drop", layer=names):
        _choose_drops(request, plans)
    with span("grow", layer=names):
        _choose_growth(request, plans)
    fills: list[object] | None = None
    if isinstance(request.initial_value, GradientStep):
        fills = _gradient_steps(request, request.initial_value, plans)
    elif not callable(request.initial_value):
        fills = [request.initial_value] * len(plans)
    release_memory(largest, within=True)
    changes: dict[str, Change] = {}
    with collective_errors(request.ranks):
        with span("rewire", layer=names):
            rewirings = _rewirings(plans)
        release_memory(largest)
        if fills is not None:
            changes = _changes(request, plans, rewirings, fills)
    if fills is None:
        fills = _call_initial_value(request, plans, rewirings)
        with collective_errors(request.ranks):
            changes = _changes(request, plans, rewirings, fills)
    return changes


def _choose_drops(request: UpdateRequest, plans: Sequence[_LayerPlan]) -> None:
    """Choose the slots that leave, and with them the positions where something can grow."""
    ranks = request.ranks
    scores, bits = [], [0]
    with collective_errors(ranks.all_ranks, bits):
        for plan in plans:
            with layer_errors(plan.name):
                scores.append(request.scores(plan.name, plan.layer))
                if not ranks.alone:  # otherwise they are checked where they are ranked
                    check_scores(scores[-1], plan.pattern.nnz)
                    bits[0] = max(bits[0], key_bits(scores[-1].dtype))
    drops = lowest_over_ranks(
        ranks,
        scores,
        [plan.counts.drop for plan in plans],
        [plan.shard for plan in plans],
        *bits,
        patterns=[plan.pattern for plan in plans],
    )
    del scores
    for plan, drop in zip(plans, drops, strict=True):
        plan.drop = drop
        if request.regrow_dropped and plan.counts.drop:
            stays = torch.ones(plan.pattern.nnz, dtype=torch.bool, device="cpu")
            stays[drop] = False
            plan.taken = SparsePattern.from_flat(
                plan.pattern.sorted_flat[plan.pattern.by_rows(stays)],
                shape=plan.pattern.shape,
                block_size=plan.pattern.block_size,
            )


def _choose_growth(request: UpdateRequest, plans: Sequence[_LayerPlan]) -> None:
    """Choose the positions that join; those that would leave and join stay."""
    history = request.history
    requests = [
        GrowRequest(
            plan.name,
            history.pairs(plan.name),
            plan.taken,
            plan.counts.grow,
            spec=None if plan.shard is None else plan.shard.spec,
            # A tile machine holds only the last step.
            scores=scores_of(plan.layer) if isinstance(history, LastStep) else None,
        )
        for plan in plans
    ]
    chosen = request.growth.choose(requests, request.step, request.ranks)
    for plan, grow in zip(plans, chosen, strict=True):
        plan.grow = grow
        if request.regrow_dropped and plan.counts.drop:
            with layer_errors(plan.name):
                plan.drop = plan.drop[~torch.isin(plan.pattern.flat[plan.drop], grow)]
                plan.grow = grow[~plan.pattern.contains(grow)]


def _gradient_steps(
    request: UpdateRequest, start: GradientStep, plans: Sequence[_LayerPlan]
) -> list[object]:
    """Initial values of grown weights that are a step against their gradient."""
    ranks = request.ranks
    parts = []
    with collective_errors(ranks):
        for plan in plans:
            with layer_errors(plan.name):
                grown = SparsePattern.from_flat(
                    plan.grow.sort().values,
                    shape=plan.pattern.shape,
                    block_size=plan.pattern.block_size,
                )
                parts.append(gradient_of(request.history, plan.name, grown, ranks))
    fills: list[object] = []
    for plan, gradient in zip(plans, sum_over_ranks(ranks, parts), strict=True):
        with layer_errors(plan.name):
            # The gradient of a data parallel training is the mean over its ranks.
            rate = learning_rate_of(request.optimizer, plan.layer.values) / ranks.size
            fills.append(start.of(gradient, rate))
    return fills


def _rewirings(plans: Sequence[_LayerPlan]) -> list[Rewiring]:
    rewirings = []
    for plan in plans:
        with layer_errors(plan.name):
            sorts = not plan.layer.keeps_slots
            rewirings.append(Rewiring.make(plan.pattern, plan.drop, plan.grow, row_major=sorts))
    return rewirings


def _changes(
    request: UpdateRequest,
    plans: Sequence[_LayerPlan],
    rewirings: Sequence[Rewiring],
    fills: Sequence[object],
) -> dict[str, Change]:
    changes = {}
    for plan, rewiring, fill in zip(plans, rewirings, fills, strict=True):
        with layer_errors(plan.name):
            changes[plan.name] = Change.plan(plan.layer, rewiring, fill, request.optimizer)
    return changes


def _call_initial_value(
    request: UpdateRequest, plans: Sequence[_LayerPlan], rewirings: Sequence[Rewiring]
) -> list[object]:
    """Initial values of grown weights by the caller's function, as the first rank computes them."""
    assert callable(request.initial_value)
    ranks = request.ranks
    fills: list[object] = []
    with collective_errors(ranks):
        for plan, rewiring in zip(plans, rewirings, strict=True):
            with layer_errors(plan.name):
                fill = request.initial_value(plan.layer, rewiring)
                fills.append(fill if ranks.alone else _expanded(fill, rewiring, plan.layer))
    return [ranks.broadcast(fill) if isinstance(fill, Tensor) else fill for fill in fills]


def _expanded(fill: object, rewiring: Rewiring, layer: SparseLinear) -> Tensor:
    """A tensor with one entry per grown weight, which can be broadcast."""
    values = layer.values
    checked = check_fill(fill, rewiring, values)
    expanded = torch.empty(
        (len(rewiring.grown), *values.shape[1:]), dtype=values.dtype, device=values.device
    )
    if isinstance(checked, Tensor):
        return expanded.copy_(checked)
    return expanded.fill_(checked)
