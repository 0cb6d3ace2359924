"""`dynsparse tune`."""

from __future__ import annotations

from json import dumps
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from dynsparse.ops.linear import cost_table


def tune(
    quick: Annotated[
        bool, typer.Option("--quick", help="Under two seconds rather than under a minute.")
    ] = False,
    reset: Annotated[
        bool,
        typer.Option("--reset", help="Measure nothing: go back to the supplied table."),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON instead.")] = False,
) -> None:
    """Measure the kernels on this processor, so that later runs choose the fastest.

    Run it when nothing else runs. It changes which kernels later processes use, and so the last
    bits of their results.
    """
    if reset:
        if quick:
            raise ValueError("--reset measures nothing: leave out --quick")
        removed = cost_table.delete_measurement()
        words = "removed what was measured" if removed else "nothing was measured"
        table = cost_table.default_table().name
        facts = {"removed": removed, "table": table}
        print(dumps(facts, indent=2) if json else f"{words}; the table {table} is in use")
        return
    # Imported here, as --reset does not need it.
    from rich.progress import Progress

    from dynsparse.ops.linear import tuning

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("measuring kernels", total=None)
        result = tuning.tune(
            quick, lambda done, cells: progress.update(task, completed=done, total=cells)
        )
    name = cost_table.environment()["processor"]
    if json:
        print(dumps({"processor": name, **vars(result)}, indent=2))
    else:
        Console().print(_render(name, result), highlight=False, soft_wrap=True)


def _render(processor: str, result: cost_table.Measurement) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", justify="right")
    table.add_column()
    default = cost_table.default_table().name
    excess = result.excess
    for name, value in {
        "processor": processor,
        "mean error of predicted times": f"{result.error:.0%}",
        "time lost to wrong choices": f"{excess['measured']:.1%}, and {excess['default']:.1%} with "
        f"the supplied table ({default})",
        "takes effect": "in the next process" if result.enabled else f"no: {result.reason}",
    }.items():
        table.add_row(name, value)
    return table
