"""Data types of variables, and the machine's errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class DType:
    """An element type. `size` in bytes; `numpy` is how the simulation stores it."""

    name: str
    numpy: np.dtype

    @property
    def size(self) -> int:
        return self.numpy.itemsize

    @property
    def is_floating(self) -> bool:
        return self.numpy.kind == "f"

    @property
    def poison(self) -> Any:
        """The value of unwritten memory: NaN, or the bytes 0xAB, so that results show its use."""
        if self.is_floating:
            return np.nan
        if self.numpy.kind == "b":
            return True
        return np.frombuffer(b"\xab" * self.size, self.numpy)[0]

    def __repr__(self) -> str:
        return self.name


HALF = DType("half", np.dtype(np.float16))
"""IEEE half precision, 2 bytes."""
FLOAT = DType("float", np.dtype(np.float32))
"""IEEE single precision, 4 bytes."""
INT = DType("int", np.dtype(np.int32))
"""Signed, 4 bytes."""
UNSIGNED_INT = DType("unsigned int", np.dtype(np.uint32))
"""Unsigned, 4 bytes."""
SHORT = DType("short", np.dtype(np.int16))
"""Signed, 2 bytes."""
UNSIGNED_SHORT = DType("unsigned short", np.dtype(np.uint16))
"""Unsigned, 2 bytes."""
UNSIGNED_CHAR = DType("unsigned char", np.dtype(np.uint8))
"""Unsigned, 1 byte."""
BOOL = DType("bool", np.dtype(np.bool_))
"""True or false, 1 byte."""

_ALL = (HALF, FLOAT, INT, UNSIGNED_INT, SHORT, UNSIGNED_SHORT, UNSIGNED_CHAR, BOOL)
_BY_NAME = {t.name: t for t in _ALL} | {t.numpy.name: t for t in _ALL}


def as_dtype(value: Any) -> DType:
    """The element type meant by a `DType`, a name, or a NumPy or torch dtype.

    Raises:
        TypeError: a type the machine does not have.
    """
    if isinstance(value, DType):
        return value
    if not isinstance(value, type):
        dtype = _BY_NAME.get(str(value).removeprefix("torch."))
    else:
        dtype = _BY_NAME.get(np.dtype(value).name) if issubclass(value, np.generic) else None
    if dtype is None:
        names = ", ".join(t.name for t in _ALL)
        raise TypeError(f"expected an element type ({names}), got {value!r}")
    return dtype


class MachineError(ValueError):
    """A graph or program that the machine cannot run."""


class MappingError(MachineError):
    """An element without a tile, or a tile that does not exist."""


class LocalityError(MachineError):
    """A vertex connected to memory of another tile."""


class RaceError(MachineError):
    """Two vertices of one compute set, or two parts of one copy, that meet in one element."""


class ProgramError(MachineError):
    """A program that is put together wrongly, or that does not end."""


class AbortError(MachineError):
    """A program that ends itself, by `Abort`, `AbortOnCondition` or `ErrorProgram`."""


class OutOfMemoryError(MachineError):
    """A tile whose variables, code and vertex state do not fit."""
