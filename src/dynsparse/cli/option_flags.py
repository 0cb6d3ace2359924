"""The flags of a training, made from its options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Annotated, Any

import typer

from dynsparse.apps.common.option import (
    PANELS,
    Kind,
    Option,
    default_of,
    flag,
    one_minus,
    options_of,
)
from dynsparse.cli.values import arguments, integer, json_object, number

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
    annotations: dict[str, Any] = dict(first or {})
    for field in sorted(fields(kind), key=lambda f: PANELS.index(options[f.name].panel)):
        known = options[field.name]
        if known.complement is not None:
            other, share = known.complementary(field.name, default_of(field))
            annotations[known.complement] = _annotation(known.complement, other, share)
        annotations[field.name] = _annotation(field.name, known, default_of(field))
        if known.single is not None:
            one = replace(
                known, help="The same, where there is one.", kind=replace(known.kind, several=False)
            )
            annotations[known.single] = _annotation(known.single, one, None)

    def decorate(function: Command) -> Command:
        def command(**raw: Any) -> None:
            own = {name: raw.pop(name) for name in first or {}}
            values = {name: value for name, value in raw.items() if value not in (None, [])}
            for name, known in options.items():
                for other in (known.single, known.complement):
                    if other in values and name in values:
                        both = f"--{flag(other)} or --{flag(name)}"
                        raise ValueError(f"expected {both}, got both: leave one out")
                if known.single in values:
                    values[name] = [values.pop(known.single)]
                if known.complement in values:
                    values[name] = _one_minus(known.complement, values.pop(known.complement))
                if name in values:
                    values[name] = _read(known.kind, flag(name), values[name])
            function(values, set(values), **own)

        command.__name__, command.__doc__ = function.__name__, function.__doc__
        command.__annotations__ = annotations
        named = inspect.Parameter.KEYWORD_ONLY
        command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                inspect.Parameter(name, named, default=None, annotation=annotation)
                for name, annotation in annotations.items()
            ]
        )
        return command

    return decorate


def _annotation(name: str, known: Option, default: Any) -> Any:
    """What typer makes a flag of."""
    kind = known.kind
    more: dict[str, Any] = {}
    plain: Any = str if kind.plain is dict else kind.plain
    if plain in (int, float):
        more = {"parser": integer if plain is int else number, "metavar": f"<{plain.__name__}>"}
    if kind.plain is dict:
        more["metavar"] = "<name=json>" if kind.several else "<json>"
    elif kind.names and plain is str:
        more["metavar"] = "<name>"
    option = typer.Option(
        *known.flags(name),
        help=known.words(),
        rich_help_panel=known.panel,
        show_default=known.default_words(default) or False,
        **more,
    )
    whole = list[plain] if kind.several else plain
    return Annotated[whole | None, option]


def _one_minus(name: str, value: float) -> float:
    if not 0 < value <= 1:
        raise ValueError(f"--{flag(name)}: expected a number in (0, 1], got {value!r}")
    return one_minus(value)


def _read(kind: Kind, name: str, value: Any) -> Any:
    if kind.plain is not dict:
        return tuple(value) if kind.several else value
    return arguments(name, value, kind.example) if kind.several else json_object(name, value)
