"""Maps over the X/Y grid of a plan: one cell a rectangle, its colour a figure."""

from __future__ import annotations

import numpy as np

from popsparse.report.format import number, say

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
    body.append(f'<text class="mid" x="{left + inner_w / 2:g}" y="12">{say(right)}</text>')
    body.append(
        f'<text class="mid" transform="translate(24 {above + inner_h / 2:g}) rotate(-90)">'
        f"{say(down)}</text>"
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
        f'<text class="end" x="{left + 200}" y="{y + 24:g}">{number(top)} {say(unit)}</text>'
    )
    if capacity is not None and 0.25 * top < capacity < 0.75 * top:
        at = left + 200 * capacity / top
        body.append(f'<text class="mid" x="{at:.1f}" y="{y + 24:g}">{number(capacity)}</text>')
    total_w, total_h = max(left + inner_w, left + 200) + 8, y + 30
    return (
        f'<svg id="{say(identity)}" class="map" viewBox="0 0 {total_w:g} {total_h:g}" '
        f'style="width:{total_w:g}px" role="img" data-left="{left}" data-top="{above}" '
        f'data-width="{size[0]:g}" data-height="{size[1]:g}" '
        f'data-columns="{columns}" data-rows="{rows}" '
        f'data-down="{say(down)}" data-right="{say(right)}" data-unit="{say(unit)}">'
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
