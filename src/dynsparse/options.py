"""Options of commands: each is declared once, as a field of a dataclass.

From the declaration come the command's flag and help (`add_flags`), the check of its value
(`check_values`), the refusal of an option that would have no effect (`check_applies`), and the
tables of the documentation.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import operator
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from dynsparse._core.checks import is_number, shorten
from dynsparse._core.files.limits import parse_json

Defines = Literal["network", "training", "apart", "run"]


@dataclass(frozen=True)
class Kind:
    """The values that an option takes.

    Attributes:
        type: the type of one value; dict is JSON.
        rules: (expected, is_valid) pairs; each is checked only for values that pass those before
            it. `is_valid` may raise a ValueError with another message.
        is_list: whether the option takes several such values; several dicts are name=json.
        choices: the valid values, where there are few.
        example: an example of JSON, for messages.
    """

    type: type
    rules: tuple[tuple[str, Callable[[Any], bool]], ...]
    is_list: bool = False
    choices: tuple[Any, ...] = ()
    example: str = ""

    def find_violation(self, value: Any) -> tuple[str, Any] | None:
        """Return (what is expected, the wrong value) of the first rule that `value` breaks."""
        is_list = self.is_list and isinstance(value, (list, tuple))
        for expected, is_valid in self.rules:
            for item in value if is_list else [value]:
                if not is_valid(item):
                    return expected, item
        return None

    def check(self, name: str, value: Any) -> None:
        """Raise ValueError, naming the flag, for a value that breaks a rule."""
        if violation := self.find_violation(value):
            expected, wrong = violation
            shown = wrong if isinstance(wrong, os.PathLike) else repr(wrong)
            raise ValueError(f"--{name}: expected {expected}, got {shown}")


def _is_path(value: Any) -> bool:
    return isinstance(value, (str, os.PathLike))


def _is_writable(value: Any) -> bool:
    file = Path(value)
    return not file.is_dir() and file.parent.is_dir() and os.access(file.parent, os.W_OK)


TEXT = Kind(str, (("a text", _is_path),))
FILE = Kind(Path, (("a path", _is_path),))
OUTPUT_FILE = Kind(
    Path, (("a path", _is_path), ("a file in a folder that can be written", _is_writable))
)
SWITCH = Kind(bool, (("true or false", lambda value: isinstance(value, bool)),))


def _is_integer(value: Any) -> bool:
    return not isinstance(value, bool) and hasattr(value, "__index__")


def integer(least: int, most: int = 2**31 - 1, limit: str = "") -> Kind:
    """Return the kind of integers in [least, most].

    Args:
        limit: what the message for a larger integer expects.
    """
    rules = (
        (
            f"an integer of at least {least}",
            lambda v: _is_integer(v) and operator.index(v) >= least,
        ),
        (limit or f"at most {most}", lambda v: v <= most),
    )
    return Kind(int, rules)


def integer_between(least: int, most: int) -> Kind:
    """Return the kind of integers in [least, most], with one message for both ends."""
    expected = f"an integer between {least} and {most}"
    return Kind(int, ((expected, lambda v: _is_integer(v) and least <= v <= most),))


def number(low: float, high: float = math.inf, *, below: bool = False, above: str = "") -> Kind:
    """Return the kind of finite numbers in [low, high].

    Args:
        below: whether `high` is excluded.
        above: if not empty, `low` is excluded too; what the message expects then.
    """
    expected = f"a finite number of at least {low:g}"
    if high < math.inf:
        expected = f"a number in [{low:g}, {high:g}{')' if below else ']'}"

    def is_valid(value: Any) -> bool:
        return is_number(value) and low <= value <= high and value != (high if below else math.inf)

    rules = ((expected, is_valid),)
    return Kind(float, (*rules, (above, lambda value: value > low)) if above else rules)


def choice(*values: Any) -> Kind:
    """Return the kind of a few names or numbers."""
    expected = f"one of {', '.join(map(str, values))}"
    rule = expected, lambda value: value in values
    return Kind(type(values[0]), (rule,), choices=values)


def list_of(kind: Kind, words: str) -> Kind:
    """Return the kind of lists of another kind; `words` is what the message expects of each."""
    rules = tuple((words, is_valid) for _, is_valid in kind.rules)
    return dataclasses.replace(kind, rules=rules, is_list=True)


def json_object(example: str) -> Kind:
    """Return the kind of dictionaries given as JSON such as `example`."""
    return Kind(dict, (("a JSON object", lambda v: isinstance(v, dict)),), example=example)


def pairs(example: str) -> Kind:
    """Return the kind of dictionaries given as several name=json such as `example`."""
    rule = f"name=json such as {example}", lambda value: isinstance(value, dict)
    return Kind(dict, (rule,), is_list=True, example=example)


@dataclass(frozen=True)
class Need:
    """A condition on the other options without which an option has no effect.

    Attributes:
        words: what the option applies to, as in "applies to runs with --sample N".
        holds: whether a set of options fulfils the condition.
        got: the value that a set of options has instead, for messages.
        is_shown: whether help and documentation name the condition.
        is_waived: whether an option is allowed even if the condition is not fulfilled.
    """

    words: str
    holds: Callable[[Any], bool]
    got: Callable[[Any], str] = lambda options: "none"
    is_shown: bool = True
    is_waived: Callable[[Any, Option], bool] = lambda options, option: False


@dataclass(frozen=True)
class Option:
    """The declaration of an option, apart from its name and default.

    Attributes:
        help: one sentence or two, for the command's help and the documentation.
        kind: the values it takes; None besides if `optional`.
        panel: the heading under which help and documentation list it.
        defines: what the option of a training decides. "network": the network; "training": the
            figures; "apart": the same, but checkpoints store it separately; "run": where to write,
            what to show, how to compute. A checkpoint's value replaces the default of the first
            three.
        methods: the values of `method` that it applies to; all if empty.
        needs: further conditions for it to have an effect.
        also: further flags for the same option; the first is the preferred one.
        complement: a preferred flag for one minus the value, in (0, 1].
        by_default: what help and documentation show in place of the default.
    """

    help: str
    kind: Kind
    panel: str = ""
    defines: Defines = "run"
    optional: bool = False
    methods: tuple[str, ...] = ()
    needs: tuple[Need, ...] = ()
    also: tuple[str, ...] = ()
    complement: str | None = None
    by_default: str | None = None

    def flags(self, name: str) -> tuple[str, ...]:
        """Return the flags that take the value of the option `name`."""
        return tuple(f"--{flag(alias)}" for alias in (*self.also, name))

    def make_complement(self, name: str, default: float) -> tuple[Option, float]:
        """Return the option for one minus the value of `name`, and its default."""
        share = _one_minus(default)
        words = f"Share of the weights that are present, in place of --{flag(name)}."
        more: dict[str, Any] = {"complement": None, "by_default": f"{share:g}"}
        return dataclasses.replace(self, help=words, also=("densities",), **more), share

    def describe(self, methods: Sequence[str] = ()) -> str:
        """Return help, choices, and what it applies to, for a command with these `methods`."""
        words = self.help
        if self.kind.choices:
            words += f" One of {', '.join(map(str, self.kind.choices))}."
        others = [name for name in methods if self.methods and name not in self.methods]
        if len(others) > len(self.methods):
            words += f" With --method {join_words(self.methods)}."
        elif others:
            words += f" Not with --method {join_words(others)}."
        needs = [need.words for need in self.needs if need.is_shown]
        return words + (f" For {join_words(needs)}." if needs else "")

    def describe_default(self, default: Any) -> str:
        """Return the default as given on the command line; empty for none."""
        if self.by_default is not None:
            return self.by_default
        if default is None or default is False or default == {} or default is dataclasses.MISSING:
            return ""
        return " ".join(map(str, default)) if isinstance(default, tuple) else str(default)


def option(default: Any, help: str, kind: Kind, panel: str = "", **more: Any) -> Any:
    """Return a field of a dataclass of options; `more` are attributes of `Option`.

    A default of `dataclasses.MISSING` makes the option required.
    """
    return _field(default, Option(help, kind, panel, **{"optional": default is None} | more))


def override(base: Any, name: str, **changes: Any) -> Any:
    """Return the option `name` of `base` with another `default` or attributes of `Option`."""
    old = base.__dataclass_fields__[name]
    default = changes.pop("default", default_of(old))
    option = dataclasses.replace(old.metadata["option"], optional=default is None, **changes)
    return _field(default, option)


def _field(default: Any, option: Option) -> Any:
    if isinstance(default, dict):
        return field(default_factory=lambda: copy.copy(default), metadata={"option": option})
    return field(default=default, metadata={"option": option})


def default_of(field: dataclasses.Field[Any]) -> Any:
    """Return the default of a field of options; MISSING if it is required."""
    factory = field.default_factory
    return field.default if factory is dataclasses.MISSING else factory()


def options_of(options_type: type) -> dict[str, Option]:
    """Return the options of a dataclass by name, in its order."""
    return {f.name: f.metadata["option"] for f in fields(options_type) if f.metadata}


def methods_of(options_type: type) -> tuple[str, ...]:
    """Return the choices of `method`; empty if there is no such option."""
    option = options_of(options_type).get("method")
    return () if option is None else option.kind.choices


def list_options(options_type: type) -> Iterator[tuple[str, Option, Any]]:
    """Yield (name, option, default), by panel and with complements, as help and docs list them.

    The panels are in the order of the attribute `panels`, or else of the fields.
    """
    options = options_of(options_type)
    panels = list(dict.fromkeys(option.panel for option in options.values()))
    panels = list(getattr(options_type, "panels", panels))
    defaults = {f.name: default_of(f) for f in fields(options_type)}
    for name in sorted(options, key=lambda name: panels.index(options[name].panel)):
        option = options[name]
        if option.complement is not None:
            yield option.complement, *option.make_complement(name, defaults[name])
        yield name, option, defaults[name]


def flag(name: str) -> str:
    """Return the flag of the option `name`, without its dashes."""
    return name.strip("_").replace("_", "-")


def join_words(words: Sequence[str]) -> str:
    """Join words as in "a, b and c"."""
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _one_minus(share: float) -> float:
    """Return 1 - share, rounded to the decimal number and not to a neighbouring float."""
    return round(1 - share, 12)


def check_values(options: Any) -> None:
    """Raise ValueError, naming the flag, for the first value that its kind does not take."""
    for name, option in options_of(type(options)).items():
        if (value := getattr(options, name)) is not None or not option.optional:
            option.kind.check(flag(name), value)


def check_applies(options: Any, given: Collection[str]) -> None:
    """Raise ValueError for the first of the options `given` that has no effect.

    Args:
        options: all of them together.
        given: the names of the options that the user gave; defaults, and those that a preset or a
            checkpoint sets, may have no effect.
    """
    for name, option in options_of(type(options)).items():
        if name not in given:
            continue
        flags = f"--{flag(name)}" + (f", --{flag(option.complement)}" if option.complement else "")
        if option.methods and options.method not in option.methods:
            raise ValueError(
                f"{flags}: applies to --method {join_words(option.methods)}, got --method "
                f"{options.method}: leave it out"
            )
        for need in option.needs:
            if not need.holds(options) and not need.is_waived(options, option):
                raise ValueError(
                    f"{flags}: applies to {need.words}, got {need.got(options)}: leave it out"
                )


Command = Callable[..., None]


def add_flags(
    options_type: type, first: Mapping[str, Any] | None = None
) -> Callable[[Command], Command]:
    """Make f(values, **first) a command of typer with a flag for every option.

    `values` are the options that were given, by name, as `options_type` takes them. Options left
    out are absent: presets and checkpoints may have other values for them.

    Args:
        options_type: a dataclass of options.
        first: further flags, which come first: {parameter: annotation of typer}.
    """
    options, methods = options_of(options_type), methods_of(options_type)
    annotations: dict[str, Any] = dict(first or {})
    required = set()
    for name, option, default in list_options(options_type):
        annotations[name] = _annotation(name, option, default, methods)
        if default is dataclasses.MISSING:
            required.add(name)

    def decorate(function: Command) -> Command:
        def command(**raw: Any) -> None:
            extra = {name: raw.pop(name) for name in first or {}}
            values = {name: value for name, value in raw.items() if value not in (None, [])}
            for name, option in options.items():
                if option.complement in values:
                    if name in values:
                        both = f"--{flag(option.complement)} or --{flag(name)}"
                        raise ValueError(f"expected {both}, got both: leave one out")
                    share = values.pop(option.complement)
                    if not 0 < share <= 1:
                        raise ValueError(
                            f"--{flag(option.complement)}: expected a number in (0, 1], got "
                            f"{share!r}"
                        )
                    values[name] = _one_minus(share)
                if name in values:
                    values[name] = _read(option.kind, flag(name), values[name])
            function(values, **extra)

        command.__name__, command.__doc__ = function.__name__, function.__doc__
        command.__annotations__ = annotations
        empty, named = inspect.Parameter.empty, inspect.Parameter.KEYWORD_ONLY
        command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                inspect.Parameter(
                    name, named, default=empty if name in required else None, annotation=annotation
                )
                for name, annotation in annotations.items()
            ]
        )
        return command

    return decorate


def _annotation(name: str, option: Option, default: Any, methods: Sequence[str]) -> Any:
    """Return the declaration of a flag for typer."""
    import typer

    kind = option.kind
    more: dict[str, Any] = {}
    plain: Any = str if kind.type is dict else kind.type
    if plain in (int, float):
        parser = parse_integer if plain is int else parse_float
        more = {"parser": parser, "metavar": f"<{plain.__name__}>"}
    elif kind.type is dict:
        more["metavar"] = "<name=json>" if kind.is_list else "<json>"
    elif kind.choices:
        more["metavar"] = "<name>"
    elif kind.is_list:
        more["metavar"] = "<text>"
    elif plain is bool:
        more["metavar"] = " "  # a flag takes no value
    default_text = option.describe_default(default)
    annotation = typer.Option(
        *option.flags(name),
        help=option.describe(methods) + (f" Default: {default_text}." if default_text else ""),
        rich_help_panel=option.panel or None,
        show_default=False,  # typer would put it into brackets
        **more,
    )
    value = list[plain] if kind.is_list else plain
    return Annotated[value if default is dataclasses.MISSING else value | None, annotation]


def _read(kind: Kind, name: str, value: Any) -> Any:
    """Convert the value of a flag to that of the dataclass."""
    if kind.type is not dict:
        return tuple(value) if kind.is_list else value
    if not kind.is_list:
        content = _parse(value)
        if not isinstance(content, dict):
            raise ValueError(
                f"--{name}: expected a JSON object such as {kind.example}, got {shorten(value)}"
            )
        return content
    arguments = {}
    for pair in value:
        key, _, text = pair.partition("=")
        if not key or (content := _parse(text, missing := object())) is missing:
            raise ValueError(
                f"--{name}: expected name=json such as {kind.example}, got {shorten(pair)}"
            )
        arguments[key] = content
    return arguments


def _parse(text: str, otherwise: Any = None) -> Any:
    try:
        return parse_json(text)
    except ValueError:
        return otherwise


def parse_integer(text: str) -> int:
    """Parse an integer for typer; the error says what was expected."""
    return _parse_number(int, "an integer", text)


def parse_float(text: str) -> float:
    """Parse a number for typer; the error says what was expected."""
    return _parse_number(float, "a number", text)


def _parse_number(kind: type, expected: str, text: str) -> Any:
    import typer

    try:
        return kind(text)
    except ValueError:
        raise typer.BadParameter(f"expected {expected}, got {text!r}") from None
