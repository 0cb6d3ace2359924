"""Checks of arguments. A check returns the valid value and raises a one-line error otherwise.

Every message has the argument's name, what was expected and what was given.
"""

from __future__ import annotations

import collections.abc
import functools
import inspect
import math
import operator
import os
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeVar, Union

import numpy as np
import torch
from torch import Generator, Tensor, bfloat16, strided

_TEXT = 100
_ITEMS = 12
_DEPTH = 4
_BRACKETS: dict[type, tuple[str, str]] = {
    list: ("[", "]"), tuple: ("(", ")"), set: ("{", "}"), dict: ("{", "}"),
}  # fmt: skip


def shorten(value: Any) -> str:
    """Return `repr(value)` on one line, with "..." in place of long texts and deep nesting.

    The `repr` of a value from a file may have any length and depth; this takes time and memory only
    for the part that it returns.
    """
    return _truncate(_shorten(value, _DEPTH), 2 * _TEXT)


def _shorten(value: Any, depth: int) -> str:
    kind = type(value)
    if kind in (str, bytes):
        return repr(value) if len(value) <= _TEXT else f"{value[:_TEXT]!r}..."
    if kind is int and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"  # Python refuses to print long ones
    kind = next((base for base in _BRACKETS if isinstance(value, base)), kind)
    if kind not in _BRACKETS:
        return _truncate(repr(value), _TEXT)
    if not value:
        return repr(value)
    opening, closing = _BRACKETS[kind]
    if not depth:
        return f"{opening}...{closing}"
    items: list[str] = []
    for item in value:
        if len(items) == _ITEMS:
            items.append("...")
            break
        text = _shorten(item, depth - 1)
        if kind is dict:
            text += f": {_shorten(value[item], depth - 1)}"
        items.append(text)
    comma = "," if kind is tuple and len(items) == 1 else ""
    return f"{opening}{', '.join(items)}{comma}{closing}"


def describe_error(error: BaseException, most: int = 300) -> str:
    """Return an error's text on one line of at most `most` characters, with its class unless it is
    a ValueError with a text."""
    text = " ".join(str(error).split())
    if not text:
        return type(error).__name__
    return (text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}")[:most]


def _truncate(text: str, length: int) -> str:
    text = " ".join(text.split("\n"))
    return text if len(text) <= length else f"{text[:length]}..."


_LARGEST = 2**63


def check_integer(name: str, value: Any, least: int | None = None) -> int:
    """Return `value` as an int, after checking that it is at least `least`, if given.

    Raises:
        TypeError: not an integer.
        ValueError: a bool, or an integer below `least`.
    """
    try:
        if isinstance(value, Tensor) and (value.dim() or value.is_meta):
            raise TypeError
        number = operator.index(value)
    except (TypeError, RuntimeError):
        raise TypeError(f"{name} must be an integer, got {shorten(value)}") from None
    if isinstance(value, bool) or (least is not None and number < least):
        span = "" if least is None else f" of at least {least}"
        raise ValueError(f"{name} must be an integer{span}, got {shorten(value)}")
    if not -_LARGEST <= number < _LARGEST:
        raise ValueError(f"{name} must be an integer of 64 bits, got {shorten(value)}")
    return number


def check_sizes(name: str, values: Any, dims: Sequence[str]) -> tuple[int, ...]:
    """Return `values` as a tuple, after checking that it has one size >= 1 for each of `dims`.

    Raises:
        ValueError, TypeError: another number of sizes, or an invalid size.
    """
    given = list(values) if isinstance(values, Iterable) else []
    if len(given) != len(dims):
        raise ValueError(f"{name} must be the sizes ({', '.join(dims)}), got {shorten(values)}")
    return tuple(check_integer(f"{name} of {x}", s, 1) for x, s in zip(dims, given, strict=True))


def is_scipy(value: Any) -> bool:
    """Whether `value` is a sparse matrix of SciPy, without importing SciPy.

    That takes half a second, and where such a matrix exists SciPy is imported already.
    """
    library = sys.modules.get("scipy.sparse")
    return library is not None and bool(library.issparse(value))


