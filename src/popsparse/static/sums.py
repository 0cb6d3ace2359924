"""Where the partial sums of a static product are added up, and what that takes.

The original hands each row of the result, in each part of n, to PopLibs' `reduceMany` as a
reduction of its own. Each is made where its outputs lie, or, where the estimate of PopLibs'
planner of reductions says that this is faster, in pieces of four vectors on consecutive tiles from
an arbitrary one on; the sums then move to where they belong. So the work of such pieces is as
uneven as chance makes it. See section 6.4 of docs/popsparse-formulas.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from popsparse.machine.facts import SYNC
from popsparse.planning.data_types import DataType

_GRAIN = 8  # Outputs that the planner of reductions spreads at least.
_LEAST_VECTORS = 4  # Of a piece that is spread.
_STATE_BYTES = 24  # Of a vertex: its code, two edges, four numbers.


def vertex_cycles(outputs: Any, depth: Any, dtype: DataType) -> Any:
    """Instructions of a worker that adds `depth` partial sums for each of `outputs`.

    Strided, a vector of the data path at a time; widths that are not twice a vector take the
    general vertex, which fetches the address of every partial sum.
    """
    outputs, depth = np.asarray(outputs), np.asarray(depth)
    vector = dtype.vector_width
    half = dtype.size == 2
    strided = 15 + -(-outputs // vector) * ((13 if half else 10) + depth)
    wide = 2 * vector
    checks = 3 if half else 2
    whole, rest = outputs // wide, outputs % wide
    general = 33 + 24 + 2 * checks + whole * (7 + 2 * vector + 19 * depth)
    for bit in range(checks):
        width = 1 << bit
        each = 5 + 2 * min(width, vector) + (15 + max(1, width // vector)) * depth
        general = general + np.where(rest & width, each, 0)
    return np.where(rest == 0, strided, general)


@dataclass(frozen=True, eq=False)
class Sums:
    """Pieces of the result that one tile adds up, in order of their tiles.

    Attributes:
        begin, length: of each in the result's device order, int64 [pieces].
        tile, row, part: where it is made; whose outputs they are.
        depth: partial sums of each output: none, for rows without any, or at least two.
        at_home: whether the outputs lie on that tile.
        ones: stretches of `StaticPlan.outputs` with one partial sum, which is moved there.
        spread: stretches whose sums are made elsewhere.
    """

    begin: np.ndarray
    length: np.ndarray
    tile: np.ndarray
    row: np.ndarray
    part: np.ndarray
    depth: np.ndarray
    at_home: np.ndarray
    ones: np.ndarray
    spread: np.ndarray

    @classmethod
    def of(cls, plan: Any) -> Sums:
        """The sums of a `StaticPlan`."""
        found, tiles = plan.outputs, plan.target.tiles
        block, width = plan.pattern.block_size, plan.n_padded
        parts = np.array([(part.begin, part.size) for part in plan.n_parts]) * block
        elsewhere = _elsewhere(plan, parts[:, 1])
        depth = plan.depths[found.row, found.part]
        spread = elsewhere[found.row, found.part]
        home = np.flatnonzero(~spread & (depth != 1))
        row, part = np.nonzero(elsewhere)
        size = parts[part, 1]
        vector = plan.dtype.vector_width
        vectors = -(-size // vector)
        most = np.maximum(1, np.minimum(vectors // _LEAST_VECTORS, tiles))
        pieces = -(-vectors // -(-vectors // most))
        first = np.random.default_rng(0).integers(0, tiles, len(size))
        of = np.repeat(np.arange(len(size)), pieces)
        number = np.arange(len(of)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        at = number * vectors[of] // pieces[of] * vector
        end = np.minimum((number + 1) * vectors[of] // pieces[of] * vector, size[of])
        columns = [
            [found.begin[home], (row * width * block + parts[part, 0])[of] + at],
            [found.length[home], end - at],
            [found.tile[home], (first[of] + number) % tiles],
            [found.row[home], row[of]],
            [found.part[home], part[of]],
            [depth[home], plan.depths[row, part][of]],
            [np.ones(len(home), bool), np.zeros(len(of), bool)],
        ]
        joined = [np.concatenate(pair) for pair in columns]
        order = np.argsort(joined[2], kind="stable")
        begin, length, tile, rows, of_part, depths, at_home = (one[order] for one in joined)
        ones = np.flatnonzero(~spread & (depth == 1))
        elsewhere_ = np.flatnonzero(spread)
        return cls(begin, length, tile, rows, of_part, depths, at_home, ones, elsewhere_)

    def cycles(self, plan: Any, chosen: np.ndarray) -> np.ndarray:
        """Cycles of every tile for some of the pieces (bool [pieces]): [tiles].

        A piece goes to as many workers as it has pairs of vectors; all vertices of a tile share
        them, so it takes their sum, or the longest of them six times over.
        """
        tiles, workers = plan.target.tiles, plan.target.workers
        summed = chosen & (self.depth > 0)
        length, depth, at = self.length[summed], self.depth[summed], self.tile[summed]
        wide = 2 * plan.dtype.vector_width
        grains = -(-length // wide)
        share = -(-grains // workers)
        count = -(-grains // share)
        last = length - (count - 1) * share * wide
        longest = vertex_cycles(np.minimum(share * wide, length), depth, plan.dtype)
        spent = (count - 1) * longest + vertex_cycles(last, depth, plan.dtype)
        total = np.bincount(at, spent, tiles)
        most = np.zeros(tiles)
        np.maximum.at(most, at, longest)
        found = np.maximum(total, workers * most)
        cleared = chosen & (self.depth == 0)
        if cleared.any():
            words = np.bincount(
                self.tile[cleared], self.length[cleared] * plan.dtype.size / 8, tiles
            )
            found += np.where(words > 0, workers * 12 + np.ceil(words), 0)
        return found

    def state_bytes(self, plan: Any) -> np.ndarray:
        """Bytes of the vertices on every tile: [tiles]."""
        grains = -(-self.length // (2 * plan.dtype.vector_width))
        share = -(-grains // plan.target.workers)
        return _STATE_BYTES * np.bincount(self.tile, -(-grains // share), plan.target.tiles)

    def received_bytes(self, plan: Any) -> np.ndarray:
        """Partial sums that come to every tile: [tiles]."""
        tiles, found = plan.target.tiles, plan.outputs
        summed = np.bincount(self.tile, self.length * self.depth, tiles)
        moved = np.bincount(found.tile[self.ones], found.length[self.ones], tiles)
        return (summed + moved) * plan.dtype.size

    def moved_bytes(self, plan: Any) -> np.ndarray:
        """Of the sums made elsewhere, the most that a tile receives and sends: [2]."""
        tiles, found = plan.target.tiles, plan.outputs
        to = np.bincount(found.tile[self.spread], found.length[self.spread], tiles).max()
        away = ~self.at_home
        made = np.bincount(self.tile[away], self.length[away], tiles).max()
        return np.array([to, made]) * plan.dtype.size


def _elsewhere(plan: Any, sizes: np.ndarray) -> np.ndarray:
    """Which rows of which parts of n are added up elsewhere: bool [rows, parts].

    PopLibs' estimate. The partial sums that come to the outputs are not multiplied by their number,
    those that come to pieces elsewhere are.
    """
    found, tiles = plan.outputs, plan.target.tiles
    size, vector = plan.dtype.size, plan.dtype.vector_width
    rate = plan.target.exchange_bytes_per_cycle
    depth = plan.depths
    held = np.zeros(depth.shape, np.int64)
    np.maximum.at(held, (found.row, found.part), found.length)
    grains = -(-sizes // _GRAIN)
    spread = -(-grains // tiles) * _GRAIN
    home = np.ceil(held * size / rate) + depth * -(-held // vector) + SYNC.typical
    away = np.ceil(spread * depth * size / rate) + depth * -(-spread // vector)
    away = away + np.ceil(held * size / rate) + 2 * SYNC.typical
    return np.asarray((home >= away) & (depth > 1))
