"""The picture of `dynsparse bench`: speed-up over density, a line per block size."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dynsparse.report.figure import MUTED, colour_map, figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
            "--picture: expected training steps (measure: step) at two densities or more, got none"
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
        (c["layer"], c["batch"], c["block"], c["density"]): c
        for c in cells
        if c["threads"] == threads
    }
    panels: dict[tuple[str, int], dict[str, Series]] = {}
    for (layer, batch, block, density), cell in sorted(latest.items(), key=lambda i: i[0][2:]):
        for name in _ROWS:
            if ratio := cell["ratios"].get(name):
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
