"""Charts and texts of the report."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np


def esc(text: Any) -> str:
    """Escape text for HTML and for quoted attributes."""
    return html.escape(str(text))


def number(value: float, digits: int = 4) -> str:
    """Format a number: integers in full, others to `digits` significant digits; with thousands
    separators."""
    if value != value or value in (float("inf"), float("-inf")):
        return str(value)
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    if abs(value) < 1e-4:
        return f"{value:.3g}"
    return f"{value:,.{digits}g}"


def percent(part: float, total: float = 1.0) -> str:
    """A share of at least 0, such as 6.3 %; empty where the total is 0."""
    if not total:
        return ""
    share = 100 * part / total
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
    """Format a table as HTML.

    Args:
        head: the label of each column: "#label" for numbers, "=" for bars, or (label, class).
        rows: the cells, HTML or numbers; None is an empty cell. (class, cells) for a row of that
            class.
        kind: class of the table.
    """
    columns = [_column(label) for label in head]
    top = "".join(_element("th", esc(label), c, ' scope="col"') for label, c in columns)
    body = []
    for row in rows:
        style, cells = row if isinstance(row, tuple) else ("", row)
        line = "".join(
            _element("td", _content(content), c)
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


def _content(content: Any) -> str:
    return content if isinstance(content, str) else "" if content is None else number(content)


def bar(parts: Iterable[tuple[str, float]], total: float) -> str:
    """A stacked bar; the widths are shares of the total. Parts: (colour class, amount)."""
    pieces = "".join(
        f'<i class="{kind}" style="width:{min(100 * amount / total, 100):.3f}%"></i>'
        for kind, amount in parts
        if total and amount > 0
    )
    return f'<span class="bar">{pieces}</span>'


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Colour classes and what they mean."""
    keys = "".join(f'<span><i class="{kind}"></i>{esc(text)}</span>' for kind, text in entries)
    return f'<p class="legend">{keys}</p>'


def _label(x: float, y: float, text: Any, kind: str = "") -> str:
    """Text at a position of a drawing; kind "end" is right-aligned, "mid" is centred."""
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{esc(text)}</text>'


def _line(x1: float, x2: float, y: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:g}" x2="{x2:g}" y1="{y:.1f}" y2="{y:.1f}"/>'


def _svg(size: tuple[float, float], kind: str, body: Iterable[str], **attributes: Any) -> str:
    """A drawing; attributes "data_left" become "data-left"."""
    more = "".join(f' {k.replace("_", "-")}="{esc(v)}"' for k, v in attributes.items())
    width, height = size
    return (
        f'<svg class="{kind}" viewBox="0 0 {width:g} {height:g}" role="img"{more}>'
        f"{''.join(body)}</svg>"
    )


_WIDTH, _HEIGHT = 860, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 12, 14, 40
_INNER = _HEIGHT - _TOP - _BOTTOM
_MOST_BARS = 24


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
    body = [_label(4, _TOP - 3, unit)]
    for tick in nice_ticks(top):
        y = _TOP + _INNER * (1 - tick / top if top else 1)
        body += [
            _line(_LEFT, width - _RIGHT, y, "grid"),
            _label(_LEFT - 6, y + 4, number(tick), "end"),
        ]
    return [*body, _label((_LEFT + width - _RIGHT) / 2, _HEIGHT - 4, x_label, "mid")]


def _area(values: np.ndarray, x: np.ndarray, top: float) -> str:
    """The path of a step curve down to the axis; equal neighbours are drawn as one."""
    base = _TOP + _INNER
    y = np.round(base - _INNER * values / top, 1) if top else np.full(len(values), base)
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
    """One column per tile, the series stacked in order, each in the colour class c0, c1, ...

    Args:
        series: figures [tiles] by name.
        identity: id of the SVG, by which the page's script finds its figures.
        limit: a horizontal line, with its label; the axis includes it.
    """
    total = np.sum(list(series.values()), axis=0)
    tiles, right = len(total), _WIDTH - _RIGHT
    top = max(float(total.max()), limit or 0) * 1.04 or 1.0
    x = np.linspace(_LEFT, right, tiles + 1)
    body = _axes(_WIDTH, top, unit, "tile")
    # From the back: each area reaches the axis, and the next covers all but its own share.
    for place, values in reversed(list(enumerate(series.values()))):
        body.append(f'<path class="c{place}" d="{_area(total, x, top)}"/>')
        total = total - values
    ticks = (tick for tick in nice_ticks(tiles, 8) if tick.is_integer() and tick < tiles)
    body += [_label(round(x[int(tick)]), _HEIGHT - 22, number(tick), "mid") for tick in ticks]
    if limit:
        y = _TOP + _INNER * (1 - limit / top)
        body += [
            _line(_LEFT, right, y, "limit"),
            _label(right - 4, y + 14, limit_label, "end limit"),
        ]
    size = (_WIDTH, _HEIGHT)
    return _svg(size, "tiles", body, id=identity, data_left=_LEFT, data_right=right)


