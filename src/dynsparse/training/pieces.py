"""Whether the pieces of a trainer are what they must be."""

from __future__ import annotations

import math
from typing import Any

from dynsparse.checks import is_number
from dynsparse.files.shorten import shortened
from dynsparse.training.initial import GradientStep

# By duck typing, so that anybody's own pieces serve: what a piece is known by, and what it is.
_PIECES = {
    "schedule": (("is_due",), "a schedule, such as CosineSchedule"),
    "growth": (("choose", "needs_gradients"), "a Growth, such as GradientGrowth"),
    "budget": (("counts", "begin"), "a Budget, such as LayerBudget"),
    "history": (("observe", "window"), "a History, such as LastStep"),
}


def check_kinds_of_pieces(**pieces: Any) -> None:
    """Raise TypeError where a piece that is not None lacks what a trainer calls, and ValueError
    where there is a growth without a schedule or a schedule without a growth."""
    if (pieces["schedule"] is None) != (pieces["growth"] is None):
        raise ValueError("give both a schedule and a growth, or neither for a static pattern")
    for name, piece in pieces.items():
        known_by, expected = _PIECES[name]
        if piece is not None and (
            isinstance(piece, type) or not all(hasattr(piece, part) for part in known_by)
        ):
            raise TypeError(f"{name} must be {expected}, got {shortened(piece)}")


def check_drop_score(drop_score: Any) -> None:
    """Raise TypeError for what cannot be called."""
    if not callable(drop_score):
        raise TypeError(f"drop_score must be a function of the values, got {drop_score!r}")


def check_initial_value(value: Any) -> None:
    """Raise unless grown weights can start with `value`: a finite number, a `GradientStep`, or a
    function of (layer, rewiring)."""
    if is_number(value):
        if not math.isfinite(value):
            raise ValueError(f"initial_value must be finite, got {value!r}")
    elif isinstance(value, type) or not (callable(value) or isinstance(value, GradientStep)):
        raise TypeError(f"initial_value must be a number or a function, got {shortened(value)}")
