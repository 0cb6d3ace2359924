"""Charts and texts of the report."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np


def esc(text: Any) -> str:
    """Text made safe inside HTML and inside quoted attributes."""
    return html.escape(str(text))


def number(value: float, digits: int = 4) -> str:
    """Whole numbers whole, others with so many significant digits; thousands separated."""
    if value != value or value in (float("inf"), float("-inf")):
        return str(value)
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    if abs(value) < 1e-4:
        return f"{value:.3g}"
    return f"{value:,.{digits}g}"


def percent(part: float, whole: float = 1.0) -> str:
    """A share of at least 0, such as 6.3 %; empty where the whole is 0."""
    if not whole:
        return ""
    share = 100 * part / whole
    if 0 < share < 0.1:
        return "< 0.1\u00a0%"
    return f"{share:.2g}\u00a0%" if 0 < share < 1 else f"{share:,.1f}\u00a0%"


def words(name: str) -> str:
    """A key of a mapping as words: grad_input -> grad input."""
    return name.replace("_", " ").strip()


def table(
    head: Sequence[str | tuple[str, str]],
    rows: Iterable[Sequence[Any] | tuple[str, Sequence[Any]]],
    kind: str = "",
) -> str:
    """A table.

    Args:
        head: the label of each column: "#label" for numbers, "=" for bars, or (label, class).
        rows: the cells, ready HTML, or numbers; None is an empty cell. (class, cells) for a row of
            that class.
        kind: class of the table.
    """
    columns = [_column(label) for label in head]
    top = "".join(_element("th", esc(label), c, ' scope="col"') for label, c in columns)
    body = []
    for row in rows:
        style, cells = row if isinstance(row, tuple) else ("", row)
        line = "".join(
            _element("td", _text(content), c)
            for content, (_, c) in zip(cells, columns, strict=True)
        )
        body.append(_element("tr", line, style))
    content = f"<thead><tr>{top}</tr></thead><tbody>{''.join(body)}</tbody>"
    return f'<div class="scroll">{_element("table", content, kind)}</div>'


def _column(label: str | tuple[str, str]) -> tuple[str, str]:
    if isinstance(label, tuple):
        return label
    marks = {"#": "n", "=": "b"}
    return (label[1:], marks[label[0]]) if label[:1] in marks else (label, "")


def indent(label: str, depth: int) -> str:
    """The first cell of a row inside `depth` others."""
    return f'<span style="padding-left:{1.4 * depth:g}em">{label}</span>'


def _element(tag: str, content: str, kind: str = "", more: str = "") -> str:
    name = f' class="{kind}"' if kind else ""
    return f"<{tag}{more}{name}>{content}</{tag}>"


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "" if content is None else number(content)


def bar(parts: Iterable[tuple[str, float]], whole: float) -> str:
    """A stacked bar, as wide as its parts of the whole. Parts: (colour class, amount)."""
    pieces = "".join(
        f'<i class="{kind}" style="width:{min(100 * amount / whole, 100):.3f}%"></i>'
        for kind, amount in parts
        if whole and amount > 0
    )
    return f'<span class="bar">{pieces}</span>'


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Colour classes and what they mean."""
    keys = "".join(f'<span><i class="{kind}"></i>{esc(text)}</span>' for kind, text in entries)
    return f'<p class="legend">{keys}</p>'


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
    lines.append(f'<text class="mid" x="{middle:.0f}" y="{_HEIGHT - 4}">{esc(x_label)}</text>')
    lines.append(f'<text x="4" y="{_TOP - 3}">{esc(unit)}</text>')
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
            f"{esc(limit_label)}</text>"
        )
    return (
        f'<svg id="{esc(identity)}" class="tiles" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
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
                f"{int(count):,} {esc(of)}</title></rect>"
            )
    ends: list[tuple[float, str, float]] = [(_LEFT, "", low), (width - _RIGHT, "end", high)]
    if low == high:
        ends = [((_LEFT + width - _RIGHT) / 2, "mid", low)]
    for at, kind, value in ends:
        body.append(f'<text class="{kind}" x="{at:g}" y="{_HEIGHT - 22}">{number(value)}</text>')
    return f'<svg class="small" viewBox="0 0 {width} {_HEIGHT}" role="img">{"".join(body)}</svg>'


# Light to dark in one hue, so that it reads in print and with any colour vision; beyond the
# capacity it turns to the one warm colour.
_LIGHT, _DARK = (238, 243, 248), (8, 48, 107)
_OVER_LIGHT, _OVER_DARK = (253, 208, 162), (166, 54, 3)
_LEVELS = 24
_NARROW, _WIDE = 560, 1150
"""Widths of a map, of one with very many columns, in pixels."""


def _blend(light: tuple[int, ...], dark: tuple[int, ...], share: float) -> str:
    mixed = (round(a + (b - a) * share) for a, b in zip(light, dark, strict=True))
    return "#" + "".join(f"{c:02x}" for c in mixed)


def _colour(value: float, top: float, capacity: float | None) -> str:
    if capacity is not None and value > capacity:
        share = (value - capacity) / (top - capacity) if top > capacity else 1.0
        return _blend(_OVER_LIGHT, _OVER_DARK, round(share * _LEVELS) / _LEVELS)
    whole = capacity if capacity is not None else top
    return _blend(_LIGHT, _DARK, round(value / whole * _LEVELS) / _LEVELS if whole else 0.0)


