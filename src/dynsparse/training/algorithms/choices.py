"""How the arguments that the algorithms share become pieces of a trainer."""

from __future__ import annotations

from dynsparse.checks import check_choice
from dynsparse.training.budgets import Budget, GlobalBudget, LayerBudget
from dynsparse.training.schedule import CosineSchedule, Schedule, default_interval


def cosine_schedule(
    total_steps: int | None,
    update_interval: int | None,
    drop_fraction: float | None,
    schedule: Schedule | None,
    kind: type[CosineSchedule] = CosineSchedule,
    **more: float,
) -> Schedule:
    """`schedule`, or one of `kind` made of the numbers given.

    Raises:
        ValueError: both are given, or neither.
    """
    given = {
        "total_steps": total_steps,
        "update_interval": update_interval,
        "drop_fraction": drop_fraction,
    }
    given = {name: value for name, value in given.items() if value is not None}
    if schedule is not None:
        if given:
            raise ValueError(f"the schedule says it all: leave out {', '.join(given)}")
        return schedule
    if total_steps is None:
        raise ValueError("give total_steps, the optimizer steps of the whole training, or schedule")
    given.setdefault("update_interval", default_interval(total_steps))
    return kind(**given, **more)  # type: ignore[arg-type]


def layer_or_global(budget: str | Budget) -> Budget:
    """The budget of that name, or the one given."""
    if isinstance(budget, Budget):
        return budget
    name = check_choice("budget", budget, ("layer", "global"))
    return LayerBudget() if name == "layer" else GlobalBudget()
