"""`dynsparse bench`: speed beside the alternatives, by a file of named benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dynsparse.cli.values import integer
from dynsparse.files.atomic_write import atomic_write_text
from dynsparse.files.shorten import shortened

if TYPE_CHECKING:
    from dynsparse.bench.cells import Cell
    from dynsparse.bench.results import Results
    from dynsparse.bench.spec import Benchmark, Spec

_WHAT, _OUTPUT = "What is measured", "Output"


def _file(panel: str, help: str, *names: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, metavar="<file>")


def bench(
    spec: Annotated[
        Path | None,
        _file(_WHAT, "YAML file of benchmarks; by default the one that comes with dynsparse."),
    ] = None,
    benchmark: Annotated[
        list[str] | None,
        typer.Option(
            help="Run these alone.",
            rich_help_panel=_WHAT,
            metavar="<name>",
            show_default="all: more than an hour",
        ),
    ] = None,
    cell: Annotated[
        list[str] | None,
        typer.Option(
            help="Of these, run the cells of which all of this is said, as 'bert-base, bfloat16'.",
            rich_help_panel=_WHAT,
            metavar="<text>",
            show_default="all",
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            help="In place of the threads in the file.",
            rich_help_panel=_WHAT,
            parser=integer,
            metavar="<int>",
        ),
    ] = None,
    from_json: Annotated[
        Path | None, _file(_WHAT, "Measure nothing: take the figures of this file.", "--from")
    ] = None,
    list_: Annotated[
        bool,
        typer.Option("--list", help="Show the benchmarks of the file.", rich_help_panel=_WHAT),
    ] = False,
    json: Annotated[Path | None, _file(_OUTPUT, "Write the figures here.", "--json")] = None,
    merge: Annotated[
        bool,
        typer.Option(
            "--merge",
            help="Keep what the --json file holds of benchmarks and cells that are not run.",
            rich_help_panel=_OUTPUT,
        ),
    ] = False,
    picture: Annotated[Path | None, _file(_OUTPUT, "Draw speed-up over density here.")] = None,
    markdown: Annotated[Path | None, _file(_OUTPUT, "Write the figures as tables here.")] = None,
) -> None:
    """Time dynsparse beside the alternatives, in one process with the same threads.

    Ratios are the other's time over dynsparse's: above 1 dynsparse is faster.
    """
    if threads is not None and not 1 <= threads <= 1024:
        span = "at least 1" if threads < 1 else "at most 1024"
        raise ValueError(f"--threads must be {span}, got {threads}")
    if merge and (json is None or from_json):
        raise ValueError("--merge adds what is measured to a --json file: give --json, not --from")
    if list_:
        others = {"benchmark": benchmark, "cell": cell, "threads": threads, "from": from_json,
                  "json": json, "picture": picture, "markdown": markdown}  # fmt: skip
        given = [f"--{name}" for name, value in others.items() if value is not None]
        if given:
            raise ValueError(f"--list measures nothing: leave out {', '.join(given)}")
    if from_json and json is not None:
        raise ValueError(
            "--json writes what is measured, and --from measures nothing: leave it out"
        )
    for flag, file in (("json", json), ("picture", picture), ("markdown", markdown)):
        if file is not None and (file.is_dir() or not file.parent.is_dir()):
            raise ValueError(f"--{flag}: expected a file in a folder that exists, got {file}")
    if picture is not None:
        from dynsparse.report.figure import need_matplotlib

        need_matplotlib()
    if from_json:
        if spec is not None or benchmark or cell or threads is not None:
            raise ValueError(
                "--from measures nothing: leave out --spec, --benchmark, --cell and --threads"
            )
        from dynsparse.bench.results import load_results

        results = load_results(from_json)
    else:
        from dynsparse.bench.spec import find_spec, read_spec, with_cells

        file = find_spec() if spec is None else spec
        found = read_spec(file)
        if list_:
            _show_list(found)
            return
        chosen = found.select(benchmark or [b.name for b in found.benchmarks.values()])
        if cell:
            chosen = with_cells(chosen, cell)
        results = _measure(found, chosen, file.resolve().parent, threads, json, merge)
    with _figures_of(*([from_json] if from_json else [])):
        _write(results, picture, markdown)


@contextmanager
def _figures_of(*files: Path) -> Iterator[None]:
    """Figures that were read from `files` may lack anything; one line says so."""
    try:
        yield
    except (ArithmeticError, AttributeError, IndexError, KeyError, TypeError) as error:
        if not files:
            raise
        raise ValueError(
            f"{', '.join(map(str, files))}: expected the figures that dynsparse bench writes, "
            f"got others ({type(error).__name__}: {shortened(str(error))}): measure anew"
        ) from None


def _measure(
    spec: Spec,
    chosen: list[Benchmark],
    folder: Path,
    threads: int | None,
    json: Path | None,
    merge: bool,
) -> Results:
    from dynsparse.bench.results import (
        empty_results,
        load_results,
        merged,
        save_results,
        summarise,
    )
    from dynsparse.bench.run import run_benchmark, with_threads
    from dynsparse.report.bench.tables import machine_line

    results = empty_results(spec.file)
    source: list[Path] = []
    if merge and json is not None and json.exists():
        before = load_results(json)
        source = [json]
        if before["machine"] != results["machine"]:
            raise ValueError(
                f"--merge: {json} was measured on another machine or with other versions: "
                "measure all of it anew"
            )
        results["benchmarks"] = before["benchmarks"]
    print(machine_line(results))
    if not results["machine"]["load_known"]:
        print("This system has no /proc/stat: what other processes take cannot be told.")
    print("Ratios: the other's time over the first's; median over rounds [quartiles].")
    for benchmark in chosen:
        before = results["benchmarks"].get(benchmark.name, {})
        whole = with_threads(spec.benchmarks[benchmark.name].cells, threads)

        def keep(
            found: dict[str, Any],
            name: str = benchmark.name,
            before: dict[str, Any] = before,
            whole: list[Cell] = whole,
        ) -> None:
            # Written after each cell: an interrupted run keeps what it has measured.
            with _figures_of(*source):
                results["benchmarks"][name] = merged(before, found, whole)
                summarise(results)
            if json is not None:
                save_results(results, json)

        keep(run_benchmark(benchmark, folder, threads=threads, tell=_tell, keep=keep))
    return results


def _tell(line: str) -> None:
    print(line, flush=True)


def _write(results: Results, picture: Path | None, markdown: Path | None) -> None:
    if markdown is not None:
        from dynsparse.report.bench.tables import whole_report

        atomic_write_text(markdown, whole_report(results))
    if picture is not None:
        from dynsparse.report.bench.pictures import draw_speedups

        draw_speedups(results, picture)


def _show_list(spec: Spec) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("benchmark", no_wrap=True)
    table.add_column("cells", justify="right")
    table.add_column("what it measures")
    for benchmark in spec.benchmarks.values():
        cells = sum(len(one.cells) for one in spec.select([benchmark.name]))
        about = benchmark.about + (f" ({', '.join(benchmark.runs)})" if benchmark.runs else "")
        table.add_row(benchmark.name, str(cells or "-"), about)
    Console().print(table, highlight=False)
