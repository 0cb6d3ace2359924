"""The subcommands, and how an error becomes one line."""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from dynsparse import __version__
from dynsparse._core import logs
from dynsparse.cli.bench import bench
from dynsparse.cli.check import check
from dynsparse.cli.commands import cifar, lm, mnist, mnist_transformer, visualise
from dynsparse.cli.encode import encode
from dynsparse.cli.info import info
from dynsparse.cli.original import translate
from dynsparse.cli.tune import tune

_NUMBER = re.compile(r"-[\d.]")


class ListCommand(TyperCommand):
    """A command whose list options take all values up to the next option: `--densities 0.1 0.3`.

    Repeating the option does the same. The flags of the original programs are understood, too.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        names = {
            name
            for parameter in self.params
            if getattr(parameter, "multiple", False)
            for name in parameter.opts
        }
        return super().parse_args(ctx, repeat_options(translate(ctx.info_name, args), names))


def repeat_options(arguments: list[str], names: set[str]) -> list[str]:
    """`["--a", "1", "2"]` as `["--a", "1", "--a", "2"]` for every option in `names`."""
    result: list[str] = []
    option: str | None = None
    has_value = False
    for argument in arguments:
        if argument.startswith("-") and not _NUMBER.match(argument):
            name, equals, _ = argument.partition("=")
            option = name if name in names else None
            has_value = bool(equals)
        elif option is not None:
            if has_value:
                result.append(option)
            has_value = True
        result.append(argument)
    return result


_COMMANDS: dict[str, Callable[..., None]] = {
    "mnist": mnist,
    "lm": lm,
    "encode": encode,
    "mnist-transformer": mnist_transformer,
    "cifar": cifar,
    "visualise": visualise,
    "bench": bench,
    "info": info,
    "check": check,
    "tune": tune,
}

_LONGEST = 900  # characters of an error

_HELP = {"help_option_names": ["-h", "--help"]}


def _typer(**options: Any) -> typer.Typer:
    return typer.Typer(
        add_completion=False, rich_markup_mode="rich", context_settings=_HELP, **options
    )


@cache
def _added_commands() -> dict[str, EntryPoint]:
    """Commands that other packages add, by name: their entry points `dynsparse.commands`."""
    return {point.name: point for point in entry_points(group="dynsparse.commands")}


class CommandGroup(TyperGroup):
    """The commands of this package and those that other packages add, which are loaded on use."""

    def list_commands(self, ctx: Any) -> list[str]:
        added = [name for name in _added_commands() if name not in self.commands]
        return [*super().list_commands(ctx), *added]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        point = _added_commands().get(cmd_name)
        if point is not None and cmd_name not in self.commands:
            single = _typer()
            single.command(cmd_name, cls=ListCommand, context_settings=_HELP)(point.load())
            self.add_command(typer.main.get_command(single), cmd_name)
        return super().get_command(ctx, cmd_name)


app = _typer(cls=CommandGroup)
for _name, _function in _COMMANDS.items():
    app.command(_name, cls=ListCommand, context_settings=_HELP)(_function)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
) -> None:
    """Dynamic sparse training that really is sparse."""
    if version:
        print(f"dynsparse {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        run(["--help"])


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command (by default the process's own arguments) and return its exit status.

    Whatever the user can fix ends in one line on stderr and status 2. DYNSPARSE_TRACEBACK=1 shows
    where it came from.
    """
    warnings.showwarning = _show_warning
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        logs.configure()
        status = app(args=arguments, prog_name="dynsparse", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        status = 130
    except Exception as error:
        line = _describe_error(error)
        if line is None or os.environ.get("DYNSPARSE_TRACEBACK"):
            raise
        print(f"dynsparse: {line}", file=sys.stderr)
        return 2
    if status == 130:
        print("dynsparse: interrupted", file=sys.stderr)
    return status if isinstance(status, int) else 0


def _describe_error(error: Exception) -> str | None:
    """The line that tells the user what to fix; None for an error of this package."""
    if hasattr(error, "format_message"):  # an error of typer or click
        text = error.format_message().rstrip(".")
        command = getattr(getattr(error, "ctx", None), "command_path", "dynsparse")
        text = f"{text} (see {command} --help)"
    elif isinstance(error, OSError) and error.strerror:
        text = f"{error.filename or 'a file'}: {error.strerror}"
    elif isinstance(error, (ValueError, OSError, ImportError)):
        text = str(error)
    elif isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        text = "not enough memory: lower the sizes, the densities or the batch size"
    else:
        return None
    text = " ".join(text.split())
    # A value in the middle may be of any length; what was expected is at either end.
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]}...{text[-_LONGEST // 2 :]}"


def _show_warning(message: Warning | str, *details: Any, **more: Any) -> None:
    print(f"dynsparse: warning: {message}", file=sys.stderr)
