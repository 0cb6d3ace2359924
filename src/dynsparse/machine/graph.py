"""Variables on tiles, and the compute sets of vertices that work on them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dynsparse.checks import check_array, check_integer, check_kind
from dynsparse.files.shorten import shortened
from dynsparse.machine.dtypes import DType, as_dtype
from dynsparse.machine.errors import MappingError
from dynsparse.machine.intervals import Runs, TileMap, refine
from dynsparse.machine.merge import merge_vertices
from dynsparse.machine.target import Target
from dynsparse.machine.tensor import Tensor
from dynsparse.machine.vertex import Codelet, Ragged, VertexSet
from dynsparse.typed import typed

__all__ = ["ComputeSet", "Graph", "Stream", "Variable"]

# Variables start at multiples of this many elements, so that rows can be loaded as vectors, and at
# least one element apart, so that no run of addresses crosses from one into the next.
_ALIGNMENT = 64
_MOST = 2**48


class Variable:
    """One contiguous stretch of the memory of its type. `tensor` views it whole."""

    def __init__(self, name: str, tensor: Tensor, start: int, is_constant: bool) -> None:
        self.name = name
        self.tensor = tensor
        self.start = start
        self.is_constant = is_constant

    @property
    def stop(self) -> int:
        return self.start + self.tensor.numel

    @property
    def dtype(self) -> DType:
        return self.tensor.dtype

    @property
    def bytes(self) -> int:
        return self.tensor.numel * self.dtype.size


class ComputeSet:
    """Vertices that run at the same time. Made by `Graph.add_compute_set`."""

    def __init__(self, graph: Graph, name: str) -> None:
        self.graph = graph
        self.name = name
        self.vertex_sets: list[VertexSet] = []
        self._merged: tuple[int, list[VertexSet]] = (0, [])

    def merged(self) -> list[VertexSet]:
        """The vertices with those added one by one joined, as they run."""
        if self._merged[0] != len(self.vertex_sets):
            self._merged = (len(self.vertex_sets), merge_vertices(self.vertex_sets))
        return self._merged[1]


class Stream:
    """Data between host and machine, `numel` elements a time."""

    def __init__(self, name: str, dtype: DType, numel: int, to_device: bool) -> None:
        self.name = name
        self.dtype = dtype
        self.numel = numel
        self.to_device = to_device


class Graph:
    """Variables with tile mappings, constants, compute sets and vertices, for one target."""

    def __init__(self, target: Target) -> None:
        if not isinstance(target, Target):
            raise TypeError(f"Graph takes a Target, got {type(target).__name__}")
        self.target = target
        self.variables: dict[DType, list[Variable]] = {}
        self.sizes: dict[DType, int] = {}
        self.initial: list[tuple[Tensor, np.ndarray]] = []
        self.handles: dict[str, Tensor] = {}
        self.streams: dict[str, Stream] = {}
        self._assignments: dict[DType, list[tuple[Runs, np.ndarray]]] = {}
        self._maps: dict[DType, TileMap] = {}

    # Variables.

    def _add(self, dtype: Any, shape: Any, name: str | None, is_constant: bool) -> Tensor:
        dtype = as_dtype(dtype)
        given = list(shape) if isinstance(shape, Sequence) else [shape]
        sizes = [check_integer("a size of a shape", n) for n in given]
        if any(n < 0 for n in sizes) or math.prod(sizes) >= _MOST:
            raise ValueError(f"sizes of 0 or more and below 2^48 in all, got {shortened(sizes)}")
        check_kind("name", name, (str, type(None)), "a text or None")
        group = self.variables.setdefault(dtype, [])
        start = self.sizes.get(dtype, 0)
        strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
        tensor = Tensor(self, dtype, sizes, start, tuple(strides))
        name = name or f"{'constant' if is_constant else 'variable'}{len(group)}"
        group.append(Variable(name, tensor, start, is_constant))
        end = start + tensor.numel + 1
        self.sizes[dtype] = -(-end // _ALIGNMENT) * _ALIGNMENT
        self._maps.pop(dtype, None)
        return tensor

    def add_variable(
        self, dtype: Any, shape: Any, name: str | None = None, tiles: Any = None
    ) -> Tensor:
        """A variable of this element type and shape; it holds NaN (or rubbish) until written.

        `tiles` maps it at once, as in `set_tile_mapping`.
        """
        tensor = self._add(dtype, shape, name, is_constant=False)
        if tiles is not None:
            self.set_tile_mapping(tensor, tiles)
        return tensor

    def add_constant(
        self, dtype: Any, shape: Any, values: Any, name: str | None = None, tiles: Any = None
    ) -> Tensor:
        """A variable whose values are fixed: nothing may write it. `values` broadcast to `shape`.

        It needs a mapping like any other variable.
        """
        tensor = self._add(dtype, shape, name, is_constant=True)
        self.set_initial_value(tensor, values)
        if tiles is not None:
            self.set_tile_mapping(tensor, tiles)
        return tensor

    def set_initial_value(self, tensor: Tensor, values: Any) -> None:
        """What the tensor holds when an engine is made."""
        self._own(tensor)
        array = check_array("values", values, "fiub", "numbers").astype(tensor.dtype.numpy)
        self.initial.append((tensor, np.broadcast_to(array, tensor.shape)))

    def _own(self, tensor: Any) -> Tensor:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"expected a Tensor of the graph, got {type(tensor).__name__}")
        if tensor.graph is not self:
            raise ValueError("the tensor belongs to another graph")
        return tensor

    def variable_at(self, dtype: DType, address: int) -> Variable:
        group = self.variables[dtype]
        starts = [v.start for v in group]
        return group[int(np.searchsorted(starts, address, "right")) - 1]

    def names_of(self, tensor: Tensor) -> str:
        """The names of the variables a tensor views, for messages."""
        if tensor.numel == 0:
            return "nothing"
        starts = np.array([v.start for v in self.variables[tensor.dtype]])
        found = np.unique(np.searchsorted(starts, tensor.runs().starts, "right") - 1)
        names = [repr(self.variables[tensor.dtype][i].name) for i in found[:4]]
        return ", ".join(names) + (", ..." if len(found) > 4 else "")

    def constant_in(self, tensor: Tensor) -> Variable | None:
        """The first constant a tensor views, if any."""
        runs = tensor.runs()
        for variable in self.variables[tensor.dtype]:
            if variable.is_constant and tensor.numel:
                meets = (runs.starts < variable.stop) & (runs.ends > variable.start)
                if bool(meets.any()):
                    return variable
        return None

    # Mapping.

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
        flat = where.reshape(-1).astype(np.int64)
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
        size, where = size[filled], where[filled]
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
        """The tile of every element, int64 of the tensor's shape; -1 where none is mapped."""
        pieces = self.tile_map(self._own(tensor).dtype).split(tensor.runs())
        return np.repeat(pieces.tiles, pieces.lengths).reshape(tensor.shape)

    # Vertices.

    @typed
    def add_compute_set(self, name: str) -> ComputeSet:
        return ComputeSet(self, name)

    def add_vertices(
        self, compute_set: ComputeSet, codelet: Codelet, tiles: Any, values: Mapping[str, Any]
    ) -> VertexSet:
        """Many vertices of one codelet, run as one call.

        Args:
            compute_set: where they run.
            codelet: what they run.
            tiles: the tile of each vertex, [vertices]; or a grid of any shape, e.g.
                [tiles, workers], so that broadcast views can share an operand among vertices.
            values: for each field a tensor [*grid, ...] (vertex i gets entry i), or a `Ragged`
                for a plain list of vertices; for each scalar a number or an array [*grid].

        Raises:
            TypeError, ValueError: a field missing, unknown, of another type or count.
            MappingError: a tile that does not exist.
        """
        check_kind("compute_set", compute_set, ComputeSet, "a ComputeSet")
        check_kind("codelet", codelet, Codelet, "a Codelet")
        check_kind("values", values, Mapping, "tensors and numbers by name")
        if compute_set.graph is not self:
            raise ValueError(f"compute set {compute_set.name!r} belongs to another graph")
        grid = check_array("tiles", tiles, "iu", "integers [vertices]")
        if not grid.ndim:
            raise TypeError(f"tiles must be integers [vertices], got {grid.dtype} {grid.shape}")
        if grid.size and not (grid.min() >= 0 and grid.max() < self.target.tiles):
            worst = grid.min() if grid.min() < 0 else grid.max()
            raise MappingError(
                f"{codelet.name!r} is placed on tile {worst}; the target has tiles 0 to "
                f"{self.target.tiles - 1}"
            )
        wanted = {*codelet.fields, *codelet.scalars}
        if wanted != set(values):
            raise ValueError(
                f"codelet {codelet.name!r} takes {sorted(wanted)}, got {shortened([*values])}"
            )
        edges: dict[str, Tensor] = {}
        offsets: dict[str, np.ndarray] = {}
        for name, edge in codelet.fields.items():
            value = values[name]
            tensor = self._own(value.tensor if isinstance(value, Ragged) else value)
            shape = tensor.shape[: grid.ndim]
            if isinstance(value, Ragged):
                offsets[name] = value.offsets
                shape = (len(value.offsets) - 1,)
            if edge.dtypes is not None and tensor.dtype not in edge.dtypes:
                raise TypeError(
                    f"field {name!r} of {codelet.name!r} takes "
                    f"{' or '.join(d.name for d in edge.dtypes)}, got {tensor.dtype.name} "
                    f"({tensor.name})"
                )
            if shape != grid.shape:
                raise ValueError(
                    f"field {name!r} of {codelet.name!r} needs one entry for each of "
                    f"{' x '.join(map(str, grid.shape))} vertices, got {list(tensor.shape)} "
                    f"({tensor.name})"
                )
            edges[name] = tensor
        scalars: dict[str, Any] = {}
        for name in codelet.scalars:
            array = check_array(f"scalar {name!r}", values[name], "fiub", "numbers")
            scalars[name] = array if array.ndim else values[name]
            if array.ndim and array.shape != grid.shape:
                raise ValueError(
                    f"scalar {name!r} of {codelet.name!r} needs the shape {list(grid.shape)}, "
                    f"got {list(array.shape)}"
                )
        made = VertexSet(codelet, grid.astype(np.int64), edges, offsets, scalars)
        compute_set.vertex_sets.append(made)
        return made

    def add_vertex(
        self, compute_set: ComputeSet, codelet: Codelet, tile: int, values: Mapping[str, Any]
    ) -> VertexSet:
        """One vertex. Fields are tensors without the leading axis of `add_vertices`."""
        check_kind("values", values, Mapping, "tensors and numbers by name")
        lifted = {
            name: value.expand_dims(0) if isinstance(value, Tensor) else value
            for name, value in values.items()
        }
        return self.add_vertices(
            compute_set, codelet, np.array([check_integer("tile", tile)]), lifted
        )

    # The host's side.

    @typed
    def add_handle(self, name: str, tensor: Tensor) -> None:
        """Let the host read and write a tensor by this name, outside programs and for free."""
        if name in self.handles:
            raise ValueError(f"the handle {name!r} exists already")
        self.handles[name] = self._own(tensor)

    @typed
    def add_stream(self, name: str, dtype: Any, numel: int, *, to_device: bool) -> Stream:
        """A stream for `Copy`: `numel` elements each time, to or from the machine."""
        if name in self.streams:
            raise ValueError(f"the stream {name!r} exists already")
        self.streams[name] = Stream(
            name, as_dtype(dtype), check_integer("numel", numel, 0), to_device
        )
        return self.streams[name]


def _as_assignment(tile_map: TileMap) -> tuple[Runs, np.ndarray]:
    mapped = tile_map.tiles >= 0
    starts = tile_map.bounds[:-1][mapped]
    return Runs(starts, np.diff(tile_map.bounds)[mapped]), tile_map.tiles[mapped]
