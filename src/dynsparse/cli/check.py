"""`dynsparse check`."""

from __future__ import annotations

import os
from json import dumps
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from dynsparse import __version__
from dynsparse.bench.host import describe_host
from dynsparse.options import parse_integer

if TYPE_CHECKING:
    from dynsparse.selfcheck import Check

_WIDTH = 26  # of a column


def check(
    seed: Annotated[
        int | None,
        typer.Option(
            help="Seed of the random shapes and numbers.",
            parser=parse_integer,
            metavar="<int>",
            show_default="drawn",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON instead.")] = False,
) -> None:
    """Compare the products of sparse layers on this machine with float64.

    Takes a few seconds, and prints a line for each instruction set as it is checked; then "Results
    match." and exits with 0, or lists what differs and exits with 1.
    """
    # Imported here, as other commands do not need it.
    from dynsparse.selfcheck import PASSES, run_checks

    if seed is not None and not 0 <= seed < 2**63:
        raise ValueError(f"--seed: expected an integer from 0 and below 2^63, got {seed}")
    if seed is None:
        seed = int.from_bytes(os.urandom(4), "little")
    host = describe_host()
    if json:
        result = run_checks(seed)
        print(dumps({"version": __version__, "host": host, **result.plain()}, indent=2))
    else:
        console = Console(highlight=False, soft_wrap=True)
        machine = f"{host['processor']}, {host['cores']} cores"
        console.print(f"dynsparse {__version__} on {machine}; seed {seed}")
        console.print("Against float64: the largest error, as a share of the sum of magnitudes")
        console.print(_row("", [Text(name.rjust(_WIDTH)) for name in PASSES]))
        result = run_checks(
            seed,
            lambda where, checks: console.print(
                _row(
                    "plain torch" if where == "none" else where, [_cell(entry) for entry in checks]
                )
            ),
        )
        if result.matches:
            console.print("Results match.", style="bold green")
        else:
            count = f"{len(result.differing)} of {len(result.checks)}"
            console.print(f"Results differ in {count} checks:", style="bold red")
            for entry in result.differing:
                console.print(f"  {entry.words()}", markup=False)
            console.print(f"To reproduce: dynsparse check --seed {seed}")
    if not result.matches:
        raise typer.Exit(1)


def _row(name: str, cells: list[Text]) -> Text:
    return Text(name.ljust(14)).append_text(Text().join(cells))


def _cell(check: Check) -> Text:
    words = "error" if check.message else f"{check.error:.0e}"
    mark, colour = ("✓", "green") if check.matches else ("✗", "red")
    return Text(f"{words} {mark}".rjust(_WIDTH), colour)
