"""`dynsparse bench`: speed against the alternatives, from a file of named benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynsparse._core.checks import shorten
from dynsparse._core.files.atomic_write import atomic_write_text
from dynsparse.options import (
    FILE,
    OUTPUT_FILE,
    SWITCH,
    TEXT,
    add_flags,
    check_values,
    flag,
    integer,
    list_of,
    number,
    option,
)

if TYPE_CHECKING:
    from dynsparse.bench.cells import Cell
    from dynsparse.bench.results import Results
    from dynsparse.bench.spec import Benchmark, Spec

_measured = partial(option, panel="What is measured")
_model = partial(option, panel="A model of your own")
_output = partial(option, panel="Output")

_OF_BENCHMARKS = "spec", "benchmark", "cell", "from_", "list_", "merge", "plot", "markdown"
_OF_MODELS = "density", "block_size", "batch", "sequence"


@dataclass(frozen=True)
class _Request:
    """The options of the command.

    Raises:
        ValueError: an option that is not valid, by itself or with another.
    """

    spec: Path | None = _measured(
        None, "YAML file of benchmarks; by default the one that comes with dynsparse.", FILE
    )
    benchmark: tuple[str, ...] | None = _measured(
        None, "Run only these.", list_of(TEXT, "names"), by_default="all: more than an hour"
    )
    cell: tuple[str, ...] | None = _measured(
        None,
        "Of these, run only the cells that match all of this, such as '1024, bfloat16'.",
        list_of(TEXT, "texts"),
        by_default="all",
    )
    threads: int | None = _measured(
        None, "Threads, in place of those in the file; 1 for a model.", integer(1, 1024)
    )
    from_: Path | None = _measured(None, "Measure nothing: use the figures of this file.", FILE)
    list_: bool = _measured(False, "Show the benchmarks of the file.", SWITCH)
    model: Path | None = _model(
        None,
        "Time the inference of this ONNX file in onnxruntime, in place of the benchmarks: with "
        "sparse linear layers, and dense, in float32 and int8.",
        FILE,
    )
    density: float | None = _model(
        None,
        "Share of the weights of its linear layers that are kept, the largest.",
        number(0, 1, above="a density above 0"),
        by_default="those that are sparse in the file",
    )
    block_size: int | None = _model(
        None, "Size of the blocks that are kept.", integer(1), by_default="1"
    )
    batch: tuple[int, ...] | None = _model(
        None, "Samples at once.", list_of(integer(1), "integers of at least 1"), by_default="1 8"
    )
    sequence: int | None = _model(
        None,
        "Size of the dynamic dimensions of its inputs but the first.",
        integer(1),
        by_default="128",
    )
    json: Path | None = _output(None, "Write the figures here.", OUTPUT_FILE)
    merge: bool = _output(
        False, "Keep what the --json file holds of benchmarks and cells that are not run.", SWITCH
    )
    plot: Path | None = _output(None, "Draw speed-up over density here.", OUTPUT_FILE)
    markdown: Path | None = _output(None, "Write the figures as tables here.", OUTPUT_FILE)

    def __post_init__(self) -> None:
        check_values(self)
        if self.merge and (self.json is None or self.from_):
            raise ValueError(
                "--merge adds what is measured to a --json file: give --json, not --from"
            )
        if self.from_ and self.json is not None:
            raise ValueError(
                "--json writes what is measured, and --from measures nothing: leave it out"
            )
        for name in _OF_BENCHMARKS if self.model else _OF_MODELS:
            if getattr(self, name):
                reason = "has no effect with --model" if self.model else "needs --model FILE"
                raise ValueError(f"--{flag(name)} {reason}: leave it out")
        if self.block_size and self.density is None:
            raise ValueError("--block-size is that of the weights that --density keeps: give both")
        for reason, names in (
            ("list_", ("benchmark", "cell", "threads", "from_", "json", "plot", "markdown")),
            ("from_", ("spec", "benchmark", "cell", "threads")),
        ):
            given = [f"--{flag(name)}" for name in names if getattr(self, name) is not None]
            if getattr(self, reason) and given:
                raise ValueError(f"--{flag(reason)} measures nothing: leave out {', '.join(given)}")


@add_flags(_Request)
def bench(values: dict[str, Any]) -> None:
    """Time dynsparse against the alternatives, in one process with the same threads.

    Ratios are the other's time over dynsparse's: above 1 dynsparse is faster.
    """
    request = _Request(**values)
    if request.model is not None:
        _time_model(request, request.model)
        return
    if request.plot is not None:
        from dynsparse.report.figure import need_matplotlib

        need_matplotlib()
    if request.from_:
        from dynsparse.bench.results import load_results

        results = load_results(request.from_)
    else:
        from dynsparse.bench.spec import find_spec, read_spec, select_cells

        file = find_spec() if request.spec is None else request.spec
        spec = read_spec(file)
        if request.list_:
            _show_list(spec)
            return
        chosen = spec.select(list(request.benchmark or spec.benchmarks))
        if request.cell:
            chosen = select_cells(chosen, list(request.cell))
        folder = file.resolve().parent
        results = _measure(spec, chosen, folder, request.threads, request.json, request.merge)
    with _explain_bad_figures(*([request.from_] if request.from_ else [])):
        _write_reports(results, request.plot, request.markdown)


def _time_model(request: _Request, model: Path) -> None:
    from dynsparse.bench.onnx_model import time_model
    from dynsparse.bench.results import empty_results, save_results
    from dynsparse.report.bench import describe_machine

    _print_now(describe_machine(empty_results("")))
    _print_now("Ratios: the other's time over the sparse model's; median over rounds [quartiles].")
    figures = time_model(
        model,
        density=request.density,
        block_size=request.block_size or 1,
        batches=request.batch or (1, 8),
        sequence=request.sequence or 128,
        threads=request.threads or 1,
        tell=_print_now,
    )
    if request.json is not None:
        save_results(figures, request.json)


@contextmanager
def _explain_bad_figures(*files: Path) -> Iterator[None]:
    """Turn errors about missing entries of figures read from `files` into one line."""
    try:
        yield
    except (ArithmeticError, AttributeError, IndexError, KeyError, TypeError) as error:
        if not files:
            raise
        raise ValueError(
            f"{', '.join(map(str, files))}: expected the figures that dynsparse bench writes, "
            f"got others ({type(error).__name__}: {shorten(str(error))}): measure again"
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
        merge_cells,
        save_results,
    )
    from dynsparse.bench.run import run_benchmark, set_threads
    from dynsparse.report.bench import describe_machine

    results = empty_results(spec.file)
    source: list[Path] = []
    if merge and json is not None and json.exists():
        before = load_results(json)
        source = [json]
        if before["machine"] != results["machine"]:
            raise ValueError(
                f"--merge: {json} was measured on another machine or with other versions: "
                "measure all of it again"
            )
        results["benchmarks"] = before["benchmarks"]
    _print_now(describe_machine(results))
    counts = [len(set_threads(selected.cells, threads)) for selected in chosen]
    least = sum(n * selected.effort.seconds for n, selected in zip(counts, chosen, strict=True))
    _print_now(f"{sum(counts)} cells, at least {least:.0f} s; each line shows the time left.")
    if not results["machine"]["load_known"]:
        print("This system has no /proc/stat: the load by other processes is not known.")
    print("Ratios: the other's time over the first's; median over rounds [quartiles].")
    for benchmark in chosen:
        before = results["benchmarks"].get(benchmark.name, {})
        all_cells = set_threads(spec.benchmarks[benchmark.name].cells, threads)

        def keep(
            measured: dict[str, Any],
            name: str = benchmark.name,
            before: dict[str, Any] = before,
            all_cells: list[Cell] = all_cells,
        ) -> None:
            # Written after each cell: an interrupted run keeps what it has measured.
            with _explain_bad_figures(*source):
                results["benchmarks"][name] = merge_cells(before, measured, all_cells)
            if json is not None:
                save_results(results, json)

        keep(run_benchmark(benchmark, folder, threads=threads, tell=_print_now, keep=keep))
    return results


def _print_now(line: str) -> None:
    print(line, flush=True)


def _write_reports(results: Results, plot: Path | None, markdown: Path | None) -> None:
    if markdown is not None:
        from dynsparse.report.bench import full_report

        atomic_write_text(markdown, full_report(results))
    if plot is not None:
        from dynsparse.report.bench import draw_speedups

        draw_speedups(results, plot)


def _show_list(spec: Spec) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("benchmark", no_wrap=True)
    table.add_column("cells", justify="right")
    table.add_column("what it measures")
    for benchmark in spec.benchmarks.values():
        cells = sum(len(selected.cells) for selected in spec.select([benchmark.name]))
        about = benchmark.about + (f" ({', '.join(benchmark.runs)})" if benchmark.runs else "")
        table.add_row(benchmark.name, str(cells or "-"), about)
    Console().print(table, highlight=False)
