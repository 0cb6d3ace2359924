"""The cuts of a static product that the planner prices: parts of n, and bands of columns."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from dynsparse.pattern import SparsePattern
from popsparse.planning.data_types import DataType
from popsparse.planning.parts import ceil_div
from popsparse.static.bands import (
    Interval,
    column_bands,
    split_n,
    split_tiles,
    tiles_of,
)
from popsparse.static.params import Options

_MOST_N_SPLITS, _MOST_BANDS = 32, 128  # The original's bounds of the search.


def _range(fixed: int, most: int, what: str, limit: int) -> range:
    if fixed > limit:
        raise ValueError(f"{what} must be at most {limit}, got {fixed}")
    return range(fixed, fixed + 1) if fixed else range(1, min(most, limit) + 1)


class Cut(NamedTuple):
    """So many parts of n and bands; `kinds` are the different sizes (columns of n, tiles) of the
    parts."""

    n_split: int
    bands: int
    kinds: set[tuple[int, int]]


class Cuts:
    """All cuts of one product.

    Args:
        n: columns of the dense operand, padded to whole vectors.
        column_counts: blocks of each column of the pattern, those that are planned for first.
        planned: how many columns these are.

    Attributes:
        bands: by their number.

    Raises:
        ValueError: options that ask for more parts or bands than there can be.
    """

    def __init__(
        self,
        target: Any,
        dtype: DataType,
        options: Options,
        pattern: SparsePattern,
        n: int,
        column_counts: np.ndarray,
        planned: int,
    ) -> None:
        self.n, self.vector, self.tiles = n, dtype.vector_width, target.tiles
        bus = target.exchange_bus_tiles
        self.grain = bus if target.tiles % bus == 0 else 1
        self.tile_grains = target.tiles // self.grain
        self.fixed_split = bool(options.n_split)
        most = min(n // self.vector, self.tile_grains)
        self.splits = _range(options.n_split, _MOST_N_SPLITS, "n_split", most)
        # A grain of columns: one, or as many blocks as the data path has numbers.
        band_grain = 1 if pattern.block_size == 1 else self.vector
        numbers = _range(
            options.num_bands,
            min(_MOST_BANDS, ceil_div(planned, band_grain)),
            "num_bands",
            min(self.tile_grains, pattern.grid[1]),
        )
        self.bands = {number: column_bands(column_counts, number) for number in numbers}
        self.band_tiles = cache(self._band_tiles)

    def parts(self, split: int) -> tuple[list[Interval], list[Interval]]:
        """The parts of n and the tiles of each."""
        n_parts = split_n(self.n, split, self.vector)
        return n_parts, split_tiles(n_parts, self.tiles, self.grain)

    def _band_tiles(self, number: int, tiles: int) -> tuple[int, ...] | None:
        """How many of a part's tiles each of `number` bands gets; None: they are too few."""
        return tiles_of(self.bands[number].blocks, tiles, self.grain)

    def __iter__(self) -> Iterator[Cut]:
        for split in self.splits:
            n_parts, tile_parts = self.parts(split)
            kinds = {(n.size, t.size) for n, t in zip(n_parts, tile_parts, strict=True)}
            same_as_fewer = len(n_parts) < split and not self.fixed_split
            if same_as_fewer or any(tiles <= 0 for _, tiles in kinds):
                continue
            for number in self.bands:
                if split * number > self.tile_grains:
                    break
                yield Cut(split, number, kinds)
