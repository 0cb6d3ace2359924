"""An update: how many blocks leave and join each layer, which, chosen on the host, and the changes.

`plan_on_host` here and `plan_on_device` of `update_on_device.py` take the same request and counts,
and return a checked `Change` for each layer. Nothing has changed then but random generators.
`prepare_changes` allocates everything that the changes need, and returns what applies them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dynsparse._core.checks import is_finite
from dynsparse.nn import SparseLinear
from dynsparse.nn.backends import scores_of
from dynsparse.nn.sharded import (
    gather_full,
    is_sharded,
    local_part,
    local_range,
    shard_dimension,
    shard_like,
)
from dynsparse.ops.linear import LayerIndex
from dynsparse.pattern import Rewiring, SparsePattern
from dynsparse.pattern.on_device import to_device
from dynsparse.ranks import (
    ALONE,
    DeferredError,
    GrowRequest,
    Ranks,
    ShardSpec,
    chunk_of,
    collective_errors,
    key_bits,
    ranks_of,
    sum_over_ranks,
)
from dynsparse.tracing import span
from dynsparse.training.budgets import Budget, Counts, Survey
from dynsparse.training.deferred_checks import (
    check_one_per_block,
    check_scores,
    layer_errors,
)
from dynsparse.training.drop import lowest_over_ranks
from dynsparse.training.grow import GradientStep, GrownValue, Growth
from dynsparse.training.history import History, LastStep, gradient_of
from dynsparse.training.layer_shards import LayerShard, find_shards, layer_sizes, resize_shards
from dynsparse.training.memory import release_memory
from dynsparse.training.optimizer_state import (
    StateEntry,
    StateHolders,
    learning_rate_of,
    prepare_tensors,
    state_entries,
)
from dynsparse.training.rank_consistency import PatternComparison
from dynsparse.training.schedule import Schedule


@dataclass(frozen=True)
class UpdateRequest:
    """The inputs of an update.

    Attributes:
        step: the step that ends in the update.
        layers: those that the update may change, by name.
        scores: from a layer's name and the layer to its drop scores [nnz].
        schedule, growth, budget, history, optimizer, regrow_dropped, initial_value: see
            `SparseTrainer`.
        ranks: those that update together; each of them plans, with the same result.
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

    @cached_property
    def state_holders(self) -> StateHolders:
        return StateHolders.of(self.optimizer)


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
    tensor's size: nothing is compiled or captured again."""
    for layer in layers.values():
        if layer.keeps_slots and not layer.resizable and layer.pattern._is_row_major:
            layer._install(layer.pattern._to_explicit_slots())


def check_trained_by(optimizer: torch.optim.Optimizer, layers: Mapping[str, SparseLinear]) -> None:
    """Raise RuntimeError, with the layer's name, where the optimizer does not hold the values."""
    trained = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    for name, layer in layers.items():
        values = layer.values
        if values not in trained and values not in optimizer.state and not is_sharded(values):
            with layer_errors(name):
                raise RuntimeError(
                    "its values are not those that the optimizer holds: make the optimizer from "
                    "model.parameters() after the last call that replaces them, such as "
                    "load_state_dict(..., assign=True); where fully_shard leaves them gathered "
                    "after backward, call reshard() before trainer.step(); an optimizer of copies "
                    "of the values, such as DeepSpeed's ZeRO makes, cannot train sparse layers: "
                    "use fully_shard"
                )


def count_blocks(request: UpdateRequest, *, on_device: bool) -> dict[str, Counts]:
    """How many blocks leave and join each layer that changes, as the first rank's budget says.

    Args:
        on_device: whether all layers are updated on devices, where scores are not checked yet.
    """
    layers, ranks = request.layers, request.ranks
    check_trained_by(request.optimizer, layers)

    def scores(name: str) -> Tensor:
        with layer_errors(name):
            local, nnz = request.scores(name, layers[name]), layers[name].pattern.nnz
            if on_device:
                check_one_per_block(local, nnz)
                return local
            return gather_full(check_scores(local, nnz))  # budgets look at all of them

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
    counts = _broadcast_counts(request.budget, survey)
    return {name: count for name, count in counts.items() if count.drop > 0 or count.grow > 0}


