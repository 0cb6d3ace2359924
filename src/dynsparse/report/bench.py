"""Markdown tables and the plot of the results of `dynsparse bench`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dynsparse.report.figure import MUTED, colour_map, figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes


Figures = dict[str, Any]

NAMES = {
    "masked": "masked dense",
    "dense": "dense",
    "masked_medium": 'masked dense at "medium"',
    "dense_medium": 'dense at "medium"',
    "mkl": "MKL's sparse products",
    "bsr": "torch BSR",
    "scipy": "SciPy (1 thread)",
    "one_thread": "dynsparse on 1 thread",
    "dynsparse": "dynsparse",
}
"""The contenders in the order of columns, and what these are called."""

_PARTS = {
    "drop": "ranking to drop",
    "growth": "growth",
    "dense_topk": "growth by dense gradient and top-k",
    "rewiring": "rewiring",
    "encoding": "encoding",
}


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def machine_name(results: Figures) -> str:
    """The processor and its cores: the name of a machine in a table."""
    machine = results["machine"]
    return f"{machine['processor']}, {machine['cores']} cores"


def describe_machine(results: Figures) -> str:
    """The machine of the figures, in one sentence."""
    machine = results["machine"]
    versions = {**machine["versions"], "Python": machine["python"]}.items()
    parts = [f"{name} {version}" for name, version in versions]
    kernels = f"kernels for {machine['isa']}" if machine["kernels"] == "native" else "plain torch"
    mkl = "MKL" if machine["mkl"] else "no MKL"
    return f"{machine_name(results)}, {machine['system']}; {kernels}; {', '.join([*parts, mkl])}."


def _format_ratio(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 2 else f"{ratio:.1f}"


def format_range(middle: float, low: float, high: float) -> str:
    return f"{_format_ratio(middle)} ({_format_ratio(low)} to {_format_ratio(high)})"


def format_spread(figure: dict[str, float] | None, mark: str = "") -> str:
    if figure is None:
        return ""
    return format_range(figure["median"], figure["low"], figure["high"]) + mark


def size_columns(cells: list[Figures]) -> tuple[list[str], Callable[[Figures], list[str]]]:
    """The columns of the sizes; block, threads and dtype only where cells differ in them."""
    keys = ["layer", "batch", "density"]
    keys += [k for k in ("block", "threads", "dtype") if len({cell[k] for cell in cells}) > 1]

    def texts(cell: Figures) -> list[str]:
        return [f"{cell[key]:g}" if key == "density" else f"{cell[key]}" for key in keys]

    return ["features", *keys[1:]], texts


def _speedups(results: Figures, names: list[str]) -> str:
    """Every cell, with the ratio of every contender, and the kernels where not all are sparse."""
    cells = collect_cells(results, names)
    head, sizes = size_columns(cells)
    chosen = any(cell["kernel"] != "sparse" for cell in cells)
    who = [name for name in NAMES if any(name in cell["ratios"] for cell in cells)]
    rows = [
        [
            *sizes(cell),
            *[format_spread(cell["ratios"].get(name), "\\*" * cell["disturbed"]) for name in who],
            *[cell["kernel"]] * chosen,
        ]
        for cell in cells
    ]
    head += [*[NAMES[name] for name in who], *["kernels"] * chosen]
    return table(head, rows) + footnotes(results, names, cells)


def footnotes(results: Figures, names: list[str], cells: list[Figures]) -> str:
    lines = []
    if any(cell.get("disturbed") for cell in cells):
        lines.append("\\* others took part of the machine in every attempt.")
    refused = [
        f"{refusal['cell']}: {refusal['why']}."
        for n in names
        for refusal in results["benchmarks"][n]["refused"]
    ]
    if refused:
        lines.append(f"Not measured: {' '.join(refused)}")
    return "".join(f"\n\n{line}" for line in lines)


def _updates(results: Figures, names: list[str]) -> str:
    """Costs in training steps, and the share of an update every 100 steps."""
    cells = collect_cells(results, names)
    head, sizes = size_columns(cells)
    rows = []
    for cell in cells:
        extra = {
            key: cell["ratios"]["step_with_update"][key] - 1 for key in ("median", "low", "high")
        }
        shares = [f"{100 * extra[key] / (100 + extra[key]):.1f}" for key in extra]
        parts = [f"{cell['ratios'][name]['median']:.2f}" for name in _PARTS]
        share = f"{shares[0]} % ({shares[1]} to {shares[2]})"
        mark = "\\*" * cell["disturbed"]
        rows.append([*sizes(cell), *parts, f"{format_spread(extra)}{mark}", share])
    columns = [*_PARTS.values(), "whole update", "share of training, every 100 steps"]
    return table([*head, *columns], rows) + footnotes(results, names, cells)


def _command(results: Figures, names: list[str]) -> str:
    """The output or the figures of a command, as they are."""
    texts = []
    for name in names:
        benchmark = results["benchmarks"][name]
        texts.append(str(benchmark.get("output") or benchmark.get("figures")))
    return "\n\n".join(f"```\n{text.rstrip()}\n```" for text in texts)


def describe_measurement(results: Figures, names: list[str]) -> str:
    """When, where and with what: of the benchmarks `names`, or of all."""
    benchmarks = [results["benchmarks"][name] for name in names] or results["benchmarks"].values()
    days = sorted({benchmark["measured"] for benchmark in benchmarks})
    when = " to ".join(dict.fromkeys([days[0], days[-1]])) if days else "never"
    return f"Measured {when} on: {describe_machine(results)}"


VIEWS: dict[str, Callable[[Figures, list[str]], str]] = {
    "speed-up": _speedups,
    "updates": _updates,
    "command": _command,
}
"""How benchmarks are shown: view(results, names) -> Markdown."""


def full_report(results: Figures) -> str:
    """A report of all results in Markdown, with a section for each benchmark."""
    parts = ["# dynsparse bench", describe_measurement(results, [])]
    for name, benchmark in results["benchmarks"].items():
        view = {"update": "updates", None: "command"}.get(benchmark.get("measure"), "speed-up")
        parts += [f"## {name}", benchmark["about"], VIEWS[view](results, [name])]
    return "\n\n".join(parts) + "\n"


def collect_cells(results: Figures, names: list[str]) -> list[Figures]:
    return [cell for name in names for cell in results["benchmarks"][name]["cells"]]


_ROWS = {"masked": "masked dense", "dense": "dense"}
_MOST_PANELS = 4

Series = dict[int, list[tuple[float, dict[str, float]]]]
"""block -> (density, spread of the ratio), sparse first."""


def draw_speedups(results: dict[str, Any], path: Path) -> Path:
    """Panels by layer and batch, those with the most densities; over masked dense and over dense.

    Bands are quartiles over rounds. Only float32 training steps are drawn, of the largest number
    of threads measured.

    Raises:
        ValueError: no training step was measured at two densities.
    """
    panels = _panels(results)
    if not panels:
        raise ValueError(
            "--plot: expected training steps (measure: step) at two densities or more, got none"
        )
    blocks = sorted(
        {block for series_of in panels.values() for s in series_of.values() for block in s}
    )
    shades = colour_map("viridis")(np.linspace(0.05, 0.85, len(blocks)))
    colours = dict(zip(blocks, shades, strict=True))
    rows = [name for name in _ROWS if any(series_of.get(name) for series_of in panels.values())]
    with figure(3.6 * len(panels) + 1.6, 3.3 * len(rows)) as page:
        grid = page.subplots(len(rows), len(panels), sharex=True, sharey="row", squeeze=False)
        for name, line in zip(rows, grid, strict=True):
            for ((layer, batch), series_of), axes in zip(panels.items(), line, strict=True):
                _draw(axes, series_of.get(name, {}), colours)
                if name == rows[0]:
                    axes.set_title(f"{layer} features, batch {batch}", fontweight="bold", pad=8)
                if name == rows[-1]:
                    axes.set_xlabel("density")
            line[0].set_ylabel(f"speed-up over {_ROWS[name]}")
        handles = {
            label: handle
            for axes in grid.flat
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        labels = [text for text in (_label(block) for block in blocks) if text in handles]
        page.legend([handles[text] for text in labels], labels, loc="outside right center")
        save(page, path)
    return path


def _label(block: int) -> str:
    return "elements" if block == 1 else f"block {block}"


def _panels(results: dict[str, Any]) -> dict[tuple[str, int], dict[str, Series]]:
    """(layer, batch) -> contender -> series."""
    steps = [b for b in results["benchmarks"].values() if b.get("measure") == "step"]
    cells = [c for b in steps for c in b["cells"] if c["dtype"] == "float32"]
    threads = max((cell["threads"] for cell in cells), default=0)
    latest = {
        (name, c["layer"], c["batch"], c["block"], c["density"]): c["ratios"][name]
        for c in cells
        for name in _ROWS
        if c["threads"] == threads and name in c["ratios"]
    }
    panels: dict[tuple[str, int], dict[str, Series]] = {}
    in_order = sorted(latest.items(), key=lambda item: item[0][3:])
    for (name, layer, batch, block, density), ratio in in_order:
        series = panels.setdefault((layer, batch), {}).setdefault(name, {})
        series.setdefault(block, []).append((density, ratio))
    sizes = {key: _count(parts.values()) for key, parts in panels.items()}
    best = sorted((key for key in panels if sizes[key]), key=lambda key: -sizes[key])[:_MOST_PANELS]
    order = list(panels)
    return {key: panels[key] for key in sorted(best, key=order.index)}


def _count(parts: Iterable[Series]) -> int:
    """How many points stand on lines of two densities or more."""
    return sum(len(line) for series in parts for line in series.values() if len(line) > 1)


def _draw(axes: Axes, series: Series, colours: dict[int, Any]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    for block, line in series.items():
        if len(line) < 2:
            continue
        densities = [density for density, _ in line]
        axes.plot(
            densities,
            [ratio["median"] for _, ratio in line],
            color=colours[block],
            marker="o",
            ms=4,
            label=_label(block),
        )
        axes.fill_between(
            densities,
            [ratio["low"] for _, ratio in line],
            [ratio["high"] for _, ratio in line],
            color=colours[block],
            alpha=0.15,
            lw=0,
        )
    axes.axhline(1, color=MUTED, lw=1.2, ls=(0, (4, 2)))
    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_locator(NullLocator())
