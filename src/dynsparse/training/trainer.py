"""One training step of a model with sparse layers, and the pattern updates in between."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from dynsparse.nn import SparseLinear
from dynsparse.ops import capture
from dynsparse.pattern import Rewiring, SparsePattern
from dynsparse.training.budgets import Budget, Counts, LayerBudget, Survey
from dynsparse.training.drop import DropScore, lowest, magnitude
from dynsparse.training.grow import Growth
from dynsparse.training.history import History, LastStep
from dynsparse.training.initial import GradientStep, learning_rate_of
from dynsparse.training.layers import sparse_layers
from dynsparse.training.memory import released_memory
from dynsparse.training.optimizer_state import check_optimizer, rewire_state
from dynsparse.training.schedule import Schedule

__all__ = ["GrownValue", "SparseTrainer", "UpdateHook"]

GrownValue = float | GradientStep | Callable[[SparseLinear, Rewiring], Tensor]
"""What grown weights start with: a number, a `GradientStep`, or a function that returns [grown] or
[grown, b, b]."""

UpdateHook = Callable[[int, dict[str, Rewiring]], None]
"""Called as hook(step, rewirings by layer name) after each pattern update."""


class SparseTrainer:
    """Takes the optimizer's steps, and changes the patterns when the schedule says so.

    `RigL`, `SET` and `Static` are this class with their pieces chosen. After the optimizer's step
    an update drops each layer's blocks of lowest score, grows blocks elsewhere, and lets values,
    gradients and optimizer state follow. Growth by gradient looks at all micro-batches since the
    step before; x and dY are kept only during steps whose gradient counts for an update.

    A budget that changes capacity makes the layers `resizable`: the Parameter objects stay, their
    size and that of the optimizer state follow the number of blocks.

    Args:
        model: holds the `SparseLinear` layers. Layers whose values do not require a gradient keep
            their pattern. Make the trainer after moving the model to its device and type.
        optimizer: any of torch's whose state is per weight, holding the layers' values.
        schedule: when, and which share is replaced; None never changes a pattern.
        growth: where blocks grow; None only together with no schedule.
        drop_score: from values to one score per block; the lowest leave.
        regrow_dropped: False: what an update drops, it does not grow again (the rule of Graphcore's
            application). True: it may (the rule of the RigL paper); such a block then counts as
            never dropped and keeps its weight and state, as in the authors' code. Under the first
            rule a layer with fewer free positions than it should drop drops only as many.
        initial_value: what grown weights start with: a number, a `GradientStep`, or a function of
            (layer, rewiring).
        budget: how many blocks each layer loses and gains; each the share of its own when left out.
        history: which gradient growth looks at; that of the last step when left out.

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
        budget: Budget | None = None,
        history: History | None = None,
    ) -> None:
        if (schedule is None) != (growth is None):
            raise ValueError("give both a schedule and a growth, or neither for a static pattern")
        if not callable(initial_value) and not isinstance(
            initial_value, (int, float, GradientStep)
        ):
            raise TypeError(f"initial_value must be a number or a function, got {initial_value!r}")
        self.layers = sparse_layers(model)
        check_optimizer(optimizer, {name: layer.values for name, layer in self.layers.items()})
        self.optimizer = optimizer
        self.schedule = schedule
        self.growth = growth
        self.drop_score = drop_score
        self.regrow_dropped = bool(regrow_dropped)
        self.initial_value = initial_value
        self.budget = LayerBudget() if budget is None else budget
        self.history: History = LastStep() if history is None else history
        trained = self._trained()
        self.budget.begin({name: layer.pattern for name, layer in trained.items()})
        if self.budget.changes_capacity:
            for layer in trained.values():
                layer.resizable = True
        self.steps = 0
        self.updates = 0
        self.on_update: list[UpdateHook] = []
        self._captures: dict[str, capture.Pairs] = {}
        self._arm()

    def step(self) -> dict[str, Rewiring] | None:
        """After backward: the optimizer's step, then the pattern update if one is due.

        Returns the rewirings by layer name when patterns changed, otherwise None.
        """
        self.before_optimizer_step()
        self.optimizer.step()
        return self.after_optimizer_step()

    def before_optimizer_step(self) -> None:
        """The part of `step` before the optimizer's, for loops that step the optimizer themselves.

        Call it after backward, when the gradients are whole.
        """
        self._before_step()

    def after_optimizer_step(self) -> dict[str, Rewiring] | None:
        """The part of `step` after the optimizer's, for loops that step the optimizer."""
        self.steps += 1
        self._after_step()
        for name in self._captures:
            self.history.observe(name, capture.take(self.layers[name].values))
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

    def _before_step(self) -> None:
        """For algorithms that change gradients before the optimizer's step."""

    def _after_step(self) -> None:
        """For algorithms that change weights after the optimizer's step."""

    def _rewired(self, name: str, rewiring: Rewiring) -> None:
        """For algorithms with figures per block, which follow the pattern as the weights do."""

    def _own_options(self) -> dict[str, Any]:
        """What must agree on loading, beside what the pieces say; plain types."""
        return {}

    def _own_state(self) -> dict[str, Any]:
        """What the algorithm remembers beside its pieces; tensors and plain types."""
        return {}

    def _load_own_state(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken."""

    def _arm(self) -> None:
        """Begin to keep x and dY if the gradient of the coming step counts for an update."""
        counts = self._needs_gradients and self._counts(self.steps + 1)
        layers = self._trained() if counts else {}
        self._captures = {name: capture.start(layer.values) for name, layer in layers.items()}

    def _counts(self, step: int) -> bool:
        window = self.history.window
        if window is None:
            return step <= self._last_update
        return any(self._is_due(s) for s in range(step, step + window))

    @cached_property
    def _last_update(self) -> float:
        """The last step that is due, as far as the schedule tells how long the training is."""
        total = getattr(self.schedule, "total_steps", None)
        if total is None:
            return math.inf
        return next((step for step in range(total, 0, -1) if self._is_due(step)), 0)

    def _trained(self) -> dict[str, SparseLinear]:
        return {name: layer for name, layer in self.layers.items() if layer.values.requires_grad}

    @torch.no_grad()
    def _update(self) -> dict[str, Rewiring]:
        assert self.schedule is not None
        trained = self._trained()
        for layer in trained.values():
            layer.forget_panels()
        # Where no backward pass came through there is nothing to rank by.
        reached = {
            name: layer
            for name, layer in trained.items()
            if not self._needs_gradients or not layer.pattern.nnz or self.history.has(name)
        }
        if not reached and trained:
            raise RuntimeError(
                f"step {self.steps} ends in a pattern update, but no gradient reached any sparse "
                "layer since the step before: call trainer.step() after loss.backward(), and make "
                "the trainer after moving the model to its device"
            )
        survey = Survey(
            step=self.steps,
            schedule=self.schedule,
            patterns={name: layer.pattern for name, layer in reached.items()},
            scores=lambda name: self._scores(name, reached[name]),
            history=self.history,
            regrow_dropped=self.regrow_dropped,
        )
        # All layers are planned before one is changed: an error leaves the model as it was.
        plans = {}
        for name, counts in self.budget.counts(survey).items():
            if counts.drop <= 0 and counts.grow <= 0:
                continue
            layer = reached[name]
            with released_memory(layer.values):
                drop, grow, fill = self._plan(name, layer, counts)
            with released_memory(layer.values):
                plans[name] = Rewiring.make(layer.pattern, drop, grow), fill
        for name, (rewiring, fill) in plans.items():
            with released_memory(reached[name].values):
                self._apply(name, reached[name], rewiring, fill)
        self.history.end_update()
        return {name: rewiring for name, (rewiring, _) in plans.items()}

    @property
    def _needs_gradients(self) -> bool:
        wanted = self.growth is not None and self.growth.needs_gradients
        return wanted or isinstance(self.initial_value, GradientStep)

    def _scores(self, name: str, layer: SparseLinear) -> Tensor:
        """The drop scores of a layer's blocks: [nnz]."""
        return self.drop_score(layer.values)

    def _plan(
        self, name: str, layer: SparseLinear, counts: Counts
    ) -> tuple[Tensor, Tensor, float | Tensor | None]:
        """The slots that leave, the positions that join, and what these start with.

        The start is None where it does not come from gradients.
        """
        assert self.growth is not None
        pattern = layer.pattern
        pairs = self.history.pairs(name)
        drop = lowest(self._scores(name, layer), counts.drop)
        if self.regrow_dropped and counts.drop:
            stays = torch.ones(pattern.nnz, dtype=torch.bool)
            stays[drop] = False
            kept = SparsePattern.from_flat(
                pattern.flat[stays], shape=pattern.shape, block_size=pattern.block_size
            )
            grow = self.growth.choose(kept, counts.grow, pairs)
            drop, grow = drop[~torch.isin(pattern.flat[drop], grow)], grow[~pattern.contains(grow)]
        else:
            grow = self.growth.choose(pattern, counts.grow, pairs)
        fill = None
        if isinstance(self.initial_value, GradientStep):
            grown = SparsePattern.from_flat(
                grow.sort().values, shape=pattern.shape, block_size=pattern.block_size
            )
            rate = learning_rate_of(self.optimizer, layer.values)
            fill = self.initial_value.values(self.history, name, grown, rate)
        pairs.clear()  # they may be large, and the new pattern needs room
        return drop, grow, fill

    def _apply(
        self, name: str, layer: SparseLinear, rewiring: Rewiring, fill: float | Tensor | None
    ) -> None:
        if fill is None:
            start = self.initial_value
            assert not isinstance(start, GradientStep)
            fill = start(layer, rewiring) if callable(start) else start
        grad = layer.values.grad
        layer.rewire(rewiring, fill)
        rewire_state(self.optimizer, layer.values, rewiring)
        if grad is not None and rewiring.keeps_size:
            rewiring.apply_(grad)
        elif grad is not None:
            layer.values.grad = rewiring.apply(grad)
        self._rewired(name, rewiring)

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
            "budget_state": self.budget.state_dict(),
            "history_state": self.history.state_dict(),
            "own_state": self._own_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken. Model and optimizer load their own state.

        Raises:
            ValueError: the state of another algorithm, schedule, model or rule; nothing is changed.
        """
        self.check_state(state)
        self._load_own_state(state["own_state"])  # first, since it may still refuse
        if self.growth is not None:
            self.growth.load_state_dict(state["growth_state"])
        self.budget.load_state_dict(state["budget_state"])
        self.history.load_state_dict(state["history_state"])
        self.steps = int(state["steps"])
        self.updates = int(state["updates"])
        self._arm()

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise the errors of `load_state_dict` without loading."""
        own = self._agreement()
        needed = {*own, "steps", "updates"}
        needed |= {f"{piece}_state" for piece in ("growth", "budget", "history", "own")}
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
            "budget": {"kind": type(self.budget).__name__} | self.budget.options,
            "history": {"kind": type(self.history).__name__} | self.history.options,
            "options": self._own_options(),
            "layers": {
                name: [*layer.pattern.shape, layer.pattern.block_size]
                + ([] if layer.resizable else [layer.pattern.nnz])
                for name, layer in self.layers.items()
            },
        }
