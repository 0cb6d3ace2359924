"""Options that take several values after one name, such as `--densities 0.1 0.3`."""

from __future__ import annotations

import re
from typing import Any

from typer.core import TyperCommand

_NUMBER = re.compile(r"-[\d.]")


class ListCommand(TyperCommand):
    """A command without positional arguments whose list options take every value up to the next
    option. Repeating the option does the same."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        names = {
            name
            for parameter in self.params
            if getattr(parameter, "multiple", False)
            for name in parameter.opts
        }
        return super().parse_args(ctx, spread(args, names))


def spread(arguments: list[str], names: set[str]) -> list[str]:
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
