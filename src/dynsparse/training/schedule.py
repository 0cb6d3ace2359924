"""When the pattern changes, and how many blocks each change replaces.

A schedule counts optimizer steps: step t is the t-th call of `trainer.step()`, from 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

from dynsparse._core.checks import check_choice, check_integer, check_within


class Schedule(Protocol):
    """When patterns change, and how much. Those below are frozen dataclasses, compared by field.

    They also have `next_due(step)`, the first step from `step` on that is due, or None. It is
    optional: without it trainers ask `is_due` of one step after another.
    """

    def is_due(self, step: int) -> bool:
        """Whether the pattern changes after step `step`."""
        ...

    def drop_count(self, step: int, nnz: int) -> int:
        """How many of a layer's `nnz` blocks the update after `step` replaces."""
        ...


def default_interval(total_steps: int) -> int:
    """The default of `update_interval`: 100, or a tenth of a training below 1,000 steps."""
    return min(100, max(1, check_integer("total_steps", total_steps, 1) // 10))


def is_due_within(schedule: Schedule, first: int, steps: int | None) -> bool:
    """Whether any of the `steps` steps from `first` on is due; None is all that follow.

    True for a schedule with neither `next_due` nor `total_steps` where `steps` is None.
    """
    if _has_next_due(type(schedule)):
        due = schedule.next_due(first)  # type: ignore[attr-defined]
        return due is not None and (steps is None or due < first + steps)
    total = getattr(schedule, "total_steps", None)
    if steps is None:
        return total is None or any(schedule.is_due(s) for s in range(total, first - 1, -1))
    return any(schedule.is_due(step) for step in range(first, first + steps))


def describe_next_update(schedule: Schedule | None, step: int) -> str:
    """The next update from `step` on, in words."""
    if schedule is None:
        return "none"
    if not _has_next_due(type(schedule)):
        return f"as {type(schedule).__name__} says"
    due = schedule.next_due(step)  # type: ignore[attr-defined]
    return "none" if due is None else f"after step {due:,}"


def _has_next_due(kind: type[Any]) -> bool:
    """Whether `next_due` fits `is_due`: a subclass may replace only one of them."""

    def home(name: str) -> type[Any] | None:
        return next((k for k in kind.__mro__ if name in vars(k)), None)

    return home("next_due") is not None and home("is_due") in (home("next_due"), _BaseSchedule)


class _BaseSchedule:
    """What all schedules below share: checked arguments, and updates where `next_due` has them."""

    total_steps: int
    update_interval: int
    drop_fraction: float

    def __post_init__(self) -> None:
        check_integer("total_steps", self.total_steps, 1)
        check_integer("update_interval", self.update_interval, 1)
        check_within("drop_fraction", self.drop_fraction, "[0, 1]")

    def next_due(self, step: int) -> int | None:
        raise NotImplementedError

    def is_due(self, step: int) -> bool:
        return self.next_due(step) == step


def _next_multiple(interval: int, step: int) -> int:
    """The first multiple of `interval` from `step` on."""
    return -(-step // interval) * interval


@dataclass(frozen=True)
class _PeriodicSchedule(_BaseSchedule):
    """The arguments of most schedules: how long, how often, and how much at most."""

    total_steps: int
    update_interval: int = 100
    drop_fraction: float = 0.3


@dataclass(frozen=True)
class CosineSchedule(_PeriodicSchedule):
    """Every `update_interval` steps a share of a layer's blocks that falls by a cosine.

    With T_end = `end_fraction` of `total_steps` and z = `zero_steps` the update after step t
    replaces the share drop_fraction/2 (1 + cos(phase_delay + period 2 pi (t - z) / (T_end - z))),
    from z on and until T_end; before and after the pattern stays. The defaults fall from
    `drop_fraction` to 0.

    Sources: Evci et al. 2020, section 3 (update schedule), with T_end = 0.75 T, alpha = 0.3 and
    rounding down. Graphcore's dynamic sparsity application has T_end = T, the other arguments and
    rounding up.

    Args:
        rounding: "down": floor(share nnz) blocks; "up": ceil(ceil(drop_fraction nnz) share /
            drop_fraction), as in the application, so that a layer of two blocks replaces one to the
            end of the schedule.
        zero_steps: optimizer steps before the first update.
        phase_delay: in radians; period: in turns until T_end.
    """

    end_fraction: float = 0.75
    rounding: str = "down"
    zero_steps: int = 0
    phase_delay: float = 0.0
    period: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_within("end_fraction", self.end_fraction, "(0, 1]")
        check_choice("rounding", self.rounding, ("down", "up"))
        check_integer("zero_steps", self.zero_steps, 0)
        if self.zero_steps >= self.end:
            raise ValueError(
                f"zero_steps must be below end_fraction * total_steps = {self.end:g}, got "
                f"{self.zero_steps}"
            )
        for name in ("phase_delay", "period"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not math.isfinite(value):
                raise ValueError(f"{name} must be a finite number, got {value!r}")

    @property
    def end(self) -> float:
        """The step from which on the pattern stays."""
        return self.end_fraction * self.total_steps

    def share(self, step: int) -> float:
        """The share, in [0, 1], of the largest possible replacement."""
        if not self.zero_steps <= step < self.end:
            return 0.0
        passed, length = step - self.zero_steps, self.end - self.zero_steps
        return 0.5 * (1 + math.cos(self.phase_delay + self.period * 2 * math.pi * passed / length))

    def fraction(self, step: int) -> float:
        """The share of a layer's blocks that an update after `step` replaces."""
        return self.drop_fraction * self.share(step)

    def next_due(self, step: int) -> int | None:
        due = _next_multiple(self.update_interval, max(step, self.zero_steps))
        return due if due < self.end and self.drop_fraction > 0 else None

    def drop_count(self, step: int, nnz: int) -> int:
        if self.rounding == "up":
            return _ceil(_ceil(self.drop_fraction * nnz) * self.share(step))
        return _floor(self.fraction(step) * nnz)


@dataclass(frozen=True)
class ConstantSchedule(_PeriodicSchedule):
    """Every `update_interval` steps the same share of a layer's blocks, rounded down.

    No update follows the last step of `total_steps`, since nothing would train what it grows.
    Source: Mocanu et al. 2018 (SET) replace the share zeta = 0.3 after every epoch.
    """

    def next_due(self, step: int) -> int | None:
        due = _next_multiple(self.update_interval, step)
        return due if due < self.total_steps and self.drop_fraction > 0 else None

    def drop_count(self, step: int, nnz: int) -> int:
        return _floor(self.drop_fraction * nnz)


@dataclass(frozen=True)
class ElasticSchedule(CosineSchedule):
    """`CosineSchedule` with one more update at T_end, which replaces nothing.

    It cuts layers that have grown beyond their budget back to it.
    """

    def next_due(self, step: int) -> int | None:
        due, last = super().next_due(step), math.ceil(self.end)
        return last if due is None and step <= last and self.drop_fraction > 0 else due


@dataclass(frozen=True)
class GradualSchedule(_BaseSchedule):
    """The cubic of gradual pruning, and the share that is replaced at the same updates.

    From `start_fraction` to `end_fraction` of `total_steps` the remaining part of the way to the
    final density falls as (1 - tau)^3, with tau from 0 to 1. Pruning updates come at multiples of
    `update_interval` and at the end itself. With `drop_fraction` above zero every update also
    replaces drop_fraction/2 (1 + cos(pi t / total_steps)) of a layer's blocks, rounded down, and
    these updates go on until the training ends.

    Sources: Zhu and Gupta 2017, "To prune, or not to prune", equation 1 (the cubic); Liu et al.
    2021, "Sparse Training via Boosting Pruning Plasticity with Neuroregeneration" (the rest).
    """

    total_steps: int
    update_interval: int = 100
    start_fraction: float = 0.0
    end_fraction: float = 0.75
    drop_fraction: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_within("start_fraction", self.start_fraction, "[0, 1]")
        check_within("end_fraction", self.end_fraction, "(0, 1]")
        if self.start >= self.end:
            raise ValueError(
                f"pruning must begin before it ends: start_fraction {self.start_fraction} and "
                f"end_fraction {self.end_fraction} of {self.total_steps} steps are the steps "
                f"{self.start} and {self.end}"
            )

    @property
    def start(self) -> int:
        """The step after which pruning begins."""
        return round(self.start_fraction * self.total_steps)

    @property
    def end(self) -> int:
        """The step that ends in the last pruning."""
        return round(self.end_fraction * self.total_steps)

    def remaining(self, step: int) -> float:
        """The remaining part, in [0, 1], of the way from first to final density."""
        passed = (step - self.start) / (self.end - self.start)
        return (1 - min(max(passed, 0.0), 1.0)) ** 3

    def next_due(self, step: int) -> int | None:
        regular = _next_multiple(self.update_interval, max(step, self.start + 1))
        if step <= self.end:
            return min(regular, self.end)
        return regular if self.drop_fraction > 0 and regular < self.total_steps else None

    def drop_count(self, step: int, nnz: int) -> int:
        fraction = self.drop_fraction / 2 * (1 + math.cos(math.pi * step / self.total_steps))
        return _floor(fraction * nnz)


# 0.29 * 100 is a little below 29 in floating point, but means 29.
_ROUNDING = 1e-9


def _floor(number: float) -> int:
    return math.floor(number + _ROUNDING)


def _ceil(number: float) -> int:
    return math.ceil(number - _ROUNDING)
