"""Figures of the layers of a model or of a record: `dynsparse.report.plot`."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from dynsparse._core.checks import check_types
from dynsparse.nn import SparseLinear
from dynsparse.pattern import SparsePattern
from dynsparse.report.figure import MUTED, figure, need_matplotlib
from dynsparse.training import SparseTrainer
from dynsparse.training.records import Records

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BLUE, _ORANGE = "#3b6fb6", "#d9822b"
_NAMED = 40  # largest number of layers that are all labelled
_LINES = 6  # largest number of layers whose curves are distinguishable
_CELLS = 256  # largest number of cells along each side of a matrix


@check_types
def plot(source: Any, what: str = "density", *, layer: str | None = None) -> Any:
    """A matplotlib `Figure`, independent of pyplot; notebooks display it, `savefig` writes it.

    | what | shows |
    |---|---|
    | "density" | the density of each layer, and that of all layers |
    | "connectivity" | the connections of one layer, and their number for each feature |
    | "dead units" | the fraction of features without connections, by layer |
    | "churn" | the fraction of connections that each update replaced, by layer; for records only |

    Args:
        source: a model, a trainer, `Records`, or the folder of a record, whose last patterns are
            shown.
        what: one of these.
        layer: the layer of "connectivity"; defaults to the first.

    Raises:
        TypeError: another source; "churn" without a record.
        ValueError: another `what`; an unknown layer, or a layer for a figure of all layers; a model
            without sparse layers.
        RecordError, OSError: a folder without a readable record.
        ImportError: matplotlib is not installed.
    """
    if what not in _FIGURES:
        raise ValueError(f"what must be one of {', '.join(map(repr, _FIGURES))}, got {what!r}")
    if layer is not None and what != "connectivity":
        raise ValueError(f"{what!r} shows all layers: leave layer out, got {layer!r}")
    if isinstance(source, (str, os.PathLike)):
        source = Records.load(source)
    if what == "churn":
        if not isinstance(source, Records):
            raise TypeError(
                "churn needs a record: expected Records or the folder of a record, got "
                f"{type(source).__name__}"
            )
        need_matplotlib()
        return _add_png(_churn(source))
    patterns = _patterns(source)
    need_matplotlib()
    if what != "connectivity":
        return _add_png(_FIGURES[what](patterns))
    name = next(iter(patterns)) if layer is None else layer
    if name not in patterns:
        raise ValueError(
            f"layer must be one of {', '.join(map(repr, [*patterns][:8]))}"
            f"{', ...' if len(patterns) > 8 else ''}, got {name!r}"
        )
    return _add_png(_connectivity(name, patterns[name]))


def _add_png(page: Figure) -> Figure:
    """Let notebooks display the figure even without pyplot; returns it."""

    def png() -> bytes:
        buffer = io.BytesIO()
        page.savefig(buffer, format="png")
        return buffer.getvalue()

    vars(page)["_repr_png_"] = png
    return page


def _patterns(source: Any) -> dict[str, SparsePattern]:
    if isinstance(source, Records):
        return {name: source.pattern(name, -1) for name in source.layers}
    if isinstance(source, SparseTrainer):
        return {name: layer.pattern for name, layer in source.layers.items()}
    if not isinstance(source, nn.Module):
        raise TypeError(
            "expected a model, a trainer, Records or the folder of a record, got "
            f"{type(source).__name__}"
        )
    layers = {n: m.pattern for n, m in source.named_modules() if isinstance(m, SparseLinear)}
    if not layers:
        raise ValueError("the model has no sparse layers to show: use dynsparse.sparsify")
    return layers


def _density(patterns: Mapping[str, SparsePattern]) -> Figure:
    shares = np.array([p.density for p in patterns.values()])
    total = sum(p.total * p.block_size**2 for p in patterns.values())
    overall = sum(p.nnz * p.block_size**2 for p in patterns.values()) / max(1, total)
    with _bars([*patterns]) as (page, axes, bar, places):
        bar(places, shares, 0.8, color=_BLUE)
        line = axes.axvline if len(patterns) <= _NAMED else axes.axhline
        line(overall, color=_ORANGE, linewidth=1.5)
        axes.set_title(f"Density by layer; together {overall:.3g}")
    return page


def _dead_units(patterns: Mapping[str, SparsePattern]) -> Figure:
    dead = np.array([_dead_shares(pattern) for pattern in patterns.values()]).reshape(-1, 2)
    with _bars([*patterns]) as (page, axes, bar, places):
        bar(places - 0.2, dead[:, 0], 0.4, color=_BLUE, label="inputs")
        bar(places + 0.2, dead[:, 1], 0.4, color=_ORANGE, label="outputs")
        if not dead.any():
            axes.text(
                0.5, 0.5, "every feature has a connection", transform=axes.transAxes,
                ha="center", va="center", color=MUTED,
            )  # fmt: skip
        axes.set_title("Features without any connection, as shares")
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, borderaxespad=0.1)
    return page


def _dead_shares(pattern: SparsePattern) -> tuple[float, float]:
    height, width = pattern.grid
    inputs, outputs = len(pattern.cols.unique()), len(pattern.rows.unique())
    return 1 - inputs / width, 1 - outputs / height


@contextmanager
def _bars(names: Sequence[str]) -> Iterator[tuple[Figure, Axes, Any, np.ndarray]]:
    """Axes with a bar for every layer: names at the side, or for many layers some names below."""
    names = [name or "(the model)" for name in names]
    count = len(names)
    horizontal = count <= _NAMED
    with figure(8, 1.3 + 0.24 * max(3, count)) if horizontal else figure(11, 4.8) as page:
        axes = page.subplots()
        places = np.arange(count)
        if horizontal:
            axes.set_yticks(places, [_shorten(name, 44) for name in names])
            axes.set_ylim(count - 0.4, -0.6)
            axes.grid(axis="y", visible=False)
            axes.tick_params(axis="y", labelsize=9, length=0)
        else:
            some = places[:: -(-count // 24)]
            axes.set_xticks(some, [_shorten(names[i], 30) for i in some], rotation=90)
            axes.set_xlim(-1, count)
            axes.grid(axis="x", visible=False)
            axes.tick_params(axis="x", labelsize=8)
        yield page, axes, axes.barh if horizontal else axes.bar, places


def _shorten(name: str, most: int) -> str:
    return name if len(name) <= most else f"...{name[3 - most :]}"


def _connectivity(name: str, pattern: SparsePattern) -> Figure:
    height, width = pattern.grid
    rows, cols = pattern.rows.cpu().numpy(), pattern.cols.cpu().numpy()
    tall, wide = min(height, _CELLS), min(width, _CELLS)
    cells = np.zeros((tall, wide))
    np.add.at(cells, (rows * tall // height, cols * wide // width), 1)
    # How many positions fall into each cell.
    down = np.bincount(np.arange(height) * tall // height, minlength=tall)
    across = np.bincount(np.arange(width) * wide // width, minlength=wide)
    cells /= np.outer(down, across)
    b = pattern.block_size
    shape = f"{height * b} x {width * b}" + (f" in blocks of {b}" if b > 1 else "")
    ratio = np.clip(width / height, 0.6, 1.8)
    with figure(2.6 + 4.4 * max(1.0, ratio), 2.2 + 4.4 / min(1.0, ratio)) as page:
        grid = page.add_gridspec(
            2, 2, width_ratios=[4.4 * max(1.0, ratio), 1.3],
            height_ratios=[4.4 / min(1.0, ratio), 1.3],
        )  # fmt: skip
        main = page.add_subplot(grid[0, 0])
        edges = (-0.5, width - 0.5, height - 0.5, -0.5)
        image = main.imshow(
            cells, cmap="Blues", aspect="auto", interpolation="nearest", extent=edges, vmin=0
        )
        main.grid(visible=False)
        main.set_title(f"{name or 'the layer'}: {shape}, density {pattern.density:.3g}")
        unit = "block row" if b > 1 else "output"
        main.set_ylabel(unit)
        right = page.add_subplot(grid[0, 1], sharey=main)
        right.fill_betweenx(
            np.arange(height), np.bincount(rows, minlength=height), color=_BLUE, step="mid"
        )
        right.set_xlim(left=0)
        right.tick_params(labelleft=False)
        right.set_title("connections", fontsize=9)
        below = page.add_subplot(grid[1, 0], sharex=main)
        below.fill_between(
            np.arange(width), np.bincount(cols, minlength=width), color=_BLUE, step="mid"
        )
        below.set_ylim(bottom=0)
        below.set_ylabel("connections", fontsize=9)
        below.set_xlabel("block column" if b > 1 else "input")
        main.tick_params(labelbottom=False)
        corner = page.add_subplot(grid[1, 1])
        corner.axis("off")
        page.colorbar(image, ax=corner, location="bottom", fraction=0.35, label="share present")
    return page


def _churn(records: Records) -> Figure:
    steps = records.steps[1:]
    shares = {name: records.churn(name) for name in records.layers}
    if len(shares) <= _LINES:
        with figure(9, 4.5) as page:
            axes = page.subplots()
            for name, churn in shares.items():
                axes.plot(steps, churn, label=_shorten(name, 40), marker="." * (len(steps) < 40))
            axes.set_ylim(bottom=0)
            axes.set_xlabel("step")
            axes.set_title("Share of the connections that each update replaced")
            axes.legend()
        return page
    table = np.array([*shares.values()]).reshape(len(shares), -1)
    names = [_shorten(name, 40) for name in shares]
    with figure(10, 1.8 + min(9.0, max(2.0, 0.22 * len(names)))) as page:
        axes = page.subplots()
        image = axes.imshow(table, cmap="magma", aspect="auto", interpolation="nearest", vmin=0)
        axes.grid(visible=False)
        some = np.arange(len(names))[:: -(-len(names) // _NAMED)]
        axes.set_yticks(some, [names[i] for i in some], fontsize=8)
        shown = np.arange(len(steps))[:: max(1, -(-len(steps) // 10))]
        axes.set_xticks(shown, [f"{steps[i]:,}" for i in shown])
        axes.set_xlabel("step of the update")
        axes.set_title("Share of the connections that each update replaced")
        page.colorbar(image, ax=axes, fraction=0.04, pad=0.01)
    return page


_FIGURES: dict[str, Callable[..., Figure]] = {
    "density": _density,
    "connectivity": _connectivity,
    "dead units": _dead_units,
    "churn": _churn,
}
