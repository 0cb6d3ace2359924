"""Checks of arguments: what is right comes back, what is wrong gets one line.

Every message has the argument's name, what was expected and what was got.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Collection
from contextlib import suppress
from typing import Any

import numpy as np
from torch import Generator, Tensor, bfloat16, strided

from dynsparse.files.shorten import shortened

_LARGEST = 2**63


def check_integer(name: str, value: Any, least: int | None = None) -> int:
    """`value` as an integer, of at least `least` if that is given; no bool.

    Raises:
        TypeError: something that is no integer.
        ValueError: a bool, or an integer below `least`.
    """
    try:
        if isinstance(value, Tensor) and (value.dim() or value.is_meta):
            raise TypeError
        number = operator.index(value)
    except (TypeError, RuntimeError):
        raise TypeError(f"{name} must be an integer, got {shortened(value)}") from None
    if isinstance(value, bool) or (least is not None and number < least):
        span = "" if least is None else f" of at least {least}"
        raise ValueError(f"{name} must be an integer{span}, got {shortened(value)}")
    if not -_LARGEST <= number < _LARGEST:
        raise ValueError(f"{name} must be an integer of 64 bits, got {shortened(value)}")
    return number


def is_scipy(value: Any) -> bool:
    """Whether `value` is a sparse matrix of SciPy's; asks SciPy, which takes half a second to
    import, only where somebody has imported it, as whoever has such a matrix has."""
    library = sys.modules.get("scipy.sparse")
    return library is not None and bool(library.issparse(value))


def is_number(value: Any) -> bool:
    """Whether `value` is an int or a float; a bool is neither."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_fraction(name: str, value: Any, *, zero: bool) -> float:
    """`value`, which must lie in [0, 1], or in (0, 1] unless `zero` is allowed.

    Raises:
        TypeError: no number.
        ValueError: a number outside.
    """
    if not is_number(value):
        raise TypeError(f"{name} must be a number, got {shortened(value)}")
    if not 0 <= value <= 1 or (value == 0 and not zero):
        span = "[0, 1]" if zero else "(0, 1]"
        raise ValueError(f"{name} must lie in {span}, got {shortened(value)}")
    return value


def check_within(name: str, value: Any, span: str) -> float:
    """`value`, a number within `span`, which is written as usual: "[0, 1)" holds 0 and not 1.

    Raises:
        ValueError: no number, or one outside; NaN is outside.
    """
    low, high = map(float, span[1:-1].split(","))
    edges = {edge for edge, bracket in ((low, span[0]), (high, span[-1])) if bracket in "()"}
    if not is_number(value) or not low <= value <= high or value in edges:
        raise ValueError(f"{name} must be a number in {span}, got {shortened(value)}")
    return value


def check_not_negative(name: str, value: Any) -> float:
    """`value`, a finite number of at least zero.

    Raises:
        ValueError: anything else.
    """
    if not is_number(value) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{name} must be a finite number of at least 0, got {shortened(value)}")
    return float(value)


def check_kind(name: str, value: Any, kind: type | tuple[type, ...], expected: str) -> Any:
    """`value`, an instance of `kind`, which a person calls `expected`: "a SparsePattern".

    Raises:
        TypeError: anything else.
    """
    if not isinstance(value, kind):
        raise TypeError(
            f"{name} must be {expected}, got {type(value).__name__}: {shortened(value)}"
        )
    return value


def check_tensor(name: str, value: Any) -> Tensor:
    """`value`, a strided tensor.

    Raises:
        TypeError: anything else, torch's sparse tensors included.
    """
    check_kind(name, value, Tensor, "a tensor")
    if value.layout is not strided:
        raise TypeError(f"{name} must be an ordinary strided tensor, got {value.layout}")
    return value


def check_array(
    name: str, value: Any, kinds: str = "fiu", expected: str = "real numbers"
) -> np.ndarray:
    """`value`, a tensor, an array or nested lists of numbers, as an array.

    Args:
        kinds: of NumPy's types, as `dtype.kind` has them; any of them if there is no element.
        expected: what a person calls these.

    Raises:
        TypeError: anything else.
    """
    array = None
    if not isinstance(value, Tensor):
        with suppress(TypeError, ValueError, OverflowError, RuntimeError):
            array = np.asarray(value)
    elif value.layout is strided and not value.is_meta and value.dtype != bfloat16:
        array = value.detach().cpu().numpy()
    empty = array is not None and not array.size and array.dtype.kind in "biuf"
    if array is None or (array.dtype.kind not in kinds and not empty):
        got = value.dtype if isinstance(value, (Tensor, np.ndarray)) else shortened(value)
        where = f" on {value.device}" if isinstance(value, Tensor) and value.is_meta else ""
        raise TypeError(f"{name} must be {expected}, got {got}{where}")
    return array


def check_generator(value: Any) -> Generator | None:
    """`value`, a generator of random numbers or None.

    Raises:
        TypeError: anything else.
    """
    return check_kind("generator", value, (Generator, type(None)), "a torch.Generator or None")


def check_choice(name: str, value: Any, choices: Collection[str]) -> str:
    """`value`, one of the names that there are.

    Raises:
        ValueError: anything else.
    """
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {shortened(value)}")
    return value


def check_flag(name: str, value: Any) -> bool:
    """`value`, True or False.

    Raises:
        TypeError: anything else.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {shortened(value)}")
    return value