def histogram(values: np.ndarray, *, unit: str, of: str = "tiles") -> str:
    """A histogram of the values. If all are equal, it has one bar."""
    low, high = float(values.min()), float(values.max())
    width = 330
    right = width - _RIGHT
    if high - low < 1e-9 * max(abs(high), 1):
        counts, edges = np.array([len(values)]), np.array([low, high])
    else:
        edges = np.linspace(low, high, _MOST_BARS + 1)
        if high - low < _MOST_BARS and np.array_equal(values, np.round(values)):
            edges = np.arange(low, high + 2) - 0.5  # A bar for each integer.
        counts, edges = np.histogram(values, bins=edges)
    top = counts.max() * 1.08
    body = _axes(width, top, of, unit)
    x = np.linspace(_LEFT, right, len(counts) + 1)
    if len(counts) == 1:
        x = x.mean() + np.array([-20.0, 20.0])
    for i in np.flatnonzero(counts).tolist():
        height = _INNER * counts[i] / top
        body.append(
            f'<rect class="c0" x="{x[i] + 0.5:.1f}" y="{_TOP + _INNER - height:.1f}" '
            f'width="{x[i + 1] - x[i] - 1:.1f}" height="{height:.1f}">'
            f"<title>{number(float(edges[i]))} to {number(float(edges[i + 1]))}: "
            f"{counts[i]:,} {esc(of)}</title></rect>"
        )
    ends: list[tuple[float, str, float]] = [(_LEFT, "", low), (right, "end", high)]
    if low == high:
        ends = [((_LEFT + right) / 2, "mid", low)]
    body += [_label(at, _HEIGHT - 22, number(value), kind) for at, kind, value in ends]
    return _svg((width, _HEIGHT), "small", body)


# Light to dark in one hue, so that it reads in print and with any colour vision; beyond the
# capacity it turns to the one warm colour.
_LIGHT, _DARK = (238, 243, 248), (8, 48, 107)
_OVER_LIGHT, _OVER_DARK = (253, 208, 162), (166, 54, 3)
_LEVELS = 24
_NARROW, _WIDE = 560, 1150
"""Widths of a map, of one with very many columns, in pixels."""
_MAP_LEFT, _MAP_TOP = 34, 20
_SCALE, _STOPS = 200, 41
"""Width of a map's scale, and how many colours it shows."""


def _colour(value: float, top: float, capacity: float | None) -> str:
    if capacity is not None and value > capacity:
        light, dark = _OVER_LIGHT, _OVER_DARK
        share = (value - capacity) / (top - capacity) if top > capacity else 1.0
    else:
        light, dark = _LIGHT, _DARK
        highest = top if capacity is None else capacity
        share = value / highest if highest else 0.0
    share = round(share * _LEVELS) / _LEVELS
    mixed = (round(a + (b - a) * share) for a, b in zip(light, dark, strict=True))
    return "#" + "".join(f"{c:02x}" for c in mixed)


def _cell_size(rows: int, columns: int) -> tuple[float, float]:
    """Width and height of a cell: square, unless there are too many columns."""
    width = max(min(_NARROW / columns, 24), min(_WIDE / columns, 2))
    height = width if width >= 4 else max(width, min(16, 120 / rows))
    return round(width, 2), round(height, 2)


def _cells(colours: Iterable[tuple[str, int, int]], size: tuple[float, float]) -> str:
    """Cells given as (colour, row, column), one path for each colour."""
    w, h = size
    paths: dict[str, str] = {}
    for colour, r, c in colours:
        paths[colour] = paths.get(colour, "") + f"M{c * w:g} {r * h:g}h{w:g}v{h:g}h-{w:g}z"
    drawn = "".join(f'<path fill="{colour}" d="{path}"/>' for colour, path in paths.items())
    return f'<g transform="translate({_MAP_LEFT} {_MAP_TOP})">{drawn}</g>'


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

    The longer dimension runs to the right, unless `turn` is off. Values above `capacity` get a warm
    colour; without a capacity, the darkest is the largest value. NaN leaves a cell empty.
    """
    down, right = axes
    if turn and values.shape[0] > values.shape[1]:
        values, down, right = values.T, right, down
    rows, columns = values.shape
    size = _cell_size(rows, columns)
    top = float(np.nanmax(values))
    filled = np.argwhere(~np.isnan(values)).tolist()
    cells = ((_colour(float(values[r, c]), top, capacity), r, c) for r, c in filled)
    width, height = columns * size[0], rows * size[1]
    left, above, below = _MAP_LEFT, _MAP_TOP, _MAP_TOP + height + 12
    step = _SCALE / _STOPS
    body = [
        _cells(cells, size),
        _label(left + width / 2, 12, right, "mid"),
        f'<text class="mid" transform="translate(24 {above + height / 2:g}) rotate(-90)">'
        f"{esc(down)}</text>",
        f'<rect class="frame" x="{left}" y="{above}" width="{width:g}" height="{height:g}"/>',
        *(
            f'<rect fill="{_colour(i / (_STOPS - 1) * top, top, capacity)}" '
            f'x="{left + i * step:.1f}" y="{below:g}" width="{step + 0.3:.1f}" height="10"/>'
            for i in range(_STOPS)
        ),
        _label(left, below + 24, 0),
        _label(left + _SCALE, below + 24, f"{number(top)} {unit}", "end"),
    ]
    if capacity is not None and 0.25 * top < capacity < 0.75 * top:
        body.append(_label(left + _SCALE * capacity / top, below + 24, number(capacity), "mid"))
    total = max(left + width, left + _SCALE) + 8
    return _svg(
        (total, below + 30),
        "map",
        body,
        id=identity,
        style=f"width:{total:g}px",
        data_left=left,
        data_top=above,
        data_width=f"{size[0]:g}",
        data_height=f"{size[1]:g}",
        data_columns=columns,
        data_rows=rows,
        data_down=down,
        data_right=right,
        data_unit=unit,
    )
