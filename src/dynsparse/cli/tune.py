"""`dynsparse tune`."""

from __future__ import annotations

from json import dumps
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from dynsparse.ops.linear import measured
from dynsparse.ops.linear.tables import shipped


def tune(
    quick: Annotated[
        bool, typer.Option("--quick", help="Under two seconds rather than under a minute.")
    ] = False,
    reset: Annotated[
        bool,
        typer.Option("--reset", help="Measure nothing: go back to the table that came along."),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON instead.")] = False,
) -> None:
    """Measure what the kernels cost on this processor, so that later runs choose among them by it.

    Do it when nothing else runs. It changes which kernels compute in the processes to come, and so
    the last bits of their results.
    """
    if reset:
        if quick:
            raise ValueError("--reset measures nothing: leave out --quick")
        removed = measured.forget_measured()
        words = "removed what was measured" if removed else "nothing was measured"
        facts = {"removed": removed, "table": shipped().name}
        print(dumps(facts, indent=2) if json else f"{words}; the table {shipped().name} serves")
        return
    # Not for commands that measure nothing.
    from rich.progress import Progress

    from dynsparse.ops.linear import tuning

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("measuring kernels", total=None)
        found = tuning.tune(
            quick, lambda done, cells: progress.update(task, completed=done, total=cells)
        )
    name = measured.here()["processor"]
    if json:
        costs = measured.to_plain(found.costs)
        print(dumps({"processor": name, **vars(found), "costs": costs}, indent=2))
    else:
        Console().print(_screen(name, found), highlight=False, soft_wrap=True)


def _screen(processor: str, found: measured.Measured) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", justify="right")
    table.add_column()
    above = found.above
    for name, value in {
        "processor": processor,
        "error of a time": f"{found.error:.0%}",
        "over the best kind": f"{above['shipped']:.1%} by the table {shipped().name}, "
        f"{above['measured']:.1%} by what was measured",
        "in force": "from the next process on" if found.in_force else f"no: {found.because}",
    }.items():
        table.add_row(name, value)
    return table