def _cell_size(rows: int, columns: int, largest: int) -> tuple[float, float]:
    """Width and height of a cell: square, unless the columns are so many that they get thin."""
    width = max(min(_NARROW / columns, largest), min(_WIDE / columns, 2))
    height = width if width >= 4 else max(width, min(16, 120 / rows))
    return round(width, 2), round(height, 2)


def _cells(colours: dict[str, list[tuple[int, int]]], size: tuple[float, float]) -> str:
    """One path for each colour."""
    w, h = size
    return "".join(
        f'<path fill="{colour}" d="'
        + "".join(f"M{c * w:g} {r * h:g}h{w:g}v{h:g}h-{w:g}z" for r, c in places)
        + '"/>'
        for colour, places in colours.items()
    )


def grid_map(
    values: np.ndarray,
    *,
    identity: str,
    axes: tuple[str, str],
    unit: str,
    capacity: float | None = None,
    turn: bool = True,
) -> str:
    """A map of [rows, columns].

    The longer dimension runs to the right, unless `turn` is off. Values above `capacity` turn warm;
    without one, dark is the largest value. NaN is no cell.
    """
    down, right = axes
    if turn and values.shape[0] > values.shape[1]:
        values, down, right = values.T, right, down
    rows, columns = values.shape
    size = _cell_size(rows, columns, 24)
    top = float(np.nanmax(values))
    colours: dict[str, list[tuple[int, int]]] = {}
    for r in range(rows):
        for c in range(columns):
            if not np.isnan(values[r, c]):
                found = _colour(float(values[r, c]), top, capacity)
                colours.setdefault(found, []).append((r, c))
    left, above = 34, 20
    body = [f'<g transform="translate({left} {above})">{_cells(colours, size)}</g>']
    inner_w, inner_h = columns * size[0], rows * size[1]
    body.append(f'<text class="mid" x="{left + inner_w / 2:g}" y="12">{esc(right)}</text>')
    body.append(
        f'<text class="mid" transform="translate(24 {above + inner_h / 2:g}) rotate(-90)">'
        f"{esc(down)}</text>"
    )
    body.append(
        f'<rect class="frame" x="{left}" y="{above}" width="{inner_w:g}" height="{inner_h:g}"/>'
    )
    # The scale: light to dark and, beyond the capacity, warm.
    y = above + inner_h + 12
    stops = [(i / 40) * top for i in range(41)]
    step = 200 / 41
    scale = "".join(
        f'<rect fill="{_colour(s, top, capacity)}" x="{left + i * step:.1f}" y="{y:g}" '
        f'width="{step + 0.3:.1f}" height="10"/>'
        for i, s in enumerate(stops)
    )
    body.append(scale)
    body.append(f'<text x="{left}" y="{y + 24:g}">0</text>')
    body.append(
        f'<text class="end" x="{left + 200}" y="{y + 24:g}">{number(top)} {esc(unit)}</text>'
    )
    if capacity is not None and 0.25 * top < capacity < 0.75 * top:
        at = left + 200 * capacity / top
        body.append(f'<text class="mid" x="{at:.1f}" y="{y + 24:g}">{number(capacity)}</text>')
    total_w, total_h = max(left + inner_w, left + 200) + 8, y + 30
    return (
        f'<svg id="{esc(identity)}" class="map" viewBox="0 0 {total_w:g} {total_h:g}" '
        f'style="width:{total_w:g}px" role="img" data-left="{left}" data-top="{above}" '
        f'data-width="{size[0]:g}" data-height="{size[1]:g}" '
        f'data-columns="{columns}" data-rows="{rows}" '
        f'data-down="{esc(down)}" data-right="{esc(right)}" data-unit="{esc(unit)}">'
        f"{''.join(body)}</svg>"
    )


def offsets_map(
    partition: tuple[int, int, int], offsets: list[tuple[int, int]], ends: tuple[int, int, int]
) -> str:
    """Which distances (x, y) the propagation visits, passes by or never reaches."""
    parts_x, parts_y, _ = partition
    visited = set(offsets)
    along, across = (0, 1) if parts_x >= parts_y else (1, 0)
    sizes = (parts_x, parts_y)
    size = _cell_size(sizes[across], sizes[along], 18)
    colours: dict[str, list[tuple[int, int]]] = {}
    for x in range(parts_x):
        for y in range(parts_y):
            if (x, y) == (0, 0):
                colour = "#009e73"
            elif (x, y) in visited:
                colour = "#d55e00"
            elif x < ends[0] and y < ends[1]:
                colour = "#c9c9c9"
            else:
                colour = "#f3f3f3"
            place = (x, y)
            colours.setdefault(colour, []).append((place[across], place[along]))
    names = ("distance in X", "distance in Y")
    left, above = 34, 20
    inner_w, inner_h = sizes[along] * size[0], sizes[across] * size[1]
    width, height = max(left + inner_w, 270) + 8, above + inner_h + 6
    return (
        f'<svg class="map" viewBox="0 0 {width:g} {height:g}" style="width:{width:g}px" role="img">'
        f'<text x="{left}" y="12">{names[along]} (right), {names[across]} (down)</text>'
        f'<g transform="translate({left} {above})" stroke="#fff" '
        f'stroke-width="{min(size[0] / 12, 1):.2f}">'
        f"{_cells(colours, size)}</g></svg>"
    )
