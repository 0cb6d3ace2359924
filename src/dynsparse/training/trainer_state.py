"""What the state of a trainer must agree with; damage is found before anything is loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from dynsparse.nn import SparseLinear
from dynsparse.pattern import SparsePattern
from dynsparse.training import kernel_costs
from dynsparse.training.budgets import Budget
from dynsparse.training.grow import Growth
from dynsparse.training.history import History
from dynsparse.training.parts import described
from dynsparse.training.schedule import Schedule

__all__ = ["check_agreement", "check_pieces", "said_by"]

_STATES = ("growth_state", "budget_state", "history_state", "own_state")


def said_by(
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


def check_agreement(state: Any, own: Mapping[str, Any]) -> None:
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


def check_pieces(
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
    kernel_costs.check(state.get("kernel_costs"))
