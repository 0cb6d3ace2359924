"""One option, written once: from it come its check, its flag, its part in resuming, its docs."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from dynsparse.apps.common.kinds import Kind
from dynsparse.training.algorithms import BY_NAME

__all__ = [
    "METHODS",
    "PANELS",
    "Defines",
    "Option",
    "again",
    "default_of",
    "default_text",
    "flag",
    "option",
    "options_of",
    "taking",
]

METHODS = (*BY_NAME, "dense")
"""What `--method` takes: every algorithm, and the same network dense."""

PANELS = (
    "Data", "Network", "Sparsity", "Training", "Learning rate", "Text", "Checkpoints", "Output",
)  # fmt: skip

Defines = Literal["network", "training", "apart", "run"]


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
        methods: the values of `--method` it matters for; all where None.
        check: raises ValueError, called as check(flag, value), for what the kind does not see.
        single: an older flag that gives the only one of several values.
        by_default: what help and docs show in place of the default.
    """

    help: str
    kind: Kind
    panel: str
    defines: Defines = "run"
    optional: bool = False
    methods: tuple[str, ...] | None = None
    check: Callable[[str, Any], None] | None = None
    single: str | None = None
    by_default: str | None = None

    @property
    def for_methods(self) -> str:
        """With which methods it matters, in a few words."""
        named = self.methods or METHODS
        others = [name for name in METHODS if name not in named]
        if not others:
            return ""
        if len(others) <= len(named):
            return f"Not with {_listed(others)}."
        return f"With {_listed(named)}."

    def check_value(self, name: str, value: Any) -> None:
        """Raise ValueError, naming the flag of the option `name`, for a value it does not take."""
        if value is None and self.optional:
            return
        self.kind.check(flag(name), value)
        if self.check is not None:
            self.check(flag(name), value)


def option(default: Any, help: str, kind: Kind, panel: str, **more: Any) -> Any:
    """The field of a dataclass of options; `more` are attributes of `Option`."""
    more.setdefault("optional", default is None)
    return _field(default, Option(help, kind, panel, **more))


def again(base: Any, name: str, **changes: Any) -> Any:
    """The option `name` of `base` with another `default`, or other attributes of `Option`."""
    old = base.__dataclass_fields__[name]
    known: Option = old.metadata["option"]
    default = changes.pop("default", default_of(old))
    if default is not None and known.optional:
        changes.setdefault("optional", False)
    return _field(default, dataclasses.replace(known, **changes))


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


def default_text(default: Any) -> str:
    """A default as one would give it on the command line; empty for none."""
    if isinstance(default, (list, tuple)):
        return " ".join(map(str, default))
    return "" if default is None or default == {} else f"{default}"


def flag(name: str) -> str:
    """The flag of the option `name`, without its dashes."""
    return name.replace("_", "-")


def taking(argument: str) -> tuple[str, ...]:
    """The methods whose trainers take that argument."""
    return tuple(name for name, algorithm in BY_NAME.items() if argument in algorithm.arguments)


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
