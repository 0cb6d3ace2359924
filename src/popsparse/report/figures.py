"""Charts over the tiles as inline SVG: stacked columns and their distribution."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from popsparse.report.format import number, say

_WIDTH, _HEIGHT = 860, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 12, 14, 40


def nice_ticks(top: float, most: int = 5) -> list[float]:
    """Round numbers from 0 to at most `top`."""
    if top <= 0:
        return [0.0]
    rough = top / most
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(m * unit for m in (1, 2, 2.5, 5, 10) if m * unit >= rough * (1 - 1e-9))
    return [i * step for i in range(int(top / step * (1 + 1e-9)) + 1)]


def _axes(width: int, top: float, unit: str, x_label: str) -> list[str]:
    """Grid lines and labels of the vertical axis, and the name of the horizontal one."""
    inner = _HEIGHT - _TOP - _BOTTOM
    lines = []
    for tick in nice_ticks(top):
        y = _TOP + inner * (1 - tick / top) if top else _TOP + inner
        lines.append(
            f'<line class="grid" x1="{_LEFT}" x2="{width - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        lines.append(f'<text class="end" x="{_LEFT - 6}" y="{y + 4:.1f}">{number(tick)}</text>')
    middle = (_LEFT + width - _RIGHT) / 2
    lines.append(f'<text class="mid" x="{middle:.0f}" y="{_HEIGHT - 4}">{say(x_label)}</text>')
    lines.append(f'<text x="4" y="{_TOP - 3}">{say(unit)}</text>')
    return lines


def _area(values: np.ndarray, x: np.ndarray, top: float) -> str:
    """The path of a step curve down to the axis; equal neighbours are drawn as one."""
    inner = _HEIGHT - _TOP - _BOTTOM
    base = _TOP + inner
    y = np.round(base - inner * values / top, 1) if top else np.full(len(values), base)
    ends = np.append(np.flatnonzero(np.diff(y)) + 1, len(y))
    starts = np.append(0, ends[:-1])
    steps = "".join(f"V{y[a]:g}H{x[b]:.2f}" for a, b in zip(starts, ends, strict=True))
    return f"M{x[0]:g} {base}{steps}V{base}Z"


def stacked_tiles(
    series: Mapping[str, np.ndarray],
    *,
    identity: str,
    unit: str,
    limit: float | None = None,
    limit_label: str = "",
) -> str:
    """One column a tile, the series stacked in order, each in the colour class c0, c1, ...

    Args:
        series: figures [tiles] by name.
        identity: id of the SVG, by which the page's script finds its figures.
        limit: a line across, with its label; the axis reaches it.
    """
    tiles = len(next(iter(series.values())))
    top = float(np.sum(list(series.values()), axis=0).max())
    top = max(top, limit or 0) * 1.04 or 1.0
    x = np.linspace(_LEFT, _WIDTH - _RIGHT, tiles + 1)
    body = _axes(_WIDTH, top, unit, "tile")
    total = np.sum(list(series.values()), axis=0)
    # From the back: each area reaches the axis, and the next covers all but its own share.
    for place, values in reversed(list(enumerate(series.values()))):
        body.append(f'<path class="c{place}" d="{_area(total, x, top)}"/>')
        total = total - values
    for tick in nice_ticks(tiles, 8):
        if tick == int(tick) and tick < tiles:
            at = x[int(tick)]
            body.append(f'<text class="mid" x="{at:.0f}" y="{_HEIGHT - 22}">{number(tick)}</text>')
    if limit:
        y = _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - limit / top)
        body.append(
            f'<line class="limit" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="end limit" x="{_WIDTH - _RIGHT - 4}" y="{y + 14:.1f}">'
            f"{say(limit_label)}</text>"
        )
    return (
        f'<svg id="{say(identity)}" class="tiles" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'data-left="{_LEFT}" data-right="{_WIDTH - _RIGHT}">{"".join(body)}</svg>'
    )


def histogram(values: np.ndarray, *, unit: str, of: str = "tiles", bins: int = 24) -> str:
    """How many of the values lie where. Equal values make one bar."""
    low, high = float(values.min()), float(values.max())
    width = 330
    if high - low < 1e-9 * max(abs(high), 1):
        counts, edges = np.array([len(values)]), np.array([low, high])
    else:
        edges = np.linspace(low, high, bins + 1)
        if high - low < bins and np.array_equal(values, np.round(values)):
            edges = np.arange(low, high + 2) - 0.5  # A bar for each whole number.
        counts, edges = np.histogram(values, bins=edges)
    top = counts.max() * 1.08
    body = _axes(width, top, of, unit)
    inner = _HEIGHT - _TOP - _BOTTOM
    x = np.linspace(_LEFT, width - _RIGHT, len(counts) + 1)
    if len(counts) == 1:
        x = x.mean() + np.array([-20.0, 20.0])
    for i, count in enumerate(counts):
        height = inner * count / top
        if count:
            body.append(
                f'<rect class="c0" x="{x[i] + 0.5:.1f}" y="{_TOP + inner - height:.1f}" '
                f'width="{x[i + 1] - x[i] - 1:.1f}" height="{height:.1f}">'
                f"<title>{number(float(edges[i]))} to {number(float(edges[i + 1]))}: "
                f"{int(count):,} {say(of)}</title></rect>"
            )
    ends: list[tuple[float, str, float]] = [(_LEFT, "", low), (width - _RIGHT, "end", high)]
    if low == high:
        ends = [((_LEFT + width - _RIGHT) / 2, "mid", low)]
    for at, kind, value in ends:
        body.append(f'<text class="{kind}" x="{at:g}" y="{_HEIGHT - 22}">{number(value)}</text>')
    return f'<svg class="small" viewBox="0 0 {width} {_HEIGHT}" role="img">{"".join(body)}</svg>'
