"""One option, written once: from it come its check, its flag, its part in resuming, its docs."""

from __future__ import annotations

import copy
import dataclasses
import math
import operator
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dynsparse.checks import is_number
from dynsparse.training.algorithms import BY_NAME

METHODS = (*BY_NAME, "dense")
"""What `--method` takes: every algorithm, and the same network dense."""

PANELS = (
    "Data", "Network", "Sparsity", "Ranks", "Training", "Learning rate", "Text", "Checkpoints",
    "Output",
)  # fmt: skip

Defines = Literal["network", "training", "apart", "run"]


@dataclass(frozen=True)
class Kind:
    """What values an option takes.

    Attributes:
        plain: the type of one value; dict is JSON.
        rules: what is expected, in words, and whether a value is so; each sees only values that
            keep those before it. One may raise a ValueError of its own.
        several: whether there are several such values; several dicts are name=json, as `example`.
        names: those that are taken, where there are few.
    """

    plain: type
    rules: tuple[tuple[str, Callable[[Any], bool]], ...]
    several: bool = False
    names: tuple[Any, ...] = ()
    example: str = ""

    def check(self, name: str, value: Any) -> None:
        """Raise ValueError, naming the flag, for a value that breaks a rule."""
        listed = self.several and isinstance(value, (list, tuple))
        for expected, holds in self.rules:
            for one in value if listed else [value]:
                if not holds(one):
                    raise ValueError(f"--{name}: expected {expected}, got {one!r}")


TEXT = Kind(str, (("a text", lambda value: isinstance(value, (str, os.PathLike))),))
FILE = Kind(Path, (("a path", lambda value: isinstance(value, (str, os.PathLike))),))
SWITCH = Kind(bool, (("true or false", lambda value: isinstance(value, bool)),))


def _is_integer(value: Any) -> bool:
    return not isinstance(value, bool) and hasattr(value, "__index__")


def integer(least: int, most: int = 2**31 - 1, within: str = "") -> Kind:
    """An integer; `within` says what is expected of one that is above `most`."""
    rules = [
        (
            f"an integer of at least {least}",
            lambda v: _is_integer(v) and operator.index(v) >= least,
        ),
        (within or f"at most {most}", lambda v: v <= most),
    ]
    return Kind(int, tuple(rules))


def between(least: int, most: int, words: str = "an integer between") -> Kind:
    """An integer, with one sentence for both ends."""
    return Kind(
        int, ((f"{words} {least} and {most}", lambda v: _is_integer(v) and least <= v <= most),)
    )


def number(low: float, high: float = math.inf, *, below: bool = False, above: str = "") -> Kind:
    """A finite number in [low, high], or [low, high) with `below`.

    With `above` it must not be `low` either, and `above` says so.
    """
    expected = f"a finite number of at least {low:g}"
    if high < math.inf:
        expected = f"a number in [{low:g}, {high:g}{')' if below else ']'}"

    def fits(value: Any) -> bool:
        return is_number(value) and low <= value <= high and value != (high if below else math.inf)

    rules = ((expected, fits),)
    return Kind(float, (*rules, (above, lambda value: value > low)) if above else rules)


def choice(*values: Any) -> Kind:
    """One of a few names or numbers."""
    expected = f"one of {', '.join(map(str, values))}"
    return Kind(type(values[0]), ((expected, lambda value: value in values),), names=values)


def many(kind: Kind, words: str) -> Kind:
    """Several values of a kind, each of which is told in `words` when it is wrong."""
    rules = tuple((words, holds) for _, holds in kind.rules)
    return dataclasses.replace(kind, rules=rules, several=True)


def pairs(example: str) -> Kind:
    """A dict, given as several name=json such as `example`."""
    rule = f"name=json such as {example}", lambda value: isinstance(value, dict)
    return Kind(dict, (rule,), several=True, example=example)


@dataclass(frozen=True)
class Need:
    """What else must be so for an option to matter.

    Attributes:
        words: what the option applies to, as in "applies to --sample N".
        holds: whether it is so, asked of the options together.
        got: what there is otherwise, in words.
        shown: whether help and docs say so; not where it goes without saying.
    """

    words: str
    holds: Callable[[Any], bool]
    got: Callable[[Any], str] = lambda options: "none"
    shown: bool = True


