"""One training step of a model with sparse layers, and the pattern updates in between."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dynsparse.nn import SparseLinear
from dynsparse.ops import capture
from dynsparse.pattern import Rewiring, SparsePattern
from dynsparse.training.drop import DropScore, lowest, magnitude
from dynsparse.training.grow import Growth
from dynsparse.training.heap import give_back
from dynsparse.training.optimizer_state import check_optimizer, rewire_state
from dynsparse.training.schedule import Schedule

__all__ = ["GrownValue", "SparseTrainer", "UpdateHook"]

GrownValue = float | Callable[[SparseLinear, Rewiring], Tensor]
"""What grown weights start with: a number, or a function that returns [grown] or [grown, b, b]."""

UpdateHook = Callable[[int, dict[str, Rewiring]], None]
"""Called as hook(step, rewirings by layer name) after each pattern update."""


class SparseTrainer:
    """Takes the optimizer's steps, and changes the patterns when the schedule says so.

    `RigL`, `SET` and `Static` are this class with their pieces chosen. After the optimizer's step
    an update drops each layer's blocks of lowest score, grows as many elsewhere, and lets values,
    gradients and optimizer state follow. Growth by gradient looks at all micro-batches since the
    step before; x and dY are kept only during steps that end in an update.

    Args:
        model: holds the `SparseLinear` layers. Layers whose values do not require a gradient keep
            their pattern. Make the trainer after moving the model to its device and type.
        optimizer: any of torch's whose state is per weight, holding the layers' values.
        schedule: when and how much; None never changes a pattern.
        growth: where blocks grow; None only together with no schedule.
        drop_score: from values to one score per block; the lowest leave.
        regrow_dropped: False: what an update drops, it does not grow again (the rule of Graphcore's
            application). True: it may (the rule of the RigL paper); such a block then counts as
            never dropped and keeps its weight and state, as in the authors' code. Under the first
            rule a layer with fewer free positions than it should drop drops only as many.
        initial_value: what grown weights start with: a number, or a function of (layer, rewiring).

    Attributes:
        layers: name -> `SparseLinear`, in the order of `model.named_modules()`; a module used
            several times is there once.
        steps: optimizer steps taken; updates: pattern updates made.
        on_update: functions called as f(step, {name: Rewiring}) after each update.

    Raises:
        ValueError: a model without sparse layers, an optimizer that does not hold their values.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        schedule: Schedule | None,
        growth: Growth | None,
        drop_score: DropScore = magnitude,
        regrow_dropped: bool = False,
        initial_value: GrownValue = 0.0,
    ) -> None:
        if (schedule is None) != (growth is None):
            raise ValueError("give both a schedule and a growth, or neither for a static pattern")
        if not callable(initial_value) and not isinstance(initial_value, (int, float)):
            raise TypeError(f"initial_value must be a number or a function, got {initial_value!r}")
        self.layers = _sparse_layers(model)
        check_optimizer(optimizer, {name: layer.values for name, layer in self.layers.items()})
        self.optimizer = optimizer
        self.schedule = schedule
        self.growth = growth
        self.drop_score = drop_score
        self.regrow_dropped = bool(regrow_dropped)
        self.initial_value = initial_value
        self.steps = 0
        self.updates = 0
        self.on_update: list[UpdateHook] = []
        self._arm()

    def step(self) -> dict[str, Rewiring] | None:
        """After backward: the optimizer's step, then the pattern update if one is due.

        Returns the rewirings by layer name when patterns changed, otherwise None.
        """
        self.optimizer.step()
        self.steps += 1
        rewirings = self._update() if self._is_due(self.steps) else {}
        self._arm()
        if not rewirings:
            return None
        self.updates += 1
        for hook in self.on_update:
            hook(self.steps, rewirings)
        return rewirings

    def _is_due(self, step: int) -> bool:
        return self.schedule is not None and self.schedule.is_due(step)

    def _arm(self) -> None:
        """Begin to keep x and dY if the coming step ends in an update that needs them."""
        due = self._needs_gradients and self._is_due(self.steps + 1)
        self._captures = [capture.start(layer.values) for layer in self._trained().values() if due]

    def _trained(self) -> dict[str, SparseLinear]:
        return {name: layer for name, layer in self.layers.items() if layer.values.requires_grad}

    @torch.no_grad()
    def _update(self) -> dict[str, Rewiring]:
        # All layers are planned before one is changed: an error leaves the model as it was.
        rewirings: dict[str, Rewiring] = {}
        reached = False
        for name, layer in self._trained().items():
            give_back(layer.values)
            pairs = capture.take(layer.values)
            if self._needs_gradients and not pairs and layer.pattern.nnz:
                continue  # no backward pass came through this layer: nothing to rank by
            reached = True
            rewiring = self._plan(layer, pairs)
            if rewiring is not None:
                rewirings[name] = rewiring
            give_back(layer.values)
        if not reached and self._trained():
            raise RuntimeError(
                f"step {self.steps} ends in a pattern update, but no gradient reached any sparse "
                "layer since the step before: call trainer.step() after loss.backward(), and make "
                "the trainer after moving the model to its device"
            )
        for name, rewiring in rewirings.items():
            self._apply(self.layers[name], rewiring)
        return rewirings

    @property
    def _needs_gradients(self) -> bool:
        return self.growth is not None and self.growth.needs_gradients

    def _plan(self, layer: SparseLinear, pairs: list[tuple[Tensor, Tensor]]) -> Rewiring | None:
        assert self.schedule is not None
        assert self.growth is not None
        pattern = layer.pattern
        count = min(self.schedule.drop_count(self.steps, pattern.nnz), pattern.nnz)
        if not self.regrow_dropped:
            count = min(count, pattern.total - pattern.nnz)
        if count <= 0:
            return None
        drop = lowest(self.drop_score(layer.values), count)
        give_back(layer.values)
        if not self.regrow_dropped:
            grow = self.growth.choose(pattern, count, pairs)
            pairs.clear()  # they may be large, and the new pattern needs room
            give_back(layer.values)
            return Rewiring.make(pattern, drop, grow)
        stays = torch.ones(pattern.nnz, dtype=torch.bool)
        stays[drop] = False
        kept = SparsePattern.from_flat(
            pattern.flat[stays], shape=pattern.shape, block_size=pattern.block_size
        )
        grow = self.growth.choose(kept, count, pairs)
        pairs.clear()
        came_back = torch.isin(pattern.flat[drop], grow)
        return Rewiring.make(pattern, drop[~came_back], grow[~pattern.contains(grow)])

    def _apply(self, layer: SparseLinear, rewiring: Rewiring) -> None:
        fill = self.initial_value
        layer.rewire(rewiring, fill(layer, rewiring) if callable(fill) else fill)
        give_back(layer.values)
        rewire_state(self.optimizer, layer.values, rewiring)
        if layer.values.grad is not None:
            layer.values.grad.copy_(rewiring.apply(layer.values.grad))
        give_back(layer.values)

    def state_dict(self) -> dict[str, Any]:
        """Counters, the generator, and what must agree on loading. Plain types and tensors.

        Take it between `step()` and the next backward pass: the gradients of a step under way are
        not part of any state.
        """
        return {
            **self._agreement(),
            "steps": self.steps,
            "updates": self.updates,
            "growth_state": None if self.growth is None else self.growth.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken. Model and optimizer load their own state.

        Raises:
            ValueError: the state of another algorithm, schedule, model or rule; nothing is changed.
        """
        self.check_state(state)
        if self.growth is not None:
            self.growth.load_state_dict(state["growth_state"])
        self.steps = int(state["steps"])
        self.updates = int(state["updates"])
        self._arm()

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise the errors of `load_state_dict` without loading."""
        own = self._agreement()
        needed = {*own, "steps", "updates", "growth_state"}
        if not isinstance(state, dict) or not needed <= state.keys():
            raise ValueError(f"not the state of a trainer: expected the entries {sorted(needed)}")
        for key, value in own.items():
            if state[key] != value:
                raise ValueError(
                    f"the state does not fit this trainer: its {key} is {state[key]!r}, "
                    f"here it is {value!r}"
                )

    def _agreement(self) -> dict[str, Any]:
        schedule: dict[str, Any] | None = None
        if self.schedule is not None:
            schedule = {"kind": type(self.schedule).__name__}
            if dataclasses.is_dataclass(self.schedule):
                schedule |= dataclasses.asdict(self.schedule)
        growth = self.growth
        return {
            "algorithm": type(self).__name__,
            "schedule": schedule,
            "growth": None if growth is None else {"kind": type(growth).__name__} | growth.options,
            "regrow_dropped": self.regrow_dropped,
            "layers": {
                name: [*layer.pattern.shape, layer.pattern.block_size, layer.pattern.nnz]
                for name, layer in self.layers.items()
            },
        }


def _sparse_layers(model: nn.Module) -> dict[str, SparseLinear]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")
    layers = {name: m for name, m in model.named_modules() if isinstance(m, SparseLinear)}
    if not layers:
        raise ValueError(
            "the model has no sparse layers: use dynsparse.nn.SparseLinear, or dynsparse.sparsify"
        )
    owners: dict[int, str] = {}
    for name, layer in layers.items():
        other = owners.setdefault(id(layer.values), name)
        if other != name:
            raise ValueError(
                f"the layers {other!r} and {name!r} share their values but not their pattern: "
                "use one module in both places"
            )
    return layers
