"""`dynsparse check`."""

from __future__ import annotations

from json import dumps
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from dynsparse import __version__
from dynsparse.bench.host import describe_host
from dynsparse.options import parse_integer

if TYPE_CHECKING:
    from dynsparse.selfcheck import Check, Result


def check(
    seed: Annotated[
        int | None,
        typer.Option(
            help="Of the random shapes and numbers.",
            parser=parse_integer,
            metavar="<int>",
            show_default="drawn",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON instead.")] = False,
) -> None:
    """Compare the products of sparse layers on this machine with float64.

    Prints "Results match." and exits with 0, or lists what differs and exits with 1.
    """
    # Not for commands that check nothing.
    from dynsparse.selfcheck import run_checks

    if seed is not None and not 0 <= seed < 2**63:
        raise ValueError(f"--seed: expected an integer from 0 and below 2^63, got {seed}")
    host = describe_host()
    result = run_checks(seed)
    if json:
        print(dumps({"version": __version__, "host": host, **result.plain()}, indent=2))
    else:
        console = Console()
        console.print(
            f"dynsparse {__version__} on {host['processor']}, {host['cores']} cores; "
            f"seed {result.seed}",
            highlight=False,
        )
        console.print(_render(result), highlight=False)
    if not result.matches:
        raise typer.Exit(1)


def _render(result: Result) -> Group:
    table = Table(box=None, header_style="")
    names = list(dict.fromkeys(one.name for one in result.checks))
    table.add_column("")
    for name in names:
        table.add_column(name, justify="right")
    for where in dict.fromkeys(one.where for one in result.checks):
        row = {one.name: one for one in result.checks if one.where == where}
        cells = (_cell(row[name]) if name in row else Text("") for name in names)
        table.add_row("plain torch" if where == "none" else where, *cells)
    title = "Beside float64: the largest error, as a share of the sum of magnitudes"
    parts: list[RenderableType] = [Text(), Text(title, style="bold"), table, Text()]
    if result.matches:
        parts.append(Text("Results match.", style="bold green"))
    else:
        count = len(result.differing)
        parts.append(Text(f"Results differ in {count} of {len(result.checks)} checks:", "bold red"))
        parts += [Text(f"  {one.words()}", overflow="fold") for one in result.differing]
        parts.append(Text(f"To see the same again: dynsparse check --seed {result.seed}"))
    return Group(*parts)


def _cell(one: Check) -> Text:
    if one.said:
        return Text("error ✗", "red")
    number = f"{one.error:.0e}"
    return Text(f"{number} ✓", "green") if one.matches else Text(f"{number} ✗", "bold red")
