"""Runs benchmarks one after the other and reports each cell as it is measured."""

from __future__ import annotations

import datetime
import gc
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dynsparse._core.files.limits import parse_json
from dynsparse._core.processor import available_memory
from dynsparse.bench import contenders
from dynsparse.bench.cells import Cell, refusal
from dynsparse.bench.spec import MEASURES, Benchmark
from dynsparse.bench.timing import Work, measure
from dynsparse.nn import SparseLinear

Tell = Callable[[str], None]


def run_benchmark(
    benchmark: Benchmark,
    folder: Path,
    *,
    threads: int | None = None,
    tell: Tell = print,
    keep: Callable[[dict[str, Any]], None] = lambda measured: None,
) -> dict[str, Any]:
    """Measure one benchmark; plain types, as `results` describes them.

    Args:
        folder: where a command runs, that of the YAML file.
        threads: in place of those in the file.
        tell: called with a line for every cell.
        keep: called after every cell with what is measured so far.

    torch's number of threads is what it was afterwards.
    """
    head: dict[str, Any] = {
        "about": benchmark.about,
        "measured": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
    }
    tell(f"\n{benchmark.name}: {benchmark.about}")
    if benchmark.command:
        return {**head, **_run_command(benchmark, folder, tell)}
    assert benchmark.measure is not None
    head |= {"measure": benchmark.measure, "reference": MEASURES[benchmark.measure].reference}
    cells: list[dict[str, Any]] = []
    refused: list[dict[str, str]] = []
    before = torch.get_num_threads()
    try:
        begin, chosen = time.monotonic(), set_threads(benchmark.cells, threads)
        for number, cell in enumerate(chosen, start=1):
            why = refusal(cell, available_memory())
            if why is not None:
                tell(f"  {cell}: refused, {why}")
                refused.append({"cell": str(cell), "why": why})
                continue
            torch.set_num_threads(cell.threads)
            figures = _measure_cell(benchmark, cell)
            gc.collect()
            left = (time.monotonic() - begin) / number * (len(chosen) - number)
            threads_text = f"{cell.threads} thread{'s' * (cell.threads > 1)}"
            tell(
                f"  [{number}/{len(chosen)}] {cell}, {threads_text}: "
                f"{_format_line(benchmark, figures)}"
                + (f"; {left:.0f} s left" if number < len(chosen) else "")
            )
            cells.append({"layer": cell.layer, **_sizes(cell), **figures})
            keep({**head, "cells": cells, "refused": refused})
    finally:
        torch.set_num_threads(before)
    return {**head, "cells": cells, "refused": refused}


def set_threads(cells: tuple[Cell, ...], threads: int | None) -> list[Cell]:
    """The cells, with so many threads in place of their own where that is given."""
    if threads is None:
        return list(cells)
    return list(dict.fromkeys(replace(cell, threads=threads) for cell in cells))


def _sizes(cell: Cell) -> dict[str, Any]:
    return {**asdict(cell), "features": list(cell.features)}


def _measure_cell(benchmark: Benchmark, cell: Cell) -> dict[str, Any]:
    model, work = _BUILDERS[benchmark.measure or ""](cell, benchmark.contenders)
    timing = measure(work, MEASURES[benchmark.measure or ""].reference, benchmark.effort)
    return {"kernel": _kernels_of(model, cell, benchmark.measure != "forward"), **asdict(timing)}


_BUILDERS: dict[str, Callable[[Cell, tuple[str, ...]], tuple[nn.Module, dict[str, Work]]]] = {
    "step": contenders.build_steps,
    "forward": contenders.build_forwards,
    "network": contenders.build_network_steps,
    "update": lambda cell, _: contenders.build_update_parts(cell),
}


def _kernels_of(model: nn.Module, cell: Cell, backward: bool) -> str:
    """The kernels of dynsparse's passes by layer: forward, and backward where it differs."""
    kernels = []
    for layer in model.modules():
        if isinstance(layer, SparseLinear):
            passes = [layer.kernel(cell.batch, dtype=cell.torch_dtype)]
            if backward:
                passes.append(layer.kernel(cell.batch, backward=True, dtype=cell.torch_dtype))
            kernels.append(", ".join(dict.fromkeys(passes)))
    return "; ".join(dict.fromkeys(kernels))


def _run_command(benchmark: Benchmark, folder: Path, tell: Tell) -> dict[str, Any]:
    """`python` is this interpreter, `{json}` a file that the command writes its figures to."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "figures.json"
        words = [word.replace("{json}", str(file)) for word in benchmark.command]
        if words[0] == "python":
            words[0] = sys.executable
        try:
            process = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
        except OSError as error:
            raise ValueError(
                f"benchmark {benchmark.name!r}, command: expected a program, got "
                f"{benchmark.command[0]!r}: {error.strerror}"
            ) from None
        if process.returncode:
            last = (process.stderr.strip() or "no message").splitlines()[-1]
            raise ValueError(
                f"benchmark {benchmark.name!r}, command: expected it to end with status 0, got "
                f"{process.returncode}: {last}"
            )
        for line in process.stdout.splitlines():
            tell(f"  {line}")
        if not file.exists():
            return {"command": list(benchmark.command), "output": process.stdout}
        try:
            figures = parse_json(file.read_bytes())
        except ValueError as error:
            raise ValueError(
                f"benchmark {benchmark.name!r}, command: expected JSON in its file: {error}"
            ) from None
        return {"command": list(benchmark.command), "figures": figures}


def _format_line(benchmark: Benchmark, figures: dict[str, Any]) -> str:
    foreign = figures["foreign"]
    notes = []
    if figures["disturbed"]:
        notes.append(f"DISTURBED: others took {100 * foreign:.0f} % of the machine")
    reference = MEASURES[benchmark.measure or ""].reference
    median = figures["times"][reference]["median"]
    parts = [f"{reference} {_format_duration(median)}"]
    for name, ratio in figures["ratios"].items():
        spread = f"[{ratio['low']:.2f}-{ratio['high']:.2f}]"
        parts.append(f"{name} {ratio['median']:.2f}x {spread}")
    return "; ".join([", ".join(parts), *notes])


def _format_duration(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"
