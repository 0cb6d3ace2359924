"""The plan of a static product: which tile multiplies which blocks, and what that makes of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from dynsparse.pattern import SparsePattern
from popsparse.planning.data_types import DataType
from popsparse.planning.parts import ceil_div
from popsparse.static.bands import Bands, Interval
from popsparse.static.params import MatmulParams, Options
from popsparse.static.sums import Sums


class StaticSearch(NamedTuple):
    """What the search saw: partitions priced, those possible, the memory bound, runners-up."""

    priced: int
    possible: int
    bound: int
    runners_up: tuple[dict[str, Any], ...]


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
        for place, (count, tiles) in enumerate(zip(bands.blocks, band_tiles, strict=True)):
            if count:
                share = ceil_div(count, tiles)
                cuts = np.arange(0, count, share)
                begin.append(start + cuts)
                end.append(start + np.minimum(cuts + share, count))
                tile.append(first + np.arange(len(cuts)))
                band.append(np.full(len(cuts), place))
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


@dataclass(frozen=True, eq=False)
class StaticPlan:
    """How a product with a known pattern is cut. Made by `static.make_plan`.

    Attributes:
        params, options, dtype, target: what was planned for.
        pattern: of the sparse operand, [m, k] (already transposed for dense x sparse).
        row_order, column_order: block rows and columns as the device has them; place i is block
            row `row_order[i]`.
        planned: rows and columns, in blocks, that the planner reckoned with.
        bands: column bands, in places of `column_order`.
        n_parts: the columns of the dense operand (padded to whole vectors), cut.
        tile_parts: the tiles of each part of n.
        band_tiles: for each part of n, the tiles of each band.
        terms: the planner's estimate in cycles, by name.
        temporary_bytes: its estimate of a tile's temporary data.
        search: figures of the search.
    """

    params: MatmulParams
    options: Options
    dtype: DataType
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
    search: StaticSearch = field(repr=False)

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
    def cycles(self) -> int:
        """The planner's estimate."""
        return sum(self.terms.values())

    @property
    def products(self) -> float:
        """2 x non-zeros x n."""
        return 2.0 * self.pattern.nnz * self.pattern.block_size**2 * self.params.n

    @cached_property
    def _sorted(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Slots of the pattern in device order, with their row and column places."""
        places = []
        for order, at in (
            (self.row_order, self.pattern.rows.numpy()),
            (self.column_order, self.pattern.cols.numpy()),
        ):
            place = np.empty(len(order), np.int64)
            place[order] = np.arange(len(order))
            places.append(place[at])
        row, column = places
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
        counts = {key: np.bincount(one.row, minlength=height) for key, one in self._pieces.items()}
        return np.stack([counts[tiles] for tiles in self.band_tiles], axis=1)

    @cached_property
    def outputs(self) -> Outputs:
        return Outputs.of(self)

    @cached_property
    def sums(self) -> Sums:
        """Where the partial sums are added up."""
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
        # Whole vectors in both directions stay together, as the original maps them.
        vector = plan.dtype.vector_width
        grain = vector if block == 1 else vector * vector
        share = ceil_div(ceil_div(total, grain), plan.target.tiles) * grain
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
