"""The tiles as a map, each coloured by the memory in use, and what lies on the one chosen."""

from __future__ import annotations

import math

import numpy as np

from popsparse.report.data import Tiles
from popsparse.report.format import say
from popsparse.report.maps import grid_map


def _columns(tiles: int) -> int:
    """Near twice as many as rows; if it can be, such that every row is full."""
    wanted = max(round(math.sqrt(2 * tiles)), 1)
    near = range(max(wanted // 2, 1), 2 * wanted + 1)
    full = [n for n in near if tiles % n == 0]
    return min(full, key=lambda n: abs(n - wanted)) if full else wanted


def tile_map(used: np.ndarray, limit: float, identity: str) -> str:
    """The map of bytes [tiles]; tiles run to the right, then down. Where some need more than
    `limit`, these are warm."""
    columns = _columns(len(used))
    rows = -(-len(used) // columns)
    cells = np.full(rows * columns, np.nan)
    cells[: len(used)] = used
    return grid_map(
        cells.reshape(rows, columns),
        identity=identity,
        axes=("row by row", "tiles"),
        unit="B",
        capacity=limit if used.max() > limit else None,
        turn=False,
    )


def tile_contents(tiles: Tiles, limit: float, tile: int, identity: str) -> str:
    """The map, and the frame of what lies on the tile that is chosen, by a click or its number."""
    used = np.sum(list(tiles.memory.values()), axis=0)
    name = say(identity)
    return (
        f'<div class="tile-contents" data-source="{name}" data-memory="{name}-memory" '
        f'data-tiles="{len(used)}"><h3>What lies where</h3>'
        "<p>Every tile in the colour of the memory in use. Click on one to see what it holds, "
        f'<label>or give its number: <input type="number" min="0" max="{len(used) - 1}" '
        f'value="{tile}"></label></p>'
        + tile_map(used, limit, f"{identity}-map")
        + '<div class="what"></div></div>'
    )