def _broadcast_counts(budget: Budget, survey: Survey) -> dict[str, Counts]:
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
    """One layer, and what is chosen for it: the slots to drop, where nothing can grow, the
    positions to grow, and how many of them the growth returned."""

    name: str
    layer: SparseLinear
    counts: Counts
    shard: LayerShard | None
    drop: Tensor = field(init=False)
    occupied: SparsePattern = field(init=False)
    grow: Tensor = field(init=False)
    returned: int = field(init=False)

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
    release_memory(largest, in_update=True)
    with span("drop", layer=names):
        _choose_drops(request, plans)
    with span("grow", layer=names):
        _choose_growth(request, plans)
    fills: list[object] | None = None
    if isinstance(request.initial_value, GradientStep):
        fills = _gradient_step_values(request, request.initial_value, plans)
    elif not callable(request.initial_value):
        fills = [request.initial_value] * len(plans)
    release_memory(largest, in_update=True)
    changes: dict[str, Change] = {}
    with collective_errors(request.ranks):
        with span("rewire", layer=names):
            rewirings = _make_rewirings(plans)
        release_memory(largest)
        if fills is not None:
            changes = _make_changes(request, plans, rewirings, fills)
    if fills is None:
        fills = _call_initial_value(request, plans, rewirings)
        with collective_errors(request.ranks):
            changes = _make_changes(request, plans, rewirings, fills)
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
        [plan.pattern for plan in plans],
        [plan.shard for plan in plans],
        *bits,
    )
    del scores
    for plan, drop in zip(plans, drops, strict=True):
        plan.drop, plan.occupied = drop, plan.pattern
        if request.regrow_dropped and plan.counts.drop:
            stays = torch.ones(plan.pattern.nnz, dtype=torch.bool, device="cpu")
            stays[drop] = False
            plan.occupied = SparsePattern.from_flat(
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
            plan.occupied,
            plan.counts.grow,
            spec=None if plan.shard is None else plan.shard.spec,
            # A tile machine holds only the last step.
            scores=scores_of(plan.layer) if isinstance(history, LastStep) else None,
        )
        for plan in plans
    ]
    chosen = request.growth.choose(requests, request.step, request.ranks)
    for plan, grow in zip(plans, chosen, strict=True):
        plan.grow, plan.returned = grow, len(grow)
        if request.regrow_dropped and plan.counts.drop:
            with layer_errors(plan.name):
                plan.drop = plan.drop[~torch.isin(plan.pattern.flat[plan.drop], grow)]
                plan.grow = grow[~plan.pattern.contains(grow)]


