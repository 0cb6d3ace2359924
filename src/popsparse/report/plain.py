"""Plain data, as from JSON, checked key by key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from dynsparse.files.shorten import shortened


def need(data: Any, key: str, what: str) -> Any:
    """The value of a key of a mapping; ValueError that names what lacks it."""
    if not isinstance(data, Mapping):
        raise TypeError(f"{what} must be a mapping, got {type(data).__name__}")
    if key not in data:
        keys = ", ".join(map(str, list(data)[:8])) or "nothing"
        raise ValueError(f"{what} must have the key {key!r}, got {keys}")
    return data[key]


def amount(value: Any, what: str) -> float:
    """A finite number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)):
        raise TypeError(f"{what} must be a number, got {shortened(value)}")
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{what} must be finite and at least 0, got {shortened(value)}")
    return float(value)


def figures(data: Any, what: str) -> dict[str, float]:
    """A mapping of names to finite numbers of at least 0."""
    if not isinstance(data, Mapping):
        raise TypeError(f"{what} must be a mapping, got {type(data).__name__}")
    return {str(name): amount(value, f"{what}, {name}") for name, value in data.items()}


def amounts(values: Any, what: str, size: int | None = None) -> np.ndarray:
    """Finite numbers of at least 0, float64 [size]."""
    try:
        found = np.asarray(values, np.float64)
    except (TypeError, ValueError):
        raise TypeError(f"{what} must be numbers, got {type(values).__name__}") from None
    if found.ndim != 1 or (size is not None and len(found) != size):
        wanted = "a list" if size is None else f"{size} numbers"
        raise ValueError(f"{what} must be {wanted}, got the shape {list(found.shape)}")
    if not np.isfinite(found).all() or (found < 0).any():
        raise ValueError(f"{what} must be finite and at least 0")
    return found


def listed(values: Any, what: str) -> list[Any]:
    """A list, or a tuple as one."""
    if not isinstance(values, (list, tuple)):
        raise TypeError(f"{what} must be a list, got {type(values).__name__}")
    return list(values)


def table_of(rows: Any, columns: int, what: str) -> np.ndarray:
    """Rows of whole numbers of at least 0, int64 [rows, columns]."""
    expected = f"{what} must be rows of {columns} whole numbers of at least 0"
    rows = listed(rows, what)
    try:
        found = np.asarray(rows, np.float64).reshape(len(rows), columns)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(expected) from None
    if not (np.isfinite(found).all() and (found >= 0).all() and (found < 2**53).all()):
        raise ValueError(expected)
    if (found != np.floor(found)).any():
        raise ValueError(expected)
    return found.astype(np.int64)
