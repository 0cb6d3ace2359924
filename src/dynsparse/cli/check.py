"""`dynsparse check`."""

from __future__ import annotations

from collections.abc import Iterable
from json import dumps
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from dynsparse import __version__
from dynsparse.bench.host import describe_host
from dynsparse.cli.values import integer

if TYPE_CHECKING:
    from dynsparse.selfcheck import Check, Result, Speed

__all__ = ["check"]

_HEADS = {"none": "plain torch"}


def check(
    seed: Annotated[
        int | None,
        typer.Option(
            help="Of the random shapes and numbers.",
            parser=integer,
            metavar="<int>",
            show_default="drawn",
        ),
    ] = None,
    speeds: Annotated[
        bool, typer.Option("--speeds/--no-speeds", help="Measure memory and arithmetic, too.")
    ] = True,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON instead.")] = False,
) -> None:
    """Compare all that computes on this machine with float64, and measure the machine.

    Ends with "Results match." and exit status 0, or says what differs and ends with 1.
    """
    # Not for commands that check nothing.
    from dynsparse.selfcheck import run_checks

    if seed is not None and not 0 <= seed < 2**63:
        raise ValueError(f"--seed: expected an integer from 0 and below 2^63, got {seed}")
    host = describe_host()
    console = Console(stderr=json)
    with console.status("checking") as status:
        result = run_checks(
            seed, speeds=speeds, tell=lambda words: status.update(f"checking {words}")
        )
    if json:
        print(dumps({"version": __version__, "host": host, **result.plain()}, indent=2))
    else:
        console = Console()
        console.print(
            f"dynsparse {__version__} on {host['processor']}, {host['cores']} cores; "
            f"seed {result.seed}",
            highlight=False,
        )
        console.print(_screen(result), highlight=False)
    if not result.matches:
        raise typer.Exit(1)


def _screen(result: Result) -> Group:
    parts: list[RenderableType] = []
    by_part: dict[str, list[Check]] = {}
    for one in result.checks:
        by_part.setdefault(one.part, []).append(one)
    for part, checks in by_part.items():
        parts += [Text(), Text(_TITLES[part], style="bold"), _errors(checks)]
    if result.speeds:
        parts += [Text(), Text("What was reached", style="bold"), _speeds(result.speeds)]
    parts.append(Text())
    if result.matches:
        parts.append(Text("Results match.", style="bold green"))
    else:
        count = len(result.differing)
        parts.append(Text(f"Results differ in {count} of {len(result.checks)} checks:", "bold red"))
        parts += [Text(f"  {one.words()}", overflow="fold") for one in result.differing]
        parts.append(Text(f"To see the same again: dynsparse check --seed {result.seed}"))
    return Group(*parts)


_TITLES = {
    "kernels": "Kernels beside float64: the largest error, as a share of the sum of magnitudes",
    "threads": "Numbers of threads: results that differ from those of one thread",
    "gpu": "GPUs beside float64: the largest error, as a share of the sum of magnitudes",
    "tile machine": "The tile machine: words that are not what was written or sent",
}


def _errors(checks: Iterable[Check]) -> Table:
    """A row for what was computed, a column for where."""
    worst: dict[str, dict[str, Check]] = {}
    for one in checks:
        row = worst.setdefault(one.name, {})
        known = row.get(one.where)
        if known is None or (known.matches, -known.error) > (one.matches, -one.error):
            row[one.where] = one
    places = list(dict.fromkeys(where for row in worst.values() for where in row))
    # Those of one kind of blocks together, in the order of their first.
    kinds = list(dict.fromkeys(name.partition(":")[0] for name in worst))
    table = Table(box=None, header_style="")
    table.add_column("")
    for where in places:
        table.add_column(_HEADS.get(where, where), justify="right")
    for name, row in sorted(worst.items(), key=lambda one: kinds.index(one[0].partition(":")[0])):
        table.add_row(name, *(_cell(row.get(where)) for where in places))
    return table


def _cell(one: Check | None) -> Text:
    if one is None:
        return Text("")
    if one.said:
        return Text("error ✗", "red")
    whole = one.tolerance == 0 or one.error == 0
    number = f"{one.error:.0f}" if whole else f"{one.error:.0e}"
    return Text(f"{number} ✓", "green") if one.matches else Text(f"{number} ✗", "bold red")


def _speeds(speeds: Iterable[Speed]) -> Table:
    table = Table(box=None, header_style="")
    table.add_column("")
    table.add_column("")
    for head in ("threads", "", ""):
        table.add_column(head, justify="right")
    for one in speeds:
        table.add_row(one.where, one.name, str(one.threads), f"{one.value:,.1f}", one.unit)
    return table
