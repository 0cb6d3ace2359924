"""What values an option may have: each kind says in words what it expects, and checks it."""

from __future__ import annotations

import math
import operator
import os
from dataclasses import dataclass
from typing import Any

__all__ = [
    "Between",
    "Choice",
    "File",
    "Integer",
    "Json",
    "Kind",
    "Many",
    "Number",
    "Pairs",
    "Switch",
    "Text",
]


class Kind:
    """Values of one kind. `expected` goes on "--flag: expected ...", and is told in tables."""

    expected = ""

    def fits(self, value: Any) -> bool:
        """Whether `value` is one of them."""
        raise NotImplementedError

    def check(self, flag: str, value: Any) -> None:
        """Raise ValueError, naming the flag, unless `value` fits."""
        if not self.fits(value):
            raise ValueError(f"--{flag}: expected {self.expected}, got {value!r}")


class Text(Kind):
    """A string, or the path that stands for one."""

    expected = "a text"

    def fits(self, value: Any) -> bool:
        return isinstance(value, (str, os.PathLike))


class File(Text):
    """The path of a file or folder."""

    expected = "a path"


class Switch(Kind):
    """On or off."""

    expected = "true or false"

    def fits(self, value: Any) -> bool:
        return isinstance(value, bool)


@dataclass(frozen=True)
class Integer(Kind):
    """An integer of at least `least`; `within` says what holds for one that is above `most`."""

    least: int
    most: int | None = None
    within: str = ""

    @property
    def expected(self) -> str:  # type: ignore[override]
        return f"an integer of at least {self.least}"

    def fits(self, value: Any) -> bool:
        return self._counts(value) and (self.most is None or value <= self.most)

    def check(self, flag: str, value: Any) -> None:
        if self._counts(value) and not self.fits(value):
            limit = self.within or f"at most {self.most}"
            raise ValueError(f"--{flag}: expected {limit}, got {value}")
        super().check(flag, value)

    def _counts(self, value: Any) -> bool:
        try:
            return not isinstance(value, bool) and operator.index(value) >= self.least
        except TypeError:
            return False


@dataclass(frozen=True)
class Between(Integer):
    """An integer from `least` to `most`, told in one line whichever end it is beyond."""

    @property
    def expected(self) -> str:  # type: ignore[override]
        return f"an integer between {self.least} and {self.most}"

    def check(self, flag: str, value: Any) -> None:
        Kind.check(self, flag, value)


@dataclass(frozen=True)
class Number(Kind):
    """A number in [low, high], without the ends that are open; no infinity, no NaN."""

    low: float
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False

    @property
    def expected(self) -> str:  # type: ignore[override]
        if math.isinf(self.high):
            return f"a finite number of at least {self.low:g}"
        first, last = "(" if self.open_low else "[", ")" if self.open_high else "]"
        return f"a number in {first}{self.low:g}, {self.high:g}{last}"

    def fits(self, value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return False
        above = value > self.low if self.open_low else value >= self.low
        below = value < self.high if self.open_high else value <= self.high
        return above and below and math.isfinite(value)


@dataclass(frozen=True)
class Choice(Kind):
    """One of a few names or numbers."""

    values: tuple[Any, ...]

    @property
    def expected(self) -> str:  # type: ignore[override]
        return f"one of {', '.join(map(str, self.values))}"

    def fits(self, value: Any) -> bool:
        return value in self.values


@dataclass(frozen=True)
class Json(Kind):
    """A dict, given as a JSON object."""

    expected = "a JSON object"

    def fits(self, value: Any) -> bool:
        return isinstance(value, dict) and all(isinstance(key, str) for key in value)


@dataclass(frozen=True)
class Pairs(Json):
    """A dict, given as several name=json such as `example`."""

    example: str = ""
    expected = "name=json"


@dataclass(frozen=True)
class Many(Kind):
    """Several values of one kind; `expected` is of each."""

    each: Kind
    expected: str = ""

    def fits(self, value: Any) -> bool:
        return isinstance(value, (list, tuple)) and all(map(self.each.fits, value))

    def check(self, flag: str, value: Any) -> None:
        wrong = [value]
        if isinstance(value, (list, tuple)):
            wrong = [one for one in value if not self.each.fits(one)]
        if wrong:
            raise ValueError(f"--{flag}: expected {self.expected}, got {wrong[0]!r}")
