"""The state of a trainer: taken, checked whole before anything is loaded, loaded, put back."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from dynsparse.interrupts import uninterrupted
from dynsparse.nn import SparseLinear
from dynsparse.pattern import SparsePattern
from dynsparse.ranks import Ranks
from dynsparse.training.budgets import Budget
from dynsparse.training.grow import Growth
from dynsparse.training.history import History
from dynsparse.training.own import OwnParts
from dynsparse.training.records.unwritten import write_unwritten
from dynsparse.training.schedule import Schedule
from dynsparse.training.spread import described

_STATES = ("growth_state", "budget_state", "history_state", "own_state")


class HasState(OwnParts):
    """A trainer's counters, what its pieces remember and what its algorithm adds, as one state."""

    layers: dict[str, SparseLinear]
    schedule: Schedule | None
    growth: Growth | None
    budget: Budget
    history: History
    regrow_dropped: bool
    ranks: Ranks
    steps: int
    updates: int

    def _remember_patterns(self) -> None:
        raise NotImplementedError

    def _arm(self) -> None:
        """Prepare for the coming step."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Counters, the generator, and what must agree on loading; plain types and tensors. Take it
        between `step()` and the next backward pass, whose gradients are not part of any state."""
        write_unwritten()  # a record leads to every state that was saved
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
            ValueError: the state of another algorithm, schedule, model or rule, or a damaged one;
                nothing is changed.
        """
        self.check_state(state, {name: layer.pattern for name, layer in self.layers.items()})
        with uninterrupted():
            undo = self._undo(planning=False)
            try:
                self._load_own_state(state["own_state"])
                if self.growth is not None:
                    self.growth.load_state_dict(state["growth_state"])
                self.budget.load_state_dict(state["budget_state"])
                self.history.load_state_dict(state["history_state"])
            except BaseException:
                undo()
                raise
            self.steps, self.updates = state["steps"], state["updates"]
            self._remember_patterns()
            self._arm()

    def check_state(
        self, state: dict[str, Any], patterns: Mapping[str, SparsePattern] | None = None
    ) -> None:
        """Raise the errors of `load_state_dict` without loading.

        Args:
            state: of a trainer.
            patterns: those that the layers will have by then, by name; what belongs to single
                blocks is checked only with them.
        """
        _check_agreement(state, self._agreement())
        own = {name: layer.pattern for name, layer in self.layers.items()}
        _check_pieces(state, self.growth, self.budget, self.history, own)
        if patterns is not None:
            self._check_own_state(state["own_state"], patterns)

    def _agreement(self) -> dict[str, Any]:
        return {
            "algorithm": type(self).__name__,
            **self._said(),
            "options": self._own_options(),
        }

    def _said(self) -> dict[str, Any]:
        """What pieces and layers say of themselves, for comparison; plain types."""
        said = _said_by(self.schedule, self.growth, self.budget, self.history, self.layers)
        return {**said, "regrow_dropped": self.regrow_dropped}

    def _undo(self, *, planning: bool) -> Callable[[], None]:
        """What puts back everything that planning, or loading a state, may change."""
        counts = self.steps, self.updates
        growth = None if self.growth is None else copy.deepcopy(self.growth.state_dict())
        budget = copy.deepcopy(self.budget.state_dict())
        history = self.history.snapshot()
        undo_own = self._undo_own(planning)

        def undo() -> None:
            self.steps, self.updates = counts
            if self.growth is not None and growth is not None:
                self.growth.load_state_dict(growth)
            self.budget.load_state_dict(budget)
            self.history.restore(history)
            undo_own()

        return undo


def _said_by(
    schedule: Schedule | None,
    growth: Growth | None,
    budget: Budget,
    history: History,
    layers: Mapping[str, SparseLinear],
) -> dict[str, Any]:
    """What pieces and layers say of themselves, for comparison; plain types."""
    when: dict[str, Any] | None = None
    if schedule is not None:
        when = {"kind": type(schedule).__name__}
        if dataclasses.is_dataclass(schedule):
            when |= dataclasses.asdict(schedule)
    return {
        "schedule": when,
        "growth": None if growth is None else {"kind": type(growth).__name__} | growth.options,
        "budget": {"kind": type(budget).__name__} | budget.options,
        "history": {"kind": type(history).__name__} | history.options,
        "layers": {name: described(layer) for name, layer in layers.items()},
    }


def _check_agreement(state: Any, own: Mapping[str, Any]) -> None:
    """Raise ValueError unless `state` is whole, and says what the trainer says of itself."""
    needed = {*own, "steps", "updates", *_STATES}
    if not isinstance(state, dict) or not needed <= state.keys():
        raise ValueError(f"not the state of a trainer: expected the entries {sorted(needed)}")
    for key, value in own.items():
        try:
            agrees = bool(state[key] == value)
        except (RuntimeError, TypeError, ValueError):  # tensors in the place of plain types
            agrees = False
        if not agrees:
            raise ValueError(
                f"the state does not fit this trainer: its {key} is {state[key]!r}, "
                f"here it is {value!r}"
            )
    for key in ("steps", "updates"):
        count = state[key]
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise ValueError(f"the {key} of the state must be a number from 0 on, got {count!r}")


def _check_pieces(
    state: dict[str, Any],
    growth: Growth | None,
    budget: Budget,
    history: History,
    patterns: Mapping[str, SparsePattern],
) -> None:
    """Raise ValueError where what the pieces are to load is damaged."""
    if growth is not None:
        growth.check_state(state["growth_state"])
    budget.check_state(state["budget_state"])
    history.check_state(state["history_state"], {n: p.shape for n, p in patterns.items()})