def _gradient_step_values(
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


def _make_rewirings(plans: Sequence[_LayerPlan]) -> list[Rewiring]:
    rewirings = []
    for plan in plans:
        with layer_errors(plan.name):
            check_growth(plan.layer, plan.returned, plan.counts.grow)
            sorts = not plan.layer.keeps_slots
            rewirings.append(Rewiring.make(plan.pattern, plan.drop, plan.grow, row_major=sorts))
    return rewirings


def check_growth(layer: SparseLinear, returned: int, count: int) -> None:
    """Raise ValueError if a layer of fixed size gets another number of positions than `count`."""
    if returned != count and not layer.can_resize:
        raise ValueError(f"the growth returned {returned} positions, {count} were asked for")


def _make_changes(
    request: UpdateRequest,
    plans: Sequence[_LayerPlan],
    rewirings: Sequence[Rewiring],
    fills: Sequence[object],
) -> dict[str, Change]:
    changes = {}
    for plan, rewiring, fill in zip(plans, rewirings, fills, strict=True):
        with layer_errors(plan.name):
            changes[plan.name] = Change.plan(plan.layer, rewiring, fill, request.state_holders)
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
                fills.append(fill if ranks.alone else _expand(fill, rewiring, plan.layer))
    return [ranks.broadcast(fill) if isinstance(fill, Tensor) else fill for fill in fills]


def _expand(fill: object, rewiring: Rewiring, layer: SparseLinear) -> Tensor:
    """A tensor with one entry per grown weight, which can be broadcast."""
    values = layer.values
    checked = check_fill(fill, rewiring, values)
    expanded = torch.empty(
        (len(rewiring.grown), *values.shape[1:]), dtype=values.dtype, device=values.device
    )
    if isinstance(checked, Tensor):
        return expanded.copy_(checked)
    return expanded.fill_(checked)


# The change of one layer: checked, prepared, and only then applied.


@dataclass(frozen=True)
class Change:
    """The checked change of one layer.

    Attributes:
        layer: in its state before the update.
        rewiring: from its pattern to the next.
        fill: initial values of grown blocks: a number, or [grown] or [grown, b, b].
        entries: the optimizer's state with an entry per block.
        index: that of the pattern after the change, if it was made with those of other layers.
    """

    layer: SparseLinear
    rewiring: Rewiring
    fill: float | Tensor
    entries: list[StateEntry]
    index: LayerIndex | None = None

    @classmethod
    def plan(
        cls,
        layer: SparseLinear,
        rewiring: Rewiring,
        fill: object,
        holders: StateHolders,
        index: LayerIndex | None = None,
    ) -> Change:
        """Check a change; nothing is changed.

        Raises:
            RuntimeError: values that are sharded in another way than by slots, or whose number
                would change.
            TypeError, ValueError: initial values of grown weights that do not fit.
            ValueError: optimizer state that does not follow the pattern.
        """
        values = layer.values
        if is_sharded(values):
            _check_shards(layer, rewiring)
        checked = check_fill(fill, rewiring, values)
        entries = state_entries(holders, values, rewiring, checked)
        return cls(layer, rewiring, checked, entries, index)

    def prepare(self) -> PreparedChange:
        """Allocate everything besides the present state; nothing is changed."""
        values, rewiring = self.layer.values, self.rewiring
        if is_sharded(values):
            return self._prepare_shards()
        grads: dict[Any, Tensor] = {} if values.grad is None else {"grad": values.grad}
        of_grads = [StateEntry(grads, key, grad, 0.0) for key, grad in grads.items()]
        entries = [*self.entries, *of_grads]
        switch = self.layer.prepare(rewiring, self.fill, self.index)
        parts = [switch, prepare_tensors(entries, rewiring)]

        def apply() -> None:
            for part in parts:
                part()
            values.grad = grads.get("grad")

        return PreparedChange(values, [apply])

    def _prepare_shards(self) -> PreparedChange:
        """`prepare` for sharded values, of which each rank holds some slots."""
        values, rewiring = self.layer.values, self.rewiring
        following: list[tuple[Tensor, float | Tensor]] = [(values, self.fill)]
        if values.grad is not None:
            following.append((values.grad, 0.0))
        following += [(entry.tensor, entry.fill) for entry in self.entries]
        if rewiring.keeps_slots:
            return self._prepare_refill(following)
        group = values.device_mesh.get_group(shard_dimension(values))  # type: ignore[attr-defined]
        first, last = chunk_of(ranks_of(group), rewiring.after.nnz)

        @torch.no_grad()
        def move_then_apply() -> Callable[[], None]:
            shards = [
                rewiring.apply(gather_full(tensor.detach()), fill)[first:last].clone()
                for tensor, fill in following
            ]

            @torch.no_grad()
            def apply() -> None:
                if not rewiring.keeps_size:
                    self._resize_shards(shards)
                    return
                for (tensor, _), shard in zip(following, shards, strict=True):
                    local_part(tensor).copy_(shard)

            return apply

        return PreparedChange(values, [self.layer.prepare_pattern(rewiring.after)], move_then_apply)

    def _prepare_refill(self, following: Sequence[tuple[Tensor, float | Tensor]]) -> PreparedChange:
        """`_prepare_shards` where survivors keep their slots: each rank fills its grown slots."""
        values, rewiring = self.layer.values, self.rewiring
        first, last = local_range(values)
        grown = rewiring.grown
        is_local = (grown >= first) & (grown < last)
        local_slots = grown[is_local] - first
        writes = []
        for tensor, fill in following:
            local = local_part(tensor)
            if isinstance(fill, Tensor) and fill.dim() == values.dim():
                index = grown[is_local] if len(fill) == len(values) else is_local
                fill = fill[index.to(fill.device)]
            writes.append((local, local_slots.to(local.device), fill))

        @torch.no_grad()
        def apply() -> None:
            for local, slots, fill in writes:
                local[slots] = fill

        return PreparedChange(values, [self.layer.prepare_pattern(rewiring.after), apply])

    def _resize_shards(self, shards: Sequence[Tensor]) -> None:
        """Apply shards of another length: of the values, the gradient where there is one, and the
        optimizer's state."""
        values = self.layer.values
        had_grad = values.grad is not None
        resize_shards(self.layer, self.rewiring.after.nnz)
        local_part(values.detach()).copy_(shards[0])
        full = [
            shard_like(values, shard.dtype, lambda first, last, shard=shard: shard)  # type: ignore[misc]
            for shard in shards[1:]
        ]
        if had_grad:
            values.grad = full.pop(0)
        for entry, tensor in zip(self.entries, full, strict=True):
            entry.state[entry.key] = tensor


def _check_shards(layer: SparseLinear, rewiring: Rewiring) -> None:
    shard_dimension(layer.values)
    if not rewiring.keeps_size and not isinstance(layer.executor, ShardSpec):
        raise RuntimeError(
            "the values are sharded, so their number must stay, but the update leads from "
            f"{rewiring.before.nnz} to {rewiring.after.nnz} blocks: use an algorithm that keeps "
            "it, or replicas in place of shards"
        )


@dataclass
class PreparedChange:
    """A change that needs no more memory, so that it cannot fail halfway.

    Attributes:
        values: of the layer.
        parts: functions that apply values, pattern, optimizer state and gradient; to be called
            within `defer_signals`.
        move: for sharded values whose survivors change their slots: gathers them, and returns one
            part more; all ranks of the shards call it.
    """

    values: Tensor
    parts: list[Callable[[], None]]
    move: Callable[[], Callable[[], None]] | None = None


def prepare_changes(
    changes: Mapping[str, Change],
    ranks: Ranks = ALONE,
    comparison: PatternComparison | None = None,
) -> Callable[[], None]:
    """Returns the function that applies the changes of all layers; errors name the layer, and are
    the same on all ranks.

    Args:
        comparison: of the new patterns over ranks, in the same collective.
    """
    prepared: list[PreparedChange] = []
    with collective_errors(ranks, None if comparison is None else comparison.numbers):
        for name, change in changes.items():
            with layer_errors(name), span("rewire", layer=name):
                prepared.append(change.prepare())
    if comparison is not None:
        comparison.compare()
    moving = [change for change in prepared if change.move is not None]
    failed = DeferredError()
    for moved in moving:
        with failed:
            assert moved.move is not None
            moved.parts.append(moved.move())
    # Shards of one layer have patterns of their own: values may move on some ranks only.
    may_move_elsewhere = any(
        change.layer._is_shard and is_sharded(change.layer.values) for change in changes.values()
    )
    if moving or may_move_elsewhere:
        with collective_errors(ranks):
            failed.raise_pending()

    def apply() -> None:
        for ready in prepared:
            with span("rewire"):
                for part in ready.parts:
                    part()
                release_memory(ready.values)

    return apply


def check_fill(fill: object, rewiring: Rewiring, values: Tensor) -> float | Tensor:
    """Initial values of grown blocks, as a number or as a tensor like `values`.

    Raises:
        TypeError: neither a number nor a tensor of real numbers.
        ValueError: a tensor of another shape, NaN or infinity.
    """
    if isinstance(fill, Tensor):
        fill = gather_full(fill.detach())
        if fill.is_complex() or fill.dtype == torch.bool:
            raise TypeError(f"grown weights must start with real numbers, got {fill.dtype}")
        block = list(values.shape[1:])
        per_slot = list(fill.shape) == [rewiring.after.nnz, *block]
        if fill.dim() and not per_slot and list(fill.shape) != [rewiring._grown_count, *block]:
            raise ValueError(
                "grown weights must start with a number or a tensor "
                f"{[rewiring._grown_count, *block]}, got {list(fill.shape)}"
            )
        local = local_part(values)
        fill, on_host = fill.to(local.dtype), fill.is_cpu
        # A device checks values for its own update (`update_on_device.py`).
        if (on_host or "_device_source" not in vars(rewiring)) and not is_finite(fill):
            raise ValueError("grown weights must start with finite numbers, got NaN or infinity")
        if on_host and not fill.dim():
            return float(fill)
        return to_device(fill, local.device) if on_host else fill.to(local.device)
    if not isinstance(fill, (int, float)) or isinstance(fill, bool):
        raise TypeError(f"grown weights must start with a number or a tensor, got {fill!r}")
    if not abs(fill) <= torch.finfo(values.dtype).max:
        raise ValueError(f"grown weights must start with finite numbers, got {fill!r}")
    return fill
