"""Which tile holds what."""

from __future__ import annotations

from copy import copy
from typing import Any, TypeVar

import numpy as np

from dynsparse.checks import check_array, check_integer
from dynsparse.files.shorten import shortened
from popsparse.machine.dtypes import DType, MappingError
from popsparse.machine.intervals import Runs, TileMap, refine
from popsparse.machine.target import Target
from popsparse.machine.tensor import Tensor

_Self = TypeVar("_Self", bound="TileMapping")


class TileMapping:
    """The part of a graph that knows where its elements lie.

    Attributes:
        target, sizes: see `Graph`.
        root: the graph itself; of a virtual graph, that which it is part of.
    """

    target: Target
    sizes: dict[DType, int]

    def __init__(self) -> None:
        self.root: Any = self
        self._own_tiles: np.ndarray | None = None
        self._assignments: dict[DType, list[tuple[Runs, np.ndarray]]] = {}
        self._maps: dict[DType, TileMap] = {}

    def _own(self, tensor: Any) -> Tensor:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"expected a Tensor of the graph, got {type(tensor).__name__}")
        if tensor.graph is not self.root:
            raise ValueError("the tensor belongs to another graph")
        return tensor

    def set_tile_mapping(self, tensor: Tensor, tiles: Any) -> None:
        """Say which tile holds what.

        `tiles` is one tile for the whole tensor, or an integer array over the tensor's leading
        dimensions: `tiles[i]` holds `tensor[i]`, `tiles[i, j]` holds `tensor[i, j]`. A later
        mapping of the same elements replaces an earlier one.

        Raises:
            MappingError: a tile that does not exist, or tiles of another shape.
        """
        tensor = self._own(tensor)
        where = check_array("tiles", tiles, "iu", "integers")
        if where.shape != tensor.shape[: where.ndim]:
            raise MappingError(
                f"tiles of the shape {list(where.shape)} must match the leading dimensions of "
                f"{tensor.name} {list(tensor.shape)}"
            )
        if where.size and not (where.min() >= 0 and where.max() < self.target.tiles):
            worst = where.min() if where.min() < 0 else where.max()
            raise MappingError(
                f"{tensor.name} is mapped to tile {worst}; the target has tiles 0 to "
                f"{self.target.tiles - 1}"
            )
        if tensor.numel == 0:
            return
        runs = tensor.runs(where.ndim)
        flat = self._placed(where.reshape(-1))
        if tensor.is_regular:
            owner = np.repeat(flat, len(runs.starts) // len(flat))
        else:
            owner = flat[(np.cumsum(runs.lengths) - 1) // (tensor.numel // len(flat))]
        # What lies side by side on one tile is one run: programs map row by row.
        ends = runs.ends[:-1]
        new = np.append(True, (owner[1:] != owner[:-1]) | (runs.starts[1:] != ends))
        if not new.all():
            first = np.flatnonzero(new)
            lengths = np.add.reduceat(runs.lengths, first)
            runs, owner = Runs(runs.starts[first], lengths), owner[first]
        self._assign(tensor.dtype, runs, owner)

    def _assign(self, dtype: DType, runs: Runs, owner: np.ndarray) -> None:
        self._assignments.setdefault(dtype, []).append((runs, owner))
        self._maps.pop(dtype, None)

    def map_stretches(self, tensor: Tensor, tiles: Any, lengths: Any) -> None:
        """Map the elements in order: `lengths[i]` of them, one after the other, to `tiles[i]`.

        Both are integers [stretches]; the lengths add up to the tensor's elements.
        """
        tensor = self._own(tensor)
        size = check_array("lengths", lengths, "iu", "integers").astype(np.int64)
        where = check_array("tiles", tiles, "iu", "integers").astype(np.int64)
        if (
            size.ndim != 1
            or (size < 0).any()
            or size.shape != where.shape
            or int(size.sum()) != tensor.numel
        ):
            raise MappingError(
                f"expected a tile for each of {size.size} stretches of {tensor.numel} elements in "
                f"all, got {where.size} tiles and {int(size.sum())} elements"
            )
        if where.size and not (where.min() >= 0 and where.max() < self.target.tiles):
            raise MappingError(
                f"{tensor.name} is mapped to a tile outside 0 to {self.target.tiles - 1}"
            )
        filled = size > 0
        size, where = size[filled], self._placed(where[filled])
        if not size.size:
            return
        whole = Runs(np.cumsum(size) - size, size)
        starts, place, found = refine(tensor.runs(), whole)
        owner = where[np.searchsorted(whole.starts, place, "right") - 1]
        self._assign(tensor.dtype, Runs(starts, found), owner)

    def map_linearly(
        self, tensor: Tensor, grain: int = 1, min_per_tile: int = 1, first_tile: int = 0
    ) -> None:
        """Spread the elements in order over the tiles, as evenly as whole grains allow.

        Each tile gets a multiple of `grain` elements and at least `min_per_tile`.
        """
        tensor = self._own(tensor)
        grain = check_integer("grain", grain, 1)
        min_per_tile = check_integer("min_per_tile", min_per_tile, 1)
        first_tile = check_integer("first_tile", first_tile, 0)
        grains = -(-tensor.numel // grain)
        tiles = min(self.target.tiles - first_tile, max(1, tensor.numel // min_per_tile))
        if tiles < 1:
            raise MappingError(f"first_tile {first_tile} is outside {self.target.tiles} tiles")
        per_tile = -(-grains // tiles) * grain
        starts = np.arange(0, tensor.numel, max(per_tile, 1))
        lengths = np.minimum(starts + per_tile, tensor.numel) - starts
        self.map_stretches(tensor, first_tile + np.arange(len(starts)), lengths)

    def tile_map(self, dtype: DType) -> TileMap:
        """The tile of every address of a type."""
        if dtype not in self._maps:
            parts = self._assignments.get(dtype, [])
            self._maps[dtype] = TileMap.from_assignments(self.sizes[dtype], parts)
            if parts:
                self._assignments[dtype] = [_as_assignment(self._maps[dtype])]
        return self._maps[dtype]

    def tiles_of(self, tensor: Tensor) -> np.ndarray:
        """The tile of every element, int64 of the tensor's shape; -1 where none is mapped, and in a
        virtual graph where it is another's."""
        pieces = self.tile_map(self._own(tensor).dtype).split(tensor.runs())
        tiles = pieces.tiles
        if self._own_tiles is not None:
            number = np.full(self.root.target.tiles + 1, -1)
            number[self._own_tiles] = np.arange(len(self._own_tiles))
            tiles = number[tiles]
        return np.repeat(tiles, pieces.lengths).reshape(tensor.shape)

    def _placed(self, tiles: np.ndarray) -> np.ndarray:
        """Tiles of this graph as those of the machine."""
        found = tiles.astype(np.int64)
        return found if self._own_tiles is None else self._own_tiles[found]

    def virtual(self: _Self, *, tiles: Any = None, processor: int | None = None) -> _Self:
        """The same graph seen as one of some tiles only, counted from 0.

        Variables and vertices made through it are placed there. Variables, names and programs are
        shared: what one made another may copy and run.

        Args:
            tiles: distinct tiles of this graph, int [any], neighbours on a bus side by side.
            processor: all tiles of this one, in place of `tiles`.

        Raises:
            ValueError: both or none of them; a tile or processor that does not exist.
        """
        if (tiles is None) == (processor is None):
            raise ValueError("a virtual graph is of tiles or of a processor: give one of them")
        if processor is not None:
            number, each = check_integer("processor", processor, 0), self.target.processor_tiles
            if number >= self.target.processors:
                raise ValueError(f"processor must be below {self.target.processors}, got {number}")
            tiles = np.arange(number * each, (number + 1) * each)
        where = check_array("tiles", tiles, "iu", "integers [tiles]")
        if where.ndim != 1 or not where.size or len(np.unique(where)) != len(where):
            raise ValueError(f"tiles must be distinct integers [tiles], got {shortened(tiles)}")
        if where.min() < 0 or where.max() >= self.target.tiles:
            raise MappingError(
                f"tiles must be 0 to {self.target.tiles - 1}, got {where.min()} to {where.max()}"
            )
        made = copy(self)
        made._own_tiles = self._placed(where)
        across = made._own_tiles // self.root.target.processor_tiles
        processors = len(np.unique(across))
        if processors > 1 and len(where) % processors:
            raise ValueError("a virtual graph over several processors takes as many tiles of each")
        made.target = self.root.target.with_(tiles=len(where), processors=processors)
        return made


def _as_assignment(tile_map: TileMap) -> tuple[Runs, np.ndarray]:
    mapped = tile_map.tiles >= 0
    starts = tile_map.bounds[:-1][mapped]
    return Runs(starts, np.diff(tile_map.bounds)[mapped]), tile_map.tiles[mapped]
