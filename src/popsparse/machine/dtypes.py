"""Data types of variables, and the machine's errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dynsparse._core.checks import check_array


@dataclass(frozen=True, repr=False)
class DType:
    """An element type; `numpy` is how the simulation stores it."""

    numpy: np.dtype

    @property
    def name(self) -> str:
        """NumPy's name of the type, such as "float16"."""
        return self.numpy.name

    @property
    def size(self) -> int:
        """Bytes of an element."""
        return self.numpy.itemsize

    @property
    def vector_width(self) -> int:
        """Elements in 64 bits, which a tile of an IPU loads in a cycle."""
        return 8 // self.size

    @property
    def is_floating(self) -> bool:
        return self.numpy.kind == "f"

    @property
    def poison(self) -> Any:
        """The value of unwritten memory: NaN, or the bytes 0xAB, so that its use is noticed."""
        if self.is_floating:
            return np.nan
        if self.numpy.kind == "b":
            return True
        return np.frombuffer(b"\xab" * self.size, self.numpy)[0]

    def __repr__(self) -> str:
        return self.name


HALF = DType(np.dtype(np.float16))
"""float16; Poplar's "half"."""
FLOAT = DType(np.dtype(np.float32))
"""float32; Poplar's "float"."""
INT = DType(np.dtype(np.int32))
"""int32; Poplar's "int"."""
UNSIGNED_INT = DType(np.dtype(np.uint32))
"""uint32; Poplar's "unsigned int"."""
SHORT = DType(np.dtype(np.int16))
"""int16; Poplar's "short"."""
UNSIGNED_SHORT = DType(np.dtype(np.uint16))
"""uint16; Poplar's "unsigned short"."""
UNSIGNED_CHAR = DType(np.dtype(np.uint8))
"""uint8; Poplar's "unsigned char"."""
BOOL = DType(np.dtype(np.bool_))
"""bool; Poplar's "bool"."""

_POPLAR = {
    "half": HALF,
    "float": FLOAT,
    "int": INT,
    "unsigned int": UNSIGNED_INT,
    "short": SHORT,
    "unsigned short": UNSIGNED_SHORT,
    "unsigned char": UNSIGNED_CHAR,
    "bool": BOOL,
}
_BY_NAME = {t.name: t for t in _POPLAR.values()} | _POPLAR


def as_dtype(value: Any) -> DType:
    """Convert a `DType`, NumPy's or Poplar's name of a type ("float16", "half"), or a NumPy or
    torch dtype to a `DType`.

    Raises:
        TypeError: a type the machine does not support.
    """
    if isinstance(value, DType):
        return value
    if not isinstance(value, type):
        dtype = _BY_NAME.get(str(value).removeprefix("torch."))
    else:
        dtype = _BY_NAME.get(np.dtype(value).name) if issubclass(value, np.generic) else None
    if dtype is None:
        names = ", ".join(t.name for t in _POPLAR.values())
        raise TypeError(f"expected an element type ({names}), got {value!r}")
    return dtype


def convert_values(what: str, values: Any, dtype: DType) -> np.ndarray:
    """Numbers as an array of this type; messages begin with `what`.

    Raises:
        TypeError: not numbers, or fractional ones for an integer type.
        ValueError: integers that do not fit the type.
    """
    array = check_array(what, values, "fiub", "numbers")
    if dtype.numpy.kind in "iu" and array.size:
        if array.dtype.kind == "f":
            raise TypeError(f"{what}: expected integers, got {array.dtype}")
        limits = np.iinfo(dtype.numpy)
        if not (limits.min <= array.min() and array.max() <= limits.max):
            raise ValueError(
                f"{what}: {dtype.name} holds {limits.min} to {limits.max}, got {array.min()} to "
                f"{array.max()}"
            )
    with np.errstate(over="ignore"):
        return np.asarray(array.astype(dtype.numpy))


class MachineError(ValueError):
    """A graph or program that the machine cannot run."""


class MappingError(MachineError):
    """An element without a tile, or a tile that does not exist."""


class LocalityError(MachineError):
    """A vertex connected to memory of another tile."""


class RaceError(MachineError):
    """Two vertices of one compute set, or two parts of one copy, that access the same element."""


class ProgramError(MachineError):
    """An invalid program, or one that does not end."""


class AbortError(MachineError):
    """A program that ends itself, by `Abort`, `AbortOnCondition` or `ErrorProgram`."""


class OutOfMemoryError(MachineError):
    """A tile whose variables, code and vertex state do not fit."""
