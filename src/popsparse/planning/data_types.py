"""The two number formats of the tile machine's sparse products, and the errors their users meet."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any


@dataclass(frozen=True)
class DataType:
    """A floating-point format. `size` in bytes, `vector_width` in elements of the 64-bit path."""

    name: str
    size: int

    @property
    def vector_width(self) -> int:
        return 8 // self.size

    def __str__(self) -> str:
        return self.name


FLOAT16 = DataType("float16", 2)
FLOAT32 = DataType("float32", 4)
_NAMES = {"float16": FLOAT16, "half": FLOAT16, "float32": FLOAT32, "float": FLOAT32}


@lru_cache
def _by_name(name: str) -> DataType:
    try:
        return _NAMES[name.removeprefix("torch.")]
    except KeyError:
        raise ValueError(f"data type must be float16 or float32, got {name!r}") from None


def data_type(value: Any, what: str = "dtype") -> DataType:
    """The `DataType` meant by a name ("float16", "half", ...), a torch or a NumPy dtype.

    Raises:
        ValueError: any other type.
    """
    if isinstance(value, DataType):
        return value
    name = getattr(value, "__name__", None) or str(value)
    try:
        return _by_name(name)
    except ValueError:
        raise ValueError(f"{what} must be float16 or float32, got {value!r}") from None


def number(value: Any, what: str, least: float, most: float = float("inf")) -> float:
    """`value` as a float of [least, most]; a clear error otherwise (also for NaN)."""
    try:
        if isinstance(value, (bool, str)):
            raise TypeError
        found = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{what} must be a number, got {value!r}") from None
    if not least <= found <= most:
        wanted = f"at least {least:g}" if most == float("inf") else f"in [{least:g}, {most:g}]"
        raise ValueError(f"{what} must be {wanted}, got {value!r}")
    return found
