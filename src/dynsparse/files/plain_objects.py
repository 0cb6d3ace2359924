"""Trees of data classes, named tuples and plain types as JSON, and back, for a list of classes.

Tuples are arrays, dictionaries with texts for keys are objects; an object with the one key "$"
holds the name of a class and its fields, or the text that stands for a value.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable, Iterable, Mapping
from types import NoneType, UnionType
from typing import Any

from dynsparse.files.shorten import shortened

_MARK = "$"


class PlainObjects:
    """What may be written and read.

    Args:
        classes: data classes and named tuples. Their annotations are what their fields must be.
        values: of each further class, how a text is made of a value, and a value of the text.
    """

    def __init__(
        self,
        classes: Iterable[type],
        values: Mapping[type, tuple[Callable[[Any], str], Callable[[str], Any]]],
    ) -> None:
        self._classes = {one.__name__: one for one in classes}
        self._values = {one.__name__: functions for one, functions in values.items()}
        self._known = {*self._classes.values(), *values}

    def to_plain(self, value: Any) -> Any:
        """`value` made of what JSON has.

        Raises:
            TypeError: something that is none of what may be written.
        """
        kind: Any = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if kind is tuple:
            return [self.to_plain(one) for one in value]
        if kind is dict and all(type(key) is str for key in value) and _MARK not in value:
            return {key: self.to_plain(one) for key, one in value.items()}
        if kind in self._known:
            name = kind.__name__
            if name in self._values:
                return {_MARK: [name, self._values[name][0](value)]}
            fields = {one: self.to_plain(getattr(value, one)) for one in _fields(kind)}
            return {_MARK: [name, fields]}
        raise TypeError(f"expected plain types and known classes, got {shortened(value)}")

    def from_plain(self, plain: Any) -> Any:
        """What `to_plain` made `plain` of.

        Raises:
            ValueError, TypeError: something that `to_plain` does not make, or that its class
                refuses.
        """
        if isinstance(plain, list):
            return tuple(self.from_plain(one) for one in plain)
        if not isinstance(plain, dict):
            return plain
        if _MARK not in plain:
            return {key: self.from_plain(one) for key, one in plain.items()}
        match plain:
            case {"$": [str(name), str(text)]} if len(plain) == 1 and name in self._values:
                return self._values[name][1](text)
            case {"$": [str(name), dict(given)]} if len(plain) == 1 and name in self._classes:
                return self._made(self._classes[name], given)
        raise ValueError(f"expected a known class and its fields, got {shortened(plain)}")

    def _made(self, kind: type, given: dict[str, Any]) -> Any:
        wanted = _fields(kind)
        if set(given) != set(wanted):
            raise ValueError(
                f"expected the fields {', '.join(wanted)} of {kind.__name__}, got "
                f"{shortened(list(given))}"
            )
        fields = {name: self.from_plain(one) for name, one in given.items()}
        for name, hint in wanted.items():
            if not _fits(fields[name], hint):
                raise ValueError(
                    f"expected {hint} for {kind.__name__}.{name}, got {shortened(fields[name])}"
                )
        return kind(**fields)


@functools.cache
def _fields(kind: Any) -> dict[str, Any]:
    """Names of what the constructor takes, and what each must be."""
    hints = typing.get_type_hints(kind)
    if not dataclasses.is_dataclass(kind):
        return {name: hints[name] for name in kind._fields}
    return {one.name: hints[one.name] for one in dataclasses.fields(kind) if one.init}


def _fits(value: Any, hint: Any) -> bool:
    """Whether `value`, made of what JSON has and known classes, is what an annotation says."""
    if hint is Any:
        return True
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, UnionType):
        return any(_fits(value, one) for one in arguments)
    if hint in (None, NoneType):
        return value is None
    if origin is dict:
        return isinstance(value, dict) and all(_fits(v, arguments[1]) for v in value.values())
    if origin is tuple:
        if type(value) is not tuple:
            return False
        if arguments[-1] is Ellipsis:
            arguments = arguments[:1] * len(value)
        return len(value) == len(arguments) and all(map(_fits, value, arguments))
    if hint is float:
        return type(value) in (int, float)
    return type(value) is hint
