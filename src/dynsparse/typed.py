"""Public doors: arguments of a kind that nothing behind the door could use are turned away.

What a value must be beyond its kind (its range, its shape) is for the function to say. So numbers
and texts are only kept apart from what is neither, and None, bools and texts given for a number are
left to the function's own check, which says what it expects.
"""

from __future__ import annotations

import collections.abc
import functools
import inspect
import os
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, Union

import numpy as np
import torch
from torch import Tensor

from dynsparse.checks import check_integer, check_tensor
from dynsparse.files.shorten import shortened

_Door = TypeVar("_Door", bound=Callable[..., Any])

_PLAIN = (type(None), bool, str, bytes, int, float, np.number)


def typed(function: _Door) -> _Door:
    """`function`, or a class whose constructor it is, with its arguments checked by annotation.

    Costs some microseconds a call, so it is not for what runs in every step.

    Raises:
        TypeError: an argument of a kind that the annotation excludes.
    """
    if isinstance(function, type):
        function.__init__ = typed(function.__init__)  # type: ignore[misc]
        return function

    @functools.wraps(function)
    def door(*args: Any, **named: Any) -> Any:
        parameters, hints = _parameters(function), _hints(function)
        # Too many or unknown arguments are told by the function itself.
        for name, value in zip(parameters, args, strict=False):
            if parameters[name].kind is inspect.Parameter.VAR_POSITIONAL:
                break
            _check(name, value, hints.get(name, Any))
        for name, value in named.items():
            _check(name, value, hints.get(name, Any))
        return function(*args, **named)

    return door  # type: ignore[return-value]


@functools.cache
def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """When first called, and not earlier: most doors of a program stay shut."""
    return inspect.signature(function).parameters


@functools.cache
def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """When first called, and not earlier: by then every module is there."""
    return typing.get_type_hints(function)


def _check(name: str, value: Any, hint: Any) -> None:
    if hint is int:
        check_integer(name, 0 if isinstance(value, bool) else value)
    elif hint is Tensor:
        check_tensor(name, value)
    elif not _fits(value, hint):
        raise TypeError(f"{name} must be {_words(hint)}, got {shortened(value)}")


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
    os.PathLike: "a path",
}


def _words(hint: Any) -> str:
    origin = typing.get_origin(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_words(member) for member in typing.get_args(hint)))
    kind = hint if origin is None else origin
    name = str(getattr(kind, "__name__", kind))
    return _NAMES.get(kind) or (name if name.endswith("s") else f"a {name}")
