"""Top-KAST: the forward pass uses the largest weights, the backward pass trains more of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dynsparse._core.checks import check_not_negative, check_within
from dynsparse._core.interrupts import defer_signals
from dynsparse.nn import SparseEmbedding, SparseLinear
from dynsparse.nn.active_set import ActiveSet
from dynsparse.nn.sharded import device_of, gather_full, is_sharded, local_part, local_range
from dynsparse.ops.grow import select
from dynsparse.pattern import Rewiring, SparsePattern
from dynsparse.ranks import collective_errors
from dynsparse.training.algorithms.composed import cosine_schedule
from dynsparse.training.budgets import Budget, Counts, Survey
from dynsparse.training.deferred_checks import check_scores, defer_checks, layer_errors
from dynsparse.training.drop import lowest_over_ranks, magnitude
from dynsparse.training.grow import GrownValue, RandomGrowth
from dynsparse.training.layer_shards import (
    LayerShard,
    find_shards,
    layer_sizes,
    sum_shards,
)
from dynsparse.training.optimizer_state import StateHolders
from dynsparse.training.schedule import Schedule
from dynsparse.training.trainer import SparseTrainer
from dynsparse.training.update import Change, check_trained_by, prepare_changes
from dynsparse.training.update_on_device import can_update_on_device

_NAN = (
    "its weights held NaN at step {step}, so that those of the forward pass could not be ranked: "
    "the training has diverged"
)


class SpareBudget(Budget):
    """Replaces the schedule's share of the blocks that the forward pass does not use.

    Args:
        forward_fraction: share of a layer's blocks that the forward pass uses.
    """

    def __init__(self, forward_fraction: float) -> None:
        self.forward_fraction = check_within("forward_fraction", forward_fraction, "(0, 1]")
        self.options = {"forward_fraction": forward_fraction}

    def forward_count(self, nnz: int) -> int:
        """How many of `nnz` blocks the forward pass uses: at least one, if there is one."""
        return min(nnz, max(1, round(self.forward_fraction * nnz)))

    def counts(self, survey: Survey) -> dict[str, Counts]:
        counts = {}
        for name, pattern in survey.patterns.items():
            count = survey.replacements(name, pattern.nnz - self.forward_count(pattern.nnz))
            counts[name] = Counts(count, count)
        return counts


class TopKAST(SparseTrainer):
    """The layers store the set B; their forward pass uses the set A, the largest weights of B.

    Output and gradient of the input cost in proportion to A, the gradient of the weights to B, and
    all of B is trained. Every `update_interval` steps A is chosen again, and random positions
    replace a share of the weights outside A, the smallest. Before each optimizer step the gradient
    gets exploration * w for weights in A and exploration * w / D for the others, D the forward
    density |A| / (out * in / b^2).

    Source: Jayakumar et al. 2020, "Top-KAST: Top-K Always Sparse Training". In the paper weights
    outside B keep their last value and enter B when those inside have shrunk below them; here
    nothing exists outside B, and positions enter at random, with `initial_value`.

    The model's state holds B, the trainer's state A. `shrink` makes an ordinary sparse model from
    A. A layer without its trainer's state uses all of B.

    Args:
        model, optimizer, initial_value, ranks: see `SparseTrainer`. The density of the
            layers is that of B.
        forward_fraction: |A| / |B|, in (0, 1].
        exploration: strength of the pull to zero, at least 0.
        total_steps, update_interval, drop_fraction: see `RigL`; the share is one of the weights
            outside A, and falls to zero at the end of the training.
        schedule: in place of these three.
        seed: the seed of the random positions; see `RandomGrowth`.

    Raises:
        TypeError: a layer that is an embedding table or on a tile machine: they use all of B.
    """

    budget: SpareBudget
    own_state_holds = "positions"

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        forward_fraction: float = 0.5,
        exploration: float = 1e-4,
        total_steps: int | None = None,
        update_interval: int | None = None,
        drop_fraction: float | None = None,
        schedule: Schedule | None = None,
        seed: int | None = None,
        initial_value: GrownValue = 0.0,
        ranks: Any = "auto",
    ) -> None:
        self.exploration = check_not_negative("exploration", exploration)
        schedule = cosine_schedule(
            total_steps, update_interval, drop_fraction, schedule, end_fraction=1.0
        )
        super().__init__(
            model,
            optimizer,
            schedule=schedule,
            growth=RandomGrowth(seed),
            initial_value=initial_value,
            budget=SpareBudget(forward_fraction),
            ranks=ranks,
        )
        for name, layer in self._trainable_layers().items():
            if isinstance(layer, SparseEmbedding) or layer.target is not None:
                what = "an embedding table" if layer.target is None else "on a tile machine"
                raise TypeError(
                    f"layer {name!r} is {what}, whose products use all of its weights: freeze it "
                    "or leave it dense to train the others with Top-KAST"
                )
        # This rank's active slots of tensor-parallel layers, and their number over all shards.
        self._counted: dict[str, tuple[ActiveSet, int]] = {}
        self._apply_own_state(self._plan_own_state({}))

    @torch.no_grad()
    def _plan_own_state(self, changes: dict[str, Change]) -> dict[str, list[ActiveSet]]:
        """Choose A again for every layer, among its weights after the changes.

        Returns [new A] for each layer, or [new A, present A] where the present set can take the new
        one over in its own memory.
        """
        trained = self._trainable_layers()
        chosen = {
            name: self._choose_on_device(name, layer, changes.get(name))
            for name, layer in trained.items()
            if can_update_on_device(layer, self.ranks)
        }
        patterns, scores = {}, []
        with collective_errors(self.ranks):
            for name, layer in trained.items():
                if name in chosen:
                    continue
                # Sharded values do not move before everything is planned.
                pattern, values = layer.pattern, gather_full(layer.values.detach())
                if name in changes:
                    rewiring = changes[name].rewiring
                    pattern, values = rewiring.after, rewiring.apply(values, changes[name].fill)
                with layer_errors(name):
                    patterns[name] = pattern
                    scores.append(check_scores(magnitude(values), pattern.nnz).neg_())
        layers = {name: self.layers[name] for name in patterns}
        shards = find_shards(layers)
        # An update leaves the number of blocks as it is.
        sizes = layer_sizes(layers, self.ranks)
        counts = [self.budget.forward_count(sizes[name].nnz) for name in patterns]
        after = [
            LayerShard(shards[name].spec, pattern) if name in shards else None
            for name, pattern in patterns.items()
        ]
        largest = lowest_over_ranks(self.ranks, scores, counts, [*patterns.values()], after)
        for (name, pattern), slots in zip(patterns.items(), largest, strict=True):
            chosen[name] = [ActiveSet(pattern, slots, device_of(self.layers[name].values))]
        return chosen

    def _choose_on_device(
        self, name: str, layer: SparseLinear, change: Change | None
    ) -> list[ActiveSet]:
        """`_plan_own_state` of one layer on its device; the host does not wait."""
        pattern, values = layer.pattern, layer.values.detach()
        if change is not None:
            pattern = change.rewiring.after
            values = change.rewiring.apply(values, change.fill)
        with layer_errors(name):
            sizes = magnitude(values)
            slots = select(sizes, self.budget.forward_count(pattern.nnz))
        defer_checks([layer], sizes.isnan().any().view(1), _NAN.format(step=self.steps))
        chosen, before = ActiveSet._from_device(pattern, slots), layer.active
        return [chosen, before] if before is not None and before.can_copy_from(chosen) else [chosen]

    def _apply_own_state(self, planned: dict[str, list[ActiveSet]]) -> None:
        for name, (active, *before) in planned.items():
            for layer in before:
                layer.copy_from(active)
                active = layer
            self.layers[name].active = active

    def _follow_loaded_values(self, names: Collection[str]) -> None:
        chosen = self._plan_own_state({})
        self._apply_own_state({name: chosen[name] for name in names if name in chosen})

    def _make_own_undo(self, planning: bool) -> Callable[[], None]:
        before = {name: layer.executor for name, layer in self.layers.items()}

        def undo() -> None:
            for name, executor in before.items():
                self.layers[name].executor = executor

        return undo

    @torch.no_grad()
    def _before_step(self) -> None:
        if not self.exploration:
            return
        densities = self._forward_densities()
        for name, layer in self._trainable_layers().items():
            if layer.values.grad is None or layer.active is None:
                continue
            strength = self.exploration / densities[name]
            values, grad = local_part(layer.values.detach()), local_part(layer.values.grad)
            pull = torch.full(
                (layer.pattern.nnz,), strength, dtype=values.dtype, device=layer.active.slots.device
            )
            pull.index_fill_(0, layer.active.slots, self.exploration)
            if is_sharded(layer.values):
                pull = pull[slice(*local_range(layer.values))].to(values.device)
            grad.addcmul_(pull.view(-1, *[1] * (values.dim() - 1)), values)

    def _forward_densities(self) -> dict[str, float]:
        """The share of all positions that is active, for each layer with active slots. All ranks of
        tensor-parallel layers call this."""
        active = {n: layer.active for n, layer in self._trainable_layers().items()}
        densities = {n: a.pattern.density for n, a in active.items() if a is not None}
        shards = {n: s for n, s in find_shards(self._trainable_layers()).items() if n in densities}
        changed = {
            name: a
            for name in shards
            if (a := active[name]) is not None and self._counted.get(name, (None,))[0] is not a
        }
        if changed:
            slots = [len(a.slots) for a in changed.values()]
            counts = sum_shards(self.ranks, [shards[name] for name in changed], slots)
            for (name, a), count in zip(changed.items(), counts, strict=True):
                self._counted[name] = a, count
        return densities | {n: self._counted[n][1] / s.limit for n, s in shards.items()}

    @torch.no_grad()
    def shrink(self) -> dict[str, Rewiring]:
        """Drop everything outside A after the training: layers become ordinary ones that hold A,
        with values and optimizer state of its size. Returns the rewirings by layer name."""
        check_trained_by(self.optimizer, self._trainable_layers())
        changes, holders = {}, StateHolders.of(self.optimizer)
        for name, layer in self._trainable_layers().items():
            if layer.active is not None:
                rewiring = Rewiring.between(layer.pattern, layer.active.pattern)
                with layer_errors(name):
                    changes[name] = Change.plan(layer, rewiring, 0.0, holders)
        layers = [change.layer for change in changes.values()]
        with defer_signals():
            before = [layer.resizable for layer in layers]
            try:
                for layer in layers:
                    layer.resizable = True
                apply_changes = prepare_changes(changes)
            except BaseException:
                for layer, resizable in zip(layers, before, strict=True):
                    layer.resizable = resizable
                raise
            apply_changes()
        return {name: change.rewiring for name, change in changes.items()}

    def _own_options(self) -> dict[str, float]:
        return {"exploration": self.exploration}

    def _own_state(self) -> dict[str, Tensor]:
        active = {name: layer.active for name, layer in self.layers.items()}
        return {name: a.pattern.sorted_flat for name, a in active.items() if a is not None}

    def _check_own_state(self, state: Any, patterns: Mapping[str, SparsePattern]) -> None:
        if not isinstance(state, dict) or not state.keys() <= self.layers.keys():
            raise ValueError(
                f"the state must hold active positions of some of {sorted(self.layers)}"
            )
        for name, flat in state.items():
            _active_slots(name, flat, patterns[name])

    def _load_own_state(self, state: dict[str, Tensor]) -> None:
        for name, flat in state.items():
            layer = self.layers[name]
            slots = _active_slots(name, flat, layer.pattern)
            layer.active = ActiveSet(layer.pattern, slots, device_of(layer.values))


def _active_slots(name: str, flat: Any, pattern: SparsePattern) -> Tensor:
    """The slots of the positions `flat` in the layer's pattern."""
    if not isinstance(flat, Tensor) or flat.dim() != 1 or flat.dtype != torch.int64:
        raise ValueError(f"the active positions of layer {name!r} must be a tensor of int64")
    with layer_errors(name):
        active = SparsePattern.from_flat(
            flat.cpu(), shape=pattern.shape, block_size=pattern.block_size
        )
    rewiring = Rewiring.between(pattern, active)
    if bool((rewiring.source < 0).any()):
        raise ValueError(
            f"the state uses weights that layer {name!r} does not hold: load the model "
            "that was saved with it first"
        )
    return rewiring.source.long().sort().values
