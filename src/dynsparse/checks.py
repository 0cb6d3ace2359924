"""Checks of arguments that several files share."""

from __future__ import annotations

import math
import operator
from typing import Any

__all__ = ["check_fraction", "check_integer", "check_not_negative"]


def check_integer(name: str, value: Any, least: int) -> int:
    """`value` as an integer of at least `least`."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None
    if isinstance(value, bool) or number < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
    return number


def check_fraction(name: str, value: Any, *, zero: bool) -> float:
    """`value`, which must lie in [0, 1], or in (0, 1] unless `zero` is allowed."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not 0 <= value <= 1 or (value == 0 and not zero):
        span = "[0, 1]" if zero else "(0, 1]"
        raise ValueError(f"{name} must lie in {span}, got {value!r}")
    return value


def check_not_negative(name: str, value: Any) -> float:
    """`value`, a finite number of at least zero."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < 0:
        raise ValueError(f"{name} must be a finite number of at least 0, got {value!r}")
    return float(value)
