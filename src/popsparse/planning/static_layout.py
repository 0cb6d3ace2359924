"""Bands of columns, the layout of a static product's operands, and the reduction of its sums.

The original passes each row of the result, in each part of n, to PopLibs' `reduceMany` as a
separate reduction. Each runs on the tiles of its outputs, or, if PopLibs' planner of reductions
estimates that this is faster, in pieces of four vectors on consecutive tiles from an arbitrary one
on; the sums then move to their outputs. So the load of such pieces is randomly uneven. See
section 6.4 of docs/popsparse-formulas.md.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from dynsparse.pattern import SparsePattern
from popsparse.machine.dtypes import DType
from popsparse.machine.intervals import offsets_of, ranks
from popsparse.machine.target import SYNC
from popsparse.planning.options import Options
from popsparse.planning.params import MatmulParams, ceil_div, even_parts
from popsparse.planning.plan import Search

_LEAST_SHARE = 0.1  # Of the mean count; rows and columns with no more are set aside.


class Interval(NamedTuple):
    begin: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.begin


class Bands(NamedTuple):
    """Column bands: bounds [bands + 1] in (permuted) block columns, blocks of each, and the largest
    number of non-empty columns in one."""

    bounds: np.ndarray
    blocks: tuple[int, ...]
    widest: int


def sort_kept_first(counts: np.ndarray, preprocess: bool) -> tuple[np.ndarray, int]:
    """An order of rows (or columns) with those to plan for first, and the number of these.

    Rows with more than a tenth of the mean count are kept in their order; the others follow,
    fullest first.
    """
    order = np.arange(len(counts))
    if not preprocess:
        return order, len(counts)
    kept = counts > _LEAST_SHARE * counts.sum() / len(counts)
    others = order[~kept]
    others = others[np.argsort(-counts[others], kind="stable")]
    return np.concatenate([order[kept], others]), max(1, int(kept.sum()))


def column_bands(counts: np.ndarray, most: int) -> Bands:
    """At most `most` bands, each ending with the column that completes its even share."""
    total = int(counts.sum())
    share = ceil_div(total, most)
    before = offsets_of(counts)
    bounds = [0]
    while len(bounds) <= most and before[bounds[-1]] < total:
        goal = int(before[bounds[-1]]) + share
        bounds.append(min(int(np.searchsorted(before, goal)), len(counts)))
    if len(bounds) == 1:
        bounds.append(len(counts))
    edges = np.asarray(bounds)
    filled = offsets_of(counts > 0)
    widest = int(np.diff(filled[edges]).max())
    return Bands(edges, tuple(np.diff(before[edges]).tolist()), widest)


def split_n(n: int, parts: int, grain: int) -> list[Interval]:
    """n columns (a multiple of `grain`) in at most `parts` equal parts; the last may be shorter."""
    step = ceil_div(n // grain, parts) * grain
    return [Interval(begin, min(begin + step, n)) for begin in range(0, n, step)]


def split_tiles(parts: list[Interval], tiles: int, grain: int) -> list[Interval]:
    """Tiles for each part of n, in proportion to its width, in multiples of `grain`."""
    width = 1 + sum(part.size for part in parts)
    grains = ceil_div(tiles, grain)
    least = ceil_div(grains, len(parts))
    intervals: list[Interval] = []
    begin = 0
    for part in parts:
        more = max(ceil_div(grains * part.size, width) - 1, least)
        end = min(begin + more * grain, tiles)
        intervals.append(Interval(begin, end))
        begin = end
    intervals[-1] = Interval(intervals[-1].begin, tiles)
    return intervals


def tiles_of_bands(blocks: tuple[int, ...], tiles: int, grain: int) -> tuple[int, ...] | None:
    """Tiles for each band in proportion to its blocks, in multiples of `grain`; None: too few."""
    total, left = max(1, sum(blocks)), tiles
    later = (len(blocks) - 1) * grain  # The fewest tiles of the bands after this one.
    shares = []
    for count in blocks:
        share = left
        if later:
            share = count * tiles // total or min(tiles, grain)
            share = min(ceil_div(even_parts(count, share), grain) * grain, share)
        share = min(max(share // grain * grain, grain), left, tiles - later)
        if share <= 0:
            return None
        shares.append(share)
        left -= share
        later -= grain
    return tuple(shares)


_GRAIN = 8  # The fewest outputs that the planner of reductions spreads.
_LEAST_VECTORS = 4  # The fewest vectors of a piece that is spread.
_STATE_BYTES = 24  # State of a vertex: its code, two edges, four numbers.


def vertex_cycles(outputs: Any, depth: Any, dtype: DType) -> Any:
    """Instructions of a worker that adds `depth` partial sums for each of `outputs`.

    Strided, a vector of the data path at a time; widths that are not twice a vector take the
    general vertex, which fetches the address of every partial sum.
    """
    outputs, depth = np.asarray(outputs), np.asarray(depth)
    vector = dtype.vector_width
    half = dtype.size == 2
    strided = 15 + ceil_div(outputs, vector) * ((13 if half else 10) + depth)
    wide = 2 * vector
    checks = 3 if half else 2
    vectors, rest = outputs // wide, outputs % wide
    general = 33 + 24 + 2 * checks + vectors * (7 + 2 * vector + 19 * depth)
    for bit in range(checks):
        width = 1 << bit
        each = 5 + 2 * min(width, vector) + (15 + max(1, width // vector)) * depth
        general = general + np.where(rest & width, each, 0)
    return np.where(rest == 0, strided, general)


@dataclass(frozen=True, eq=False)
class Sums:
    """Pieces of the result, each reduced on one tile, in order of their tiles.

    Attributes:
        begin, length: range of each in the result's device order, int64 [pieces].
        tile, row, part: the tile that reduces it; the row and part of n of its outputs.
        depth: partial sums of each output: zero, for empty rows, or at least two.
        at_home: whether the outputs are on that tile.
        ones: stretches of `StaticPlan.outputs` with one partial sum, which is only moved.
        spread: stretches whose sums are made on other tiles.
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
        outputs, tiles = plan.outputs, plan.target.tiles
        block, width = plan.pattern.block_size, plan.n_padded
        parts = np.array([(part.begin, part.size) for part in plan.n_parts]) * block
        elsewhere = _is_reduced_elsewhere(plan, parts[:, 1])
        depth = plan.depths[outputs.row, outputs.part]
        spread = elsewhere[outputs.row, outputs.part]
        home = np.flatnonzero(~spread & (depth != 1))
        row, part = np.nonzero(elsewhere)
        size = parts[part, 1]
        vector = plan.dtype.vector_width
        vectors = ceil_div(size, vector)
        most = np.maximum(1, np.minimum(vectors // _LEAST_VECTORS, tiles))
        pieces = even_parts(vectors, most)
        first = np.random.default_rng(0).integers(0, tiles, len(size))
        of = np.repeat(np.arange(len(size)), pieces)
        number = ranks(pieces)
        at = number * vectors[of] // pieces[of] * vector
        end = np.minimum((number + 1) * vectors[of] // pieces[of] * vector, size[of])
        columns = [
            [outputs.begin[home], (row * width * block + parts[part, 0])[of] + at],
            [outputs.length[home], end - at],
            [outputs.tile[home], (first[of] + number) % tiles],
            [outputs.row[home], row[of]],
            [outputs.part[home], part[of]],
            [depth[home], plan.depths[row, part][of]],
            [np.ones(len(home), bool), np.zeros(len(of), bool)],
        ]
        joined = [np.concatenate(pair) for pair in columns]
        order = np.argsort(joined[2], kind="stable")
        begin, length, tile, rows, of_part, depths, at_home = (column[order] for column in joined)
        ones = np.flatnonzero(~spread & (depth == 1))
        made_elsewhere = np.flatnonzero(spread)
        return cls(begin, length, tile, rows, of_part, depths, at_home, ones, made_elsewhere)

    def cycles(self, plan: Any, chosen: np.ndarray) -> np.ndarray:
        """Cycles of every tile for the chosen pieces (bool [pieces]): [tiles].

        A piece uses one worker for each pair of vectors. All vertices of a tile share the workers,
        so the tile takes the sum over them, or six times the longest if that is more.
        """
        tiles, workers = plan.target.tiles, plan.target.workers
        summed = chosen & (self.depth > 0)
        length, depth, at = self.length[summed], self.depth[summed], self.tile[summed]
        wide = 2 * plan.dtype.vector_width
        grains = ceil_div(length, wide)
        share = ceil_div(grains, workers)
        count = ceil_div(grains, share)
        last = length - (count - 1) * share * wide
        longest = vertex_cycles(np.minimum(share * wide, length), depth, plan.dtype)
        spent = (count - 1) * longest + vertex_cycles(last, depth, plan.dtype)
        total = np.bincount(at, spent, tiles)
        most = np.zeros(tiles)
        np.maximum.at(most, at, longest)
        cycles = np.maximum(total, workers * most)
        cleared = chosen & (self.depth == 0)
        if cleared.any():
            words = np.bincount(
                self.tile[cleared], self.length[cleared] * plan.dtype.size / 8, tiles
            )
            cycles += np.where(words > 0, workers * 12 + np.ceil(words), 0)
        return cycles

    def state_bytes(self, plan: Any) -> np.ndarray:
        """Bytes of the vertices on every tile: [tiles]."""
        grains = ceil_div(self.length, 2 * plan.dtype.vector_width)
        share = ceil_div(grains, plan.target.workers)
        return _STATE_BYTES * np.bincount(self.tile, ceil_div(grains, share), plan.target.tiles)

    def received_bytes(self, plan: Any) -> np.ndarray:
        """Bytes of partial sums that each tile receives: [tiles]."""
        tiles, outputs = plan.target.tiles, plan.outputs
        summed = np.bincount(self.tile, self.length * self.depth, tiles)
        moved = np.bincount(outputs.tile[self.ones], outputs.length[self.ones], tiles)
        return (summed + moved) * plan.dtype.size

    def moved_bytes(self, plan: Any) -> np.ndarray:
        """The most bytes of sums made on other tiles that a tile receives and sends: [2]."""
        tiles, outputs = plan.target.tiles, plan.outputs
        to = np.bincount(outputs.tile[self.spread], outputs.length[self.spread], tiles).max()
        away = ~self.at_home
        made = np.bincount(self.tile[away], self.length[away], tiles).max()
        return np.array([to, made]) * plan.dtype.size


def _is_reduced_elsewhere(plan: Any, sizes: np.ndarray) -> np.ndarray:
    """Which rows of which parts of n are reduced on other tiles: bool [rows, parts].

    PopLibs' estimate. It multiplies partial sums sent to pieces elsewhere by their number, but not
    those sent to the outputs.
    """
    outputs, tiles = plan.outputs, plan.target.tiles
    size, vector = plan.dtype.size, plan.dtype.vector_width
    rate = plan.target.exchange_bytes_per_cycle
    depth = plan.depths
    held = np.zeros(depth.shape, np.int64)
    np.maximum.at(held, (outputs.row, outputs.part), outputs.length)
    grains = ceil_div(sizes, _GRAIN)
    spread = ceil_div(grains, tiles) * _GRAIN
    home = np.ceil(held * size / rate) + depth * ceil_div(held, vector) + SYNC.typical
    away = np.ceil(spread * depth * size / rate) + depth * ceil_div(spread, vector)
    away = away + np.ceil(held * size / rate) + 2 * SYNC.typical
    return np.asarray((home >= away) & (depth > 1))


def work_list_words(rows: Any, blocks: Any, block: int, workers: int) -> Any:
    """16-bit words of a tile's work list: per worker, per row, per block."""
    if block == 1:
        return 6 * workers + rows + blocks
    return 2 * workers + 1 + 2 * rows + blocks


@dataclass(frozen=True, eq=False)
class Pieces:
    """The blocks of the pattern, in device order, dealt to the tiles of one part of n.

    Attributes:
        begin, end: range of blocks of each piece, int64 [pieces]; in device order.
        tile: its tile, counted from the part's first.
        band: its column band.
        row_piece, row: each (piece, block row) there is, by piece then row, int64 [rows].
        column_piece, column: each (piece, block column) there is, likewise.
        block_row, block_column: of every block, its place in the two lists above.
    """

    begin: np.ndarray
    end: np.ndarray
    tile: np.ndarray
    band: np.ndarray
    row_piece: np.ndarray
    row: np.ndarray
    column_piece: np.ndarray
    column: np.ndarray
    block_row: np.ndarray
    block_column: np.ndarray

    def __len__(self) -> int:
        return len(self.begin)

    @property
    def blocks(self) -> np.ndarray:
        return self.end - self.begin

    @cached_property
    def rows(self) -> np.ndarray:
        """Block rows of each piece."""
        return np.bincount(self.row_piece, minlength=len(self))

    @cached_property
    def columns(self) -> np.ndarray:
        """Block columns of each piece."""
        return np.bincount(self.column_piece, minlength=len(self))

    @classmethod
    def of(
        cls,
        bands: Bands,
        band_tiles: tuple[int, ...],
        rows: np.ndarray,
        columns: np.ndarray,
        grid: tuple[int, int],
    ) -> Pieces:
        """Each band's blocks in equal runs over its tiles. `rows` and `columns` are those of the
        blocks in device order."""
        begin, end, tile, band = ([np.zeros(0, np.int64)] for _ in range(4))
        first = start = 0
        for index, (count, tiles) in enumerate(zip(bands.blocks, band_tiles, strict=True)):
            if count:
                share = ceil_div(count, tiles)
                cuts = np.arange(0, count, share)
                begin.append(start + cuts)
                end.append(start + np.minimum(cuts + share, count))
                tile.append(first + np.arange(len(cuts)))
                band.append(np.full(len(cuts), index))
            first, start = first + tiles, start + count
        begins, ends = np.concatenate(begin), np.concatenate(end)
        piece = np.repeat(np.arange(len(begins)), ends - begins)
        row_keys, block_row = np.unique(piece * grid[0] + rows, return_inverse=True)
        column_keys, block_column = np.unique(piece * grid[1] + columns, return_inverse=True)
        return cls(
            begins,
            ends,
            np.concatenate(tile),
            np.concatenate(band),
            *np.divmod(row_keys, grid[0]),
            *np.divmod(column_keys, grid[1]),
            block_row,
            block_column,
        )


def plan_key(
    target: Any, dtype: DType, params: MatmulParams, options: Options, pattern: SparsePattern
) -> tuple[Any, ...]:
    """Everything a static plan depends on; of the pattern, only its positions."""
    digest = hashlib.sha256(pattern.rows.numpy().tobytes())
    digest.update(pattern.cols.numpy().tobytes())
    return target, dtype, params, options, pattern.block_size, digest.hexdigest()


@dataclass(frozen=True, eq=False)
class StaticPlan:
    """The cut of a product with a known pattern. Made by `static.make_plan`.

    Attributes:
        params, options, dtype, target: the request.
        pattern: pattern of the sparse operand, [m, k] (already transposed for dense x sparse).
        row_order, column_order: block rows and columns in device order; place i is block row
            `row_order[i]`.
        planned: numbers of block rows and columns that the planner's estimate includes.
        bands: column bands, in places of `column_order`.
        n_parts: the parts of the dense operand's columns (padded to full vectors).
        tile_parts: the tiles of each part of n.
        band_tiles: for each part of n, the tiles of each band.
        terms: the planner's estimate in cycles, by name.
        temporary_bytes: its estimate of a tile's temporary data.
        search: statistics of the search.
    """

    params: MatmulParams
    options: Options
    dtype: DType
    target: Any = field(repr=False)
    pattern: SparsePattern
    row_order: np.ndarray = field(repr=False)
    column_order: np.ndarray = field(repr=False)
    planned: tuple[int, int]
    bands: Bands = field(repr=False)
    n_parts: tuple[Interval, ...]
    tile_parts: tuple[Interval, ...]
    band_tiles: tuple[tuple[int, ...], ...] = field(repr=False)
    terms: dict[str, int]
    temporary_bytes: int
    search: Search = field(repr=False)

    @property
    def key(self) -> tuple[Any, ...]:
        """Everything the plan depends on: its key in a `PlanningCache`."""
        return plan_key(self.target, self.dtype, self.params, self.options, self.pattern)

    @property
    def n_split(self) -> int:
        return len(self.n_parts)

    @property
    def num_bands(self) -> int:
        return len(self.bands.blocks)

    @property
    def n_padded(self) -> int:
        return self.n_parts[-1].end

    @property
    def grain(self) -> int:
        """Elements of the dense operand and the result that stay on one tile: full vectors, for
        blocks in both directions, as in the original's mapping."""
        vector = self.dtype.vector_width
        return vector if self.pattern.block_size == 1 else vector * vector

    @property
    def cycles(self) -> int:
        """The planner's estimate in cycles."""
        return sum(self.terms.values())

    @property
    def products(self) -> float:
        """Floating-point operations of the product, 2 x non-zeros x n."""
        return 2.0 * self.pattern.nnz * self.pattern.block_size**2 * self.params.n

    @cached_property
    def _sorted(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Slots of the pattern in device order, with their row and column places."""
        row = np.argsort(self.row_order)[self.pattern.rows.numpy()]
        column = np.argsort(self.column_order)[self.pattern.cols.numpy()]
        band = np.searchsorted(self.bands.bounds, column, "right")
        order = np.lexsort((column, row, band))
        return order, row[order], column[order]

    @property
    def order(self) -> np.ndarray:
        """Slot of the pattern of each block on the device: by band, row, column. int64 [nnz]."""
        return self._sorted[0]

    @cached_property
    def _pieces(self) -> dict[tuple[int, ...], Pieces]:
        _, row, column = self._sorted
        return {
            tiles: Pieces.of(self.bands, tiles, row, column, self.pattern.grid)
            for tiles in set(self.band_tiles)
        }

    def pieces(self, part: int) -> Pieces:
        """The pieces of one part of n. Rows and columns are places of the two orders."""
        return self._pieces[self.band_tiles[part]]

    @property
    def tiles_used(self) -> int:
        return sum(len(self.pieces(part)) for part in range(self.n_split))

    @cached_property
    def depths(self) -> np.ndarray:
        """How many tiles have partial sums of a row place in a part of n: int64 [m / b, parts]."""
        height = self.pattern.grid[0]
        counts = {
            key: np.bincount(piece.row, minlength=height) for key, piece in self._pieces.items()
        }
        return np.stack([counts[tiles] for tiles in self.band_tiles], axis=1)

    @cached_property
    def outputs(self) -> Outputs:
        return Outputs.of(self)

    @cached_property
    def sums(self) -> Sums:
        """The tiles on which the partial sums are reduced."""
        return Sums.of(self)


@dataclass(frozen=True, eq=False)
class Outputs:
    """The result [m / b, padded n, b] in device order, spread in equal shares over the tiles.

    Its stretches are cut wherever the tile, the row or the part of n changes.

    Attributes:
        share: elements of a tile; the last may have fewer.
        begin, length, tile, row, part: of each stretch, int64.
    """

    share: int
    begin: np.ndarray
    length: np.ndarray
    tile: np.ndarray
    row: np.ndarray
    part: np.ndarray

    @classmethod
    def of(cls, plan: StaticPlan) -> Outputs:
        block, width = plan.pattern.block_size, plan.n_padded
        total = plan.params.m * width
        share = ceil_div(ceil_div(total, plan.grain), plan.target.tiles) * plan.grain
        starts = np.array([part.begin for part in plan.n_parts]) * block
        pieces = (np.arange(plan.pattern.grid[0])[:, None] * width * block + starts).reshape(-1)
        cuts = np.unique(np.concatenate([pieces, np.arange(0, total, share)]))
        row, rest = np.divmod(cuts, width * block)
        return cls(
            share,
            cuts,
            np.diff(np.append(cuts, total)),
            cuts // share,
            row,
            np.searchsorted(starts, rest, "right") - 1,
        )
