"""Curves of a record: churn, exploration and dead units."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dynsparse.report.figure import MUTED, colour_map, figure, save
from dynsparse.training.records import Records

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_NAMES = 12
_DASHED = (0, (2, 1))


def draw_curves(records: Records, path: Path) -> Path:
    """Churn, exploration and dead units of every layer over the steps, as one plot.

    Churn is the share of the connections that an update replaced; exploration the share of all
    positions that were ever active; dead inputs and outputs are those without any connection.
    """
    from matplotlib.ticker import EngFormatter, StrMethodFormatter

    names = list(records.layers)
    # Early layers dark, late layers light, so that depth can be read even where names cannot.
    shades = colour_map("viridis")(np.linspace(0.08, 0.82, len(names)))
    # Early layers have broad lines, so that both of two equal curves are seen.
    widths = np.linspace(3.2, 1.6, len(names))
    with figure(13.5, 4.2) as page:
        churn, exploration, dead = page.subplots(1, 3)
        steps = np.array(records.steps)
        for name, shade, width in zip(names, shades, widths, strict=True):
            rows, cols = records.layers[name].shape
            dead_units = records.dead_units(name)
            look = {"color": shade, "lw": width, "marker": "o" if len(steps) <= 2 else None}
            churn.plot(steps[1:], 100 * records.churn(name), label=name, **look)
            exploration.plot(steps, 100 * records.exploration(name), **look)
            dead.plot(steps, 100 * dead_units.inputs / cols, **look)
            dead.plot(steps, 100 * dead_units.outputs / rows, ls=_DASHED, **look)
        titles = {
            churn: "Connections replaced per update",
            exploration: "Positions ever active",
            dead: "Units without a connection",
        }
        for axes, title in titles.items():
            axes.set_title(title, fontweight="bold", pad=10)
            axes.set_xlabel("training step")
            axes.xaxis.set_major_formatter(EngFormatter(sep=""))
            axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}%"))
            axes.set_xlim(steps[0], max(steps[-1], steps[0] + 1))
            axes.set_ylim(0, max(1.0, 1.08 * axes.dataLim.y1))
        _name_lines(page, churn)
        save(page, path)
    return path


def _name_lines(page: Figure, source: Axes) -> None:
    """A legend of the layers (evenly chosen ones of too many) and of the line styles."""
    from matplotlib.lines import Line2D

    layers, names = source.get_legend_handles_labels()
    chosen = np.unique(np.linspace(0, len(names) - 1, min(len(names), _MOST_NAMES)).round())
    handles = [layers[int(i)] for i in chosen] + [
        Line2D([], [], ls=""),
        Line2D([], [], color=MUTED),
        Line2D([], [], color=MUTED, ls=_DASHED),
    ]
    labels = [names[int(i)] for i in chosen] + ["", "inputs", "outputs"]
    size = 10 if len(chosen) <= 4 else 8
    page.legend(handles, labels, loc="outside right upper", fontsize=size)