def is_number(value: Any) -> bool:
    """Whether `value` is an int or a float; a bool is neither."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_within(name: str, value: Any, span: str) -> float:
    """Return `value`, after checking that it is in the interval `span`, such as "[0, 1)".

    Raises:
        TypeError: not a number.
        ValueError: a number outside; NaN is outside.
    """
    low, high = map(float, span[1:-1].split(","))
    edges = {edge for edge, bracket in ((low, span[0]), (high, span[-1])) if bracket in "()"}
    if not is_number(value):
        raise TypeError(f"{name} must be a number in {span}, got {shorten(value)}")
    if not low <= value <= high or value in edges:
        raise ValueError(f"{name} must be a number in {span}, got {shorten(value)}")
    return value


def check_not_negative(name: str, value: Any) -> float:
    """Return `value`, after checking that it is a finite number of at least zero.

    Raises:
        ValueError: anything else.
    """
    if not is_number(value) or not 0 <= value <= sys.float_info.max:
        raise ValueError(f"{name} must be a finite number of at least 0, got {shorten(value)}")
    return float(value)


def check_kind(name: str, value: Any, kind: type | tuple[type, ...], expected: str) -> Any:
    """Return `value`, after checking that it is an instance of `kind`.

    Args:
        expected: the kind in words, such as "a SparsePattern".

    Raises:
        TypeError: anything else.
    """
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be {expected}, got {type(value).__name__}: {shorten(value)}")
    return value


def check_tensor(name: str, value: Any) -> Tensor:
    """Return `value`, after checking that it is a strided tensor.

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
    """Return `value`, a tensor, an array or nested lists of numbers, as an array.

    Args:
        kinds: the allowed `dtype.kind` of NumPy; an empty array may be of any of "biuf".
        expected: the kinds in words.

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
        actual = value.dtype if isinstance(value, (Tensor, np.ndarray)) else shorten(value)
        where = f" on {value.device}" if isinstance(value, Tensor) and value.is_meta else ""
        raise TypeError(f"{name} must be {expected}, got {actual}{where}")
    return array


def check_generator(value: Any) -> Generator | None:
    """Return `value`, after checking that it is a `torch.Generator` or None.

    Raises:
        TypeError: anything else.
    """
    return check_kind("generator", value, (Generator, type(None)), "a torch.Generator or None")


def check_choice(name: str, value: Any, choices: Collection[str]) -> str:
    """Return `value`, after checking that it is one of the `choices`.

    Raises:
        ValueError: anything else.
    """
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {shorten(value)}")
    return value


def is_finite(tensor: Tensor) -> bool:
    """Whether no entry of the tensor is NaN or infinite."""
    # Mostly the sum tells in one pass; that of finite numbers may overflow.
    total = tensor.sum(dtype=torch.float32 if tensor.itemsize < 4 else None)
    return math.isfinite(total.item()) or bool(tensor.isfinite().all())


def check_flag(name: str, value: Any) -> bool:
    """Return `value`, after checking that it is a bool.

    Raises:
        TypeError: anything else.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {shorten(value)}")
    return value


_Function = TypeVar("_Function", bound=Callable[..., Any])

_PLAIN = (type(None), bool, str, bytes, int, float, np.number)


def check_types(function: _Function) -> _Function:
    """Check the arguments of a public function, or of a class's constructor, by their annotations.

    A decorator. It checks types only: the function checks ranges and shapes. Where it expects a
    number it also checks None, bools and text itself, since its message says what it expects. A
    call takes some microseconds more, so do not use it for functions that run in every step.

    Raises:
        TypeError: an argument of a type that the annotation excludes; `sparsity=` where `density=`
            is meant, as other libraries have it.
    """
    if isinstance(function, type):
        function.__init__ = check_types(function.__init__)  # type: ignore[misc]
        return function

    @functools.wraps(function)
    def checked(*args: Any, **named: Any) -> Any:
        positional, hints = _get_hints(function)
        # The function itself reports too many or unknown arguments.
        for (name, hint), value in zip(positional, args, strict=False):
            if type(value) is not hint or hint is Tensor:
                _check(name, value, hint)
        for name, value in named.items():
            if name == "sparsity" and "density" in hints and name not in hints:
                raise TypeError(
                    "there is no argument sparsity: pass density=, which is 1 - sparsity"
                )
            _check(name, value, hints.get(name, Any))
        return function(*args, **named)

    return checked  # type: ignore[return-value]


@functools.cache
def _get_hints(function: Callable[..., Any]) -> tuple[list[tuple[str, Any]], dict[str, Any]]:
    """Return (name, type) of each positional parameter, and name -> type of all parameters.

    Annotations are resolved at the first call of a function, when every module is imported.
    """
    types = typing.get_type_hints(function)
    parameters = inspect.signature(function).parameters
    hints = {name: types.get(name, Any) for name in parameters}
    positional = [
        (name, hint)
        for name, hint in hints.items()
        if parameters[name].kind
        in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    ]
    return positional, hints


def _check(name: str, value: Any, hint: Any) -> None:
    if hint is int:
        check_integer(name, 0 if isinstance(value, bool) else value)
    elif hint is Tensor:
        check_tensor(name, value)
    elif not _fits(value, hint):
        raise TypeError(f"{name} must be {_describe_type(hint)}, got {shorten(value)}")


def _fits(value: Any, hint: Any) -> bool:
    if hint is Any:
        return True
    origin = typing.get_origin(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, member) for member in typing.get_args(hint))
    if hint is bool:
        return isinstance(value, (bool, np.bool_)) or (type(value) is int and value in (0, 1))
    if hint is Tensor:
        return isinstance(value, Tensor) and value.layout is torch.strided
    if hint in (int, float, str):
        return isinstance(value, _PLAIN) or (hint is not str and _is_scalar(value))
    kind = hint if origin is None else origin
    if kind in (collections.abc.Iterable, collections.abc.Sequence):
        return isinstance(value, collections.abc.Iterable)
    if kind is collections.abc.Callable:
        return callable(value)
    if not isinstance(kind, type) or getattr(kind, "_is_protocol", False):
        return True
    return isinstance(value, kind)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.ndim == 0 and value.dtype.kind in "iuf"


_NAMES: dict[Any, str] = {
    bool: "True or False",
    int: "an integer",
    float: "a number",
    str: "text",
    Tensor: "a tensor",
    type(None): "None",
    collections.abc.Callable: "a function",
    collections.abc.Iterable: "an iterable",
    collections.abc.Mapping: "a mapping",
    os.PathLike: "a path",
    torch.nn.Module: "a torch.nn.Module",
}


def _describe_type(hint: Any) -> str:
    origin = typing.get_origin(hint)
    if origin in (Union, types.UnionType):
        members = (_describe_type(member) for member in typing.get_args(hint))
        return " or ".join(dict.fromkeys(members))
    kind = hint if origin is None else origin
    name = str(getattr(kind, "__name__", kind))
    return _NAMES.get(kind) or (name if name.endswith("s") else f"a {name}")