@dataclass(frozen=True)
class Option:
    """What is known of an option besides its name and default.

    Attributes:
        help: one sentence or two, for the command's help and the docs.
        kind: what values it takes; None besides if `optional`.
        panel: where help and docs list it; one of `PANELS`.
        defines: "network": the network depends on it; "training": what is computed does; "apart":
            that, but checkpoints keep it by itself; "run": where to write, what to show, how to
            compute. A checkpoint's own value holds for the first three, never for the last.
        methods: the values of `--method` it applies to. Given with others it is refused, see
            `applies.py`.
        needs: what else it needs to apply.
        single: an older flag that gives the only one of several values.
        also: other flags for the same, of which the first is the one to use.
        complement: a flag for one minus the value, in (0, 1]; the one to use.
        by_default: what help and docs show in place of the default.
    """

    help: str
    kind: Kind
    panel: str
    defines: Defines = "run"
    optional: bool = False
    methods: tuple[str, ...] = METHODS
    needs: tuple[Need, ...] = ()
    single: str | None = None
    also: tuple[str, ...] = ()
    complement: str | None = None
    by_default: str | None = None

    def flags(self, name: str) -> tuple[str, ...]:
        """The flags of the option `name` that take its value."""
        return tuple(f"--{flag(one)}" for one in (*self.also, name))

    def complementary(self, name: str, default: float) -> tuple[Option, float]:
        """The option for one minus the value of `name`, and its default."""
        share = one_minus(default)
        words = f"Share of the weights that are there, in place of --{flag(name)}."
        made = dataclasses.replace(self, help=words, complement=None, by_default=f"{share:g}")
        return made, share

    def words(self) -> str:
        """The help, the names it takes, and what it applies to."""
        words = self.help
        if self.kind.names:
            words += f" One of {', '.join(map(str, self.kind.names))}."
        others = [name for name in METHODS if name not in self.methods]
        if len(others) > len(self.methods):
            words += f" With --method {listed(self.methods)}."
        elif others:
            words += f" Not with --method {listed(others)}."
        needs = [need.words for need in self.needs if need.shown]
        return words + (f" For {listed(needs)}." if needs else "")

    def default_words(self, default: Any) -> str:
        """The default as one would give it on the command line; empty for none."""
        if self.by_default is not None:
            return self.by_default
        if default is None or default is False or default == {}:
            return ""
        return " ".join(map(str, default)) if isinstance(default, tuple) else str(default)


def one_minus(share: float) -> float:
    """1 - share as somebody would write it, and not a neighbour of that."""
    return round(1 - share, 12)


def option(default: Any, help: str, kind: Kind, panel: str, **more: Any) -> Any:
    """The field of a dataclass of options; `more` are attributes of `Option`."""
    known = Option(help, kind, panel, **{"optional": default is None} | more)
    return _field(default, known)


def again(base: Any, name: str, **changes: Any) -> Any:
    """The option `name` of `base` with another `default`, or other attributes of `Option`."""
    old = base.__dataclass_fields__[name]
    default = changes.pop("default", default_of(old))
    known = dataclasses.replace(old.metadata["option"], optional=default is None, **changes)
    return _field(default, known)


def _field(default: Any, known: Option) -> Any:
    if isinstance(default, dict):
        return field(default_factory=lambda: copy.copy(default), metadata={"option": known})
    return field(default=default, metadata={"option": known})


def default_of(field: dataclasses.Field[Any]) -> Any:
    """What an option is when it is left out."""
    made = field.default_factory
    return field.default if made is dataclasses.MISSING else made()


def options_of(kind: type) -> dict[str, Option]:
    """The options of a dataclass by name, in its order."""
    return {f.name: f.metadata["option"] for f in dataclasses.fields(kind)}


def flag(name: str) -> str:
    """The flag of the option `name`, without its dashes."""
    return name.replace("_", "-")


def taking(argument: str) -> tuple[str, ...]:
    """The methods whose trainers take that argument."""
    return tuple(name for name, algorithm in BY_NAME.items() if argument in algorithm.arguments)


def listed(names: Sequence[str]) -> str:
    """a, b and c."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
