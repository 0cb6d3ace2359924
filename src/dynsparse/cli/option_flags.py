"""The flags of a training, made from its options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from dynsparse.apps.common.kinds import (
    Choice,
    File,
    Integer,
    Json,
    Kind,
    Many,
    Number,
    Pairs,
    Switch,
)
from dynsparse.apps.common.option import PANELS, Option, default_of, default_text, flag, options_of
from dynsparse.cli.values import arguments, integer, json_object, number

__all__ = ["with_flags"]

# A longer metavar would leave no room for the flags' own names.
_WIDEST = 16

Command = Callable[..., None]


def with_flags(kind: type, first: Mapping[str, Any] | None = None) -> Callable[[Command], Command]:
    """Make f(values, given, **first) a command with a flag for every option of `kind`.

    `values` are the options that were given, as `kind` takes them, `given` their names. A flag that
    is left out is not there: presets and checkpoints may have their own value for it.

    Args:
        kind: a dataclass of options (see `apps.common.option`).
        first: flags of the command's own, which come first: {parameter: annotation of typer}.
    """
    options = options_of(kind)
    defaults = {field.name: default_of(field) for field in fields(kind)}
    annotations: dict[str, Any] = dict(first or {})
    for name in sorted(options, key=lambda name: PANELS.index(options[name].panel)):
        known = options[name]
        annotations[name] = _annotation(known, defaults[name], f"--{flag(name)}")
        if known.single is not None:
            assert isinstance(known.kind, Many)
            one = Option(f"The same, where it is one: {known.help}", known.kind.each, known.panel)
            annotations[known.single] = _annotation(one, None, f"--{flag(known.single)}")

    def decorate(function: Command) -> Command:
        def command(**raw: Any) -> None:
            own = {name: raw.pop(name) for name in first or {}}
            values = {name: value for name, value in raw.items() if value not in (None, [])}
            for name, known in options.items():
                if known.single in values:
                    if name in values:
                        one, several = flag(known.single), flag(name)
                        raise ValueError(
                            f"expected --{one} or --{several}, got both: leave one out"
                        )
                    values[name] = [values.pop(known.single)]
                if name in values:
                    values[name] = _read(known.kind, flag(name), values[name])
            function(values, set(values), **own)

        command.__name__, command.__doc__ = function.__name__, function.__doc__
        command.__annotations__ = annotations
        command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                inspect.Parameter(
                    name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
                )
                for name, annotation in annotations.items()
            ]
        )
        return command

    return decorate


def _annotation(known: Option, default: Any, name: str) -> Any:
    plain, more = _plain(known.kind)
    shown = known.by_default or (default_text(default) if plain is not bool else "")
    help = known.help
    if isinstance(known.kind, Choice) and "metavar" not in more:
        help = f"{help} {known.kind.expected.capitalize()}."
        more["metavar"] = "<name>"
    if known.methods is not None:
        help = f"{help} {known.for_methods}"
    option = typer.Option(
        name, help=help, rich_help_panel=known.panel, show_default=shown or False, **more
    )
    return Annotated[plain | None, option]


def _plain(kind: Kind) -> tuple[Any, dict[str, Any]]:
    """The type of one value on the command line, and how typer reads and names it."""
    match kind:
        case Switch():
            return bool, {}
        case Many():
            plain, more = _plain(kind.each)
            return list[plain], more  # type: ignore[valid-type]
        case Pairs():
            return list[str], {"metavar": "<name=json>"}
        case Json():
            return str, {"metavar": "<json>"}
        case Integer():
            return int, {"parser": integer, "metavar": "<int>"}
        case Number():
            return float, {"parser": number, "metavar": "<float>"}
        case Choice():
            names = "|".join(map(str, kind.values))
            more = {"metavar": names} if len(names) <= _WIDEST else {}
            if isinstance(kind.values[0], int):
                return int, {"parser": integer, **more}
            return str, more
        case File():
            return Path, {}
    return str, {}


def _read(kind: Kind, name: str, value: Any) -> Any:
    match kind:
        case Pairs():
            return arguments(name, value, kind.example)
        case Json():
            return json_object(name, value)
        case Many():
            return tuple(value)
    return value
