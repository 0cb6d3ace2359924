"""DeepR: a connection keeps its sign, and is dropped when its weight crosses zero."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dynsparse._core.checks import check_not_negative
from dynsparse.nn import SparseLinear
from dynsparse.nn.sharded import gather_full, is_sharded, local_part, local_range, shard_like
from dynsparse.pattern import Rewiring, SparsePattern
from dynsparse.pattern.index_arrays import to_slot_order
from dynsparse.pattern.on_device import to_device
from dynsparse.training.budgets import Budget, Counts, Survey
from dynsparse.training.grow import RandomGrowth
from dynsparse.training.layer_shards import LocalSlots, find_shards
from dynsparse.training.optimizer_state import learning_rate_of
from dynsparse.training.schedule import ConstantSchedule
from dynsparse.training.trainer import SparseTrainer
from dynsparse.training.update import Change


class SignBudget(Budget):
    """Replaces all blocks of negative score, but no more than there is room for."""

    def counts(self, survey: Survey) -> dict[str, Counts]:
        counts = {}
        for name, below in zip(survey.patterns, survey.count_below_zero(), strict=True):
            count = min(below, survey.room(name, 0))
            counts[name] = Counts(count, count)
        return counts


class DeepR(SparseTrainer):
    """Drop weights that change their sign; grow as many at random, each with a random sign.

    After the optimizer's step every weight w with the sign s loses learning rate * l1 * s, and gets
    noise of the standard deviation sqrt(2 * learning rate * temperature). An update drops the
    weights with s w < 0; blocks when the sum of s w over the block is below 0. Grown weights start
    at zero.

    Source: Bellec et al. 2018, "Deep Rewiring: Training very sparse deep networks", algorithm 1.
    In the paper the number of connections is constant over all layers, here in each layer; and an
    update does not grow what it drops. With an `update_interval` above 1 a weight may cross zero
    and come back unnoticed. The paper's noise belongs to plain gradient descent; with other
    optimizers it is a heuristic.

    Args:
        model, optimizer, ranks: see `SparseTrainer`.
        total_steps: optimizer steps of the whole training; the pattern may change until its end.
        update_interval: steps between updates; 1 is the paper's.
        l1: strength of the pull to zero, at least 0.
        temperature: the temperature of the noise, at least 0.
        seed: the seed of random positions, signs and noise; see `RandomGrowth`.
    """

    growth: RandomGrowth

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        total_steps: int,
        update_interval: int = 1,
        l1: float = 1e-4,
        temperature: float = 0.0,
        seed: int | None = None,
        ranks: Any = "auto",
    ) -> None:
        self.l1 = check_not_negative("l1", l1)
        self.temperature = check_not_negative("temperature", temperature)
        super().__init__(
            model,
            optimizer,
            schedule=ConstantSchedule(total_steps, update_interval, drop_fraction=1.0),
            growth=RandomGrowth(seed),
            budget=SignBudget(),
            ranks=ranks,
        )
        # Each rank draws for full layers, and takes the draws of its own slots.
        self._slots = LocalSlots()
        self._slots.update(self.layers)
        self.signs = {name: self._initial_signs(name) for name in self.layers}

    def _initial_signs(self, name: str) -> Tensor:
        layer = self.layers[name]
        signs = gather_full(layer.values.detach()).sign().to(torch.int8)
        drawn = self._draw_signs(name, *self._slots.slots_of(name, layer), signs.shape[1:])
        return torch.where(signs == 0, drawn.to(signs.device), signs)

    def _draw_signs(
        self, name: str, slots: Tensor | slice, total: int, block: Sequence[int]
    ) -> Tensor:
        """Draw signs for all `total` blocks of a layer, and return those of `slots`."""
        generator = self.growth.generator_for(name, self.steps, "signs")
        coins = torch.randint(
            2, (total, *block), generator=generator, dtype=torch.int8, device="cpu"
        )
        return coins[slots].mul_(2).sub_(1)

    def _before_step(self) -> None:
        self._slots.update(self.layers)

    @torch.no_grad()
    def _after_step(self) -> None:
        layers = self._trainable_layers()
        # Read before the first layer changes, as groups without learning rate raise an error.
        rates = {n: learning_rate_of(self.optimizer, layer.values) for n, layer in layers.items()}
        for name, layer in layers.items():
            values, rate = local_part(layer.values.detach()), rates[name]
            sharded, signs = is_sharded(layer.values), self.signs[name]
            local = slice(*local_range(layer.values)) if sharded else slice(None)
            if self.l1:
                signs = signs[local] if sharded else signs
                values.sub_(signs.to(values), alpha=rate * self.l1)
            if self.temperature:
                generator = self.growth.generator_for(name, self.steps, "noise")
                slots, total = self._slots.slots_of(name, layer)
                shape = total, *values.shape[1:]
                noise = torch.randn(shape, generator=generator, dtype=values.dtype, device="cpu")[
                    slots
                ]
                # The noise is drawn in row-major order, which may not be that of the slots.
                order = layer.pattern._slots_on(values.device)
                noise = to_slot_order(to_device(noise, values.device), order)
                noise = noise[local] if sharded else noise
                values.add_(noise, alpha=math.sqrt(2 * rate * self.temperature))

    @torch.no_grad()
    def _make_own_undo(self, planning: bool) -> Callable[[], None]:
        signs = self.signs
        pulled = bool(planning and (self.l1 or self.temperature))
        values = [layer.values for layer in self._trainable_layers().values()] if pulled else []
        before = [v.detach().clone() for v in values]

        @torch.no_grad()
        def undo() -> None:
            self.signs = signs
            for now, old in zip(values, before, strict=True):
                now.copy_(old)

        return undo

    def _scores(self, name: str, layer: SparseLinear) -> Tensor:
        values = layer.values.detach()
        signs = full = self.signs[name]
        if is_sharded(values):
            signs = shard_like(values, full.dtype, lambda first, last: full[first:last])
        aligned = values * signs
        return aligned if aligned.dim() == 1 else aligned.sum((1, 2))

    def _plan_own_state(self, changes: dict[str, Change]) -> dict[str, Tensor]:
        return {name: self._rewire_signs(name, change.rewiring) for name, change in changes.items()}

    def _rewire_signs(self, name: str, rewiring: Rewiring) -> Tensor:
        signs, after = self.signs[name], rewiring.after
        slots: tuple[Tensor | slice, int] = slice(None), rewiring._grown_count
        shard = find_shards(self.layers).get(name)
        if shard is not None:
            grown = SparsePattern.from_flat(
                after.flat[rewiring.grown], shape=after.shape, block_size=after.block_size
            )
            slots = shard.spec.slots(grown)
        drawn = self._draw_signs(name, *slots, signs.shape[1:])
        return rewiring.apply(signs, to_device(drawn, signs.device))

    def _follow_loaded_values(self, names: Collection[str]) -> None:
        self._slots.update(self.layers)
        self.signs = {**self.signs, **{name: self._initial_signs(name) for name in names}}

    def _apply_own_state(self, planned: dict[str, Tensor]) -> None:
        self.signs = {**self.signs, **planned}

    def _own_options(self) -> dict[str, float]:
        return {"l1": self.l1, "temperature": self.temperature}

    def _own_state(self) -> dict[str, Tensor]:
        return dict(self.signs)

    def _check_own_state(self, state: Any, patterns: Mapping[str, SparsePattern]) -> None:
        if not isinstance(state, dict) or state.keys() != self.layers.keys():
            raise ValueError(f"the state must hold the signs of each of {sorted(self.layers)}")
        for name, signs in state.items():
            shape = list(patterns[name].values_shape)
            if not isinstance(signs, Tensor) or signs.dtype != torch.int8:
                raise ValueError(f"the signs of layer {name!r} must be a tensor of int8")
            if list(signs.shape) != shape or bool((signs.abs() != 1).any()):
                raise ValueError(
                    f"the signs of layer {name!r} must be 1 and -1 in a tensor {shape}"
                )

    def _load_own_state(self, state: dict[str, Tensor]) -> None:
        self.signs = {n: state[n].to(layer.values.device) for n, layer in self.layers.items()}
