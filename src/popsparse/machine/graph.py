"""Graphs: variables on tiles, compute sets of vertices, streams and remote buffers."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np

from dynsparse._core.checks import check_array, check_integer, check_kind, check_types, shorten
from popsparse.machine.dtypes import (
    DType,
    MappingError,
    OutOfMemoryError,
    as_dtype,
    convert_values,
)
from popsparse.machine.intervals import Runs, TileMap, refine
from popsparse.machine.target import Target
from popsparse.machine.tensor import Tensor
from popsparse.machine.vertex import Codelet, Ragged, VertexSet

# Variables start at multiples of this many elements, so that rows can be loaded as vectors, and at
# least one element apart, so that no run of addresses crosses from one into the next.
_ALIGNMENT = 64
_MOST = 2**48

# Most bytes of one transfer of a remote buffer: Graphcore's cookbook.
_MOST_REMOTE = 128 * 2**20

Callers = tuple[tuple[CodeType, int], ...]
"""Code and line of each call, the nearest first."""

_MACHINE = str(Path(__file__).parent)
_SOURCE = Path(__file__).parents[2]
_PACKAGES = tuple(str(_SOURCE / name) for name in ("popsparse", "dynsparse"))
_CHECKS = str(_SOURCE / "dynsparse" / "_core" / "checks.py")
_NEAREST = 2


def find_callers() -> Callers:
    """The two nearest calls from outside the tile machine, and the nearest from outside the
    library, unless an installed package made it.

    Only code objects are kept, so no variable lives longer; texts are made on demand.
    """
    calls: list[tuple[CodeType, int]] = []
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        code = frame.f_code
        file = code.co_filename
        if file.startswith(_PACKAGES):
            if len(calls) < _NEAREST and not file.startswith(_MACHINE) and file != _CHECKS:
                calls.append((code, frame.f_lineno))
        else:
            if not (file.startswith("<frozen") or "site-packages" in file):
                calls.append((code, frame.f_lineno))
            break
    return tuple(calls)


def describe_callers(made_by: Callers) -> list[str]:
    """Each call as "file:line function"; files of the library by their path in it, others only by
    their name, so that a profile does not reveal its author's folders."""
    return [f"{_short_path(code.co_filename)}:{line} {code.co_name}" for code, line in made_by]


def _short_path(name: str) -> str:
    path = Path(name)
    return path.relative_to(_SOURCE).as_posix() if name.startswith(_PACKAGES) else path.name


def _merge_key(vertices: VertexSet) -> Any:
    """Single vertices with equal keys can run as one set; None keeps a set separate."""
    if vertices.grid.shape != (1,) or vertices.offsets:
        return None
    scalars = tuple(sorted(vertices.scalars.items()))
    if any(np.ndim(value) for _, value in scalars):
        return None
    edges = tuple((name, t.dtype, t.shape) for name, t in sorted(vertices.edges.items()))
    return vertices.codelet, edges, scalars


def _stack(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors [1, ...] of one shape as one [n, ...]; a regular view if they are evenly spaced."""
    first = tensors[0]
    shape = (len(tensors), *first.shape[1:])
    inner = {t._strides[1:] if t._strides is not None else None for t in tensors}
    if len(inner) == 1 and None not in inner:
        gaps = np.unique(np.diff([t._offset for t in tensors]))
        if len(gaps) == 1:
            strides = (int(gaps[0]), *inner.pop())  # type: ignore[misc]
            return Tensor(first.graph, first.dtype, shape, first._offset, strides)
    addresses = np.concatenate([t.addresses() for t in tensors])
    return Tensor(first.graph, first.dtype, shape, addresses=addresses)


def merge_vertices(sets: Sequence[VertexSet]) -> list[VertexSet]:
    """Join the sets of single vertices that can run as one."""
    groups: dict[Any, list[VertexSet]] = {}
    for i, vertices in enumerate(sets):
        key = _merge_key(vertices)
        groups.setdefault(i if key is None else key, []).append(vertices)
    out = []
    for group in groups.values():
        first = group[0]
        if len(group) > 1:
            edges = {name: _stack([v.edges[name] for v in group]) for name in first.edges}
            tiles = np.concatenate([v.tiles for v in group])
            first = VertexSet(first.codelet, tiles, edges, {}, first.scalars)
        out.append(first)
    return out


@dataclass(eq=False)
class Variable:
    """One contiguous stretch of the memory of its type. `tensor` views all of it; `made_by` holds
    the calls that created it."""

    name: str
    tensor: Tensor
    start: int
    is_constant: bool
    made_by: Callers = ()

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

    def __init__(self, graph: Any, name: str) -> None:
        self.graph = getattr(graph, "root", graph)
        self.name = name
        self.vertex_sets: list[VertexSet] = []
        self._merged: tuple[int, list[VertexSet]] = (0, [])

    def merged(self) -> list[VertexSet]:
        """The vertices as they run: those added one by one are joined into sets."""
        if self._merged[0] != len(self.vertex_sets):
            self._merged = (len(self.vertex_sets), merge_vertices(self.vertex_sets))
        return self._merged[1]


@dataclass(eq=False)
class Stream:
    """Data between host and machine, `numel` elements at a time."""

    name: str
    dtype: DType
    numel: int
    to_device: bool


@dataclass(eq=False)
class RemoteBuffer:
    """Rows of elements in the memory beside a processor, far larger and far slower than that of its
    tiles. Made by `Graph.add_remote_buffer`; `Copy` moves rows.

    Attributes:
        numel: elements of a row, which one copy moves.
        rows: number of rows.
    """

    name: str
    dtype: DType
    numel: int
    rows: int

    @property
    def bytes(self) -> int:
        return self.numel * self.rows * self.dtype.size


class Graph:
    """Variables with tile mappings, constants, compute sets and vertices, for one target.

    Args:
        target: the machine.
        replicas: number of copies of the program that run side by side, each on its share of the
            processors and with its own variables; `graph.target` is the share of one replica.

    Attributes:
        root: the graph itself; for a virtual graph, the graph it is part of.

    Raises:
        TypeError: not a target. ValueError: replicas cannot share the processors evenly.
    """

    def __init__(self, target: Target, replicas: int = 1) -> None:
        check_kind("target", target, Target, "a Target")
        self.replicas = check_integer("replicas", replicas, 1)
        self.target = target.share(self.replicas)
        self.root: Graph = self
        self.remote_buffers: dict[str, RemoteBuffer] = {}
        self.variables: dict[DType, list[Variable]] = {}
        self.sizes: dict[DType, int] = {}
        self.initial: list[tuple[Tensor, np.ndarray]] = []
        self.handles: dict[str, Tensor] = {}
        self.streams: dict[str, Stream] = {}
        self._tile_numbers: np.ndarray | None = None
        self._assignments: dict[DType, list[tuple[Runs, np.ndarray]]] = {}
        self._maps: dict[DType, TileMap] = {}

    # Variables.

    def _add_tensor(
        self,
        dtype: Any,
        shape: Any,
        name: str | None,
        tiles: Any,
        values: np.ndarray | None = None,
    ) -> Tensor:
        """Add a variable, or a constant with these values; none if an argument is invalid."""
        is_constant = values is not None
        dtype = as_dtype(dtype)
        dimensions = list(shape) if isinstance(shape, Sequence) else [shape]
        sizes = [check_integer("a size of a shape", n) for n in dimensions]
        if any(n < 0 for n in sizes) or math.prod(sizes) >= _MOST:
            raise ValueError(
                f"expected sizes of at least 0 and below 2^48 in all, got {shorten(sizes)}"
            )
        check_kind("name", name, (str, type(None)), "a text or None")
        group = self.variables.setdefault(dtype, [])
        start = self.sizes.get(dtype, 0)
        strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
        tensor = Tensor(self, dtype, sizes, start, tuple(strides))
        name = name or f"{'constant' if is_constant else 'variable'}{len(group)}"
        group.append(Variable(name, tensor, start, is_constant, find_callers()))
        end = start + tensor.numel + 1
        self.sizes[dtype] = -(-end // _ALIGNMENT) * _ALIGNMENT
        self._maps.pop(dtype, None)
        try:
            if tiles is not None:
                self.set_tile_mapping(tensor, tiles)
            if is_constant:
                self.set_initial_value(tensor, values)
        except Exception:
            group.pop()
            raise
        return tensor

    def add_variable(
        self, dtype: Any, shape: Any, name: str | None = None, tiles: Any = None
    ) -> Tensor:
        """Add a variable of this element type and shape; it holds NaN (or poison) until written.

        `tiles` maps it as `set_tile_mapping` does.
        """
        return self._add_tensor(dtype, shape, name, tiles)

    def add_constant(
        self, dtype: Any, shape: Any, values: Any, name: str | None = None, tiles: Any = None
    ) -> Tensor:
        """Add a variable that nothing may write. `values` broadcast to `shape`.

        It needs a mapping like any other variable.

        Raises:
            TypeError: fractional values for an integer type.
            ValueError: a wrong shape, or integers that do not fit the type.
        """
        array = convert_values("values", values, as_dtype(dtype))
        return self._add_tensor(dtype, shape, name, tiles, array)

    def set_initial_value(self, tensor: Tensor, values: Any) -> None:
        """Set the values that the tensor holds when an engine is created."""
        self._check_tensor(tensor)
        array = convert_values("values", values, tensor.dtype)
        self.initial.append((tensor, np.broadcast_to(array, tensor.shape)))

    def variable_at(self, dtype: DType, address: int) -> Variable:
        group = self.variables[dtype]
        starts = [v.start for v in group]
        return group[int(np.searchsorted(starts, address, "right")) - 1]

    def names_of(self, tensor: Tensor) -> str:
        """The names of the variables a tensor views, for messages."""
        if tensor.numel == 0:
            return "nothing"
        starts = np.array([v.start for v in self.variables[tensor.dtype]])
        numbers = np.unique(np.searchsorted(starts, tensor.runs().starts, "right") - 1)
        names = [repr(self.variables[tensor.dtype][i].name) for i in numbers[:4]]
        return ", ".join(names) + (", ..." if len(numbers) > 4 else "")

    def constant_in(self, tensor: Tensor) -> Variable | None:
        """The first constant a tensor views, if any."""
        runs = tensor.runs()
        for variable in self.variables[tensor.dtype]:
            if variable.is_constant and tensor.numel:
                overlaps = (runs.starts < variable.stop) & (runs.ends > variable.start)
                if bool(overlaps.any()):
                    return variable
        return None

    # Tile mapping.

    def _check_tensor(self, tensor: Any) -> Tensor:
        check_kind("tensor", tensor, Tensor, "a Tensor of the graph")
        if tensor.graph is not self.root:
            raise ValueError("the tensor belongs to another graph")
        return tensor

    def set_tile_mapping(self, tensor: Tensor, tiles: Any) -> None:
        """Map elements to tiles.

        `tiles` is one tile for the whole tensor, or an integer array over the tensor's leading
        dimensions: `tiles[i]` holds `tensor[i]`, `tiles[i, j]` holds `tensor[i, j]`. A later
        mapping of the same elements replaces an earlier one.

        Raises:
            MappingError: a tile that does not exist, or tiles of another shape.
        """
        tensor = self._check_tensor(tensor)
        where = check_array("tiles", tiles, "iu", "integers")
        if where.shape != tensor.shape[: where.ndim]:
            raise MappingError(
                f"tiles of the shape {list(where.shape)} must match the leading dimensions of "
                f"{tensor.name} {list(tensor.shape)}"
            )
        flat = self._machine_tiles(where.reshape(-1), f"{tensor.name} is mapped to")
        if tensor.numel == 0:
            return
        runs, entry = tensor.runs_by_entry(where.ndim)
        owner = flat[entry]
        # Programs map row by row.
        joined, first = runs.join(owner)
        self._assign(tensor.dtype, joined, owner[first])

    def _assign(self, dtype: DType, runs: Runs, owner: np.ndarray) -> None:
        self._assignments.setdefault(dtype, []).append((runs, owner))
        self._maps.pop(dtype, None)

    def map_stretches(self, tensor: Tensor, tiles: Any, lengths: Any) -> None:
        """Map the elements in order: the next `lengths[i]` of them to `tiles[i]`.

        Both are integers [stretches]; the lengths add up to the tensor's elements.
        """
        tensor = self._check_tensor(tensor)
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
        where = self._machine_tiles(where, f"{tensor.name} is mapped to")
        filled = size > 0
        size, where = size[filled], where[filled]
        if not size.size:
            return
        stretches = Runs(np.cumsum(size) - size, size)
        starts, offsets, run_lengths = refine(tensor.runs(), stretches)
        owner = where[np.searchsorted(stretches.starts, offsets, "right") - 1]
        self._assign(tensor.dtype, Runs(starts, run_lengths), owner)

    def map_linearly(self, tensor: Tensor, grain: int = 1, min_per_tile: int = 1) -> None:
        """Spread the elements in order over the tiles, as evenly as whole grains allow.

        Each tile gets a multiple of `grain` elements and at least `min_per_tile`.
        """
        tensor = self._check_tensor(tensor)
        grain = check_integer("grain", grain, 1)
        min_per_tile = check_integer("min_per_tile", min_per_tile, 1)
        grains = -(-tensor.numel // grain)
        tiles = min(self.target.tiles, max(1, tensor.numel // min_per_tile))
        per_tile = -(-grains // tiles) * grain
        starts = np.arange(0, tensor.numel, max(per_tile, 1))
        lengths = np.minimum(starts + per_tile, tensor.numel) - starts
        self.map_stretches(tensor, np.arange(len(starts)), lengths)

    def tile_map(self, dtype: DType) -> TileMap:
        """The tile of every address of a type."""
        if dtype not in self._maps:
            parts = self._assignments.get(dtype, [])
            self._maps[dtype] = TileMap.from_assignments(self.sizes[dtype], parts)
            if parts:
                self._assignments[dtype] = [_as_assignment(self._maps[dtype])]
        return self._maps[dtype]

    def tiles_of(self, tensor: Tensor) -> np.ndarray:
        """The tile of every element, int64 of the tensor's shape; -1 for unmapped elements, and in
        a virtual graph for tiles outside it."""
        pieces = self.tile_map(self._check_tensor(tensor).dtype).split(tensor.runs())
        tiles = pieces.tiles
        if self._tile_numbers is not None:
            number = np.full(self.root.target.tiles + 1, -1)
            number[self._tile_numbers] = np.arange(len(self._tile_numbers))
            tiles = number[tiles]
        return np.repeat(tiles, pieces.lengths).reshape(tensor.shape)

    def _machine_tiles(self, tiles: np.ndarray, subject: str) -> np.ndarray:
        """Tiles of this graph as tiles of the machine, int64.

        Raises:
            MappingError: a tile that does not exist; the message begins with `subject`.
        """
        outside = tiles[(tiles < 0) | (tiles >= self.target.tiles)]
        if outside.size:
            raise MappingError(
                f"{subject} tile {outside.flat[0]}; the target has tiles 0 to "
                f"{self.target.tiles - 1}"
            )
        numbers = tiles.astype(np.int64)
        return numbers if self._tile_numbers is None else self._tile_numbers[numbers]

    def virtual(self, *, tiles: Any = None, processor: int | None = None) -> Graph:
        """A view of the graph restricted to some of its tiles, numbered from 0.

        Variables and vertices added through it are placed on these tiles. Variables, names and
        programs are shared: each view may copy and run what another added.

        Args:
            tiles: distinct tiles of this graph, int [any], neighbours on a bus side by side.
            processor: use all tiles of this processor, in place of `tiles`.

        Raises:
            ValueError: both or none of them; a tile or processor that does not exist.
        """
        if (tiles is None) == (processor is None):
            raise ValueError("a virtual graph takes either tiles or a processor: give one of them")
        if processor is not None:
            number, each = check_integer("processor", processor, 0), self.target.processor_tiles
            if number >= self.target.processors:
                raise ValueError(f"processor must be below {self.target.processors}, got {number}")
            tiles = np.arange(number * each, (number + 1) * each)
        where = check_array("tiles", tiles, "iu", "integers [tiles]")
        if where.ndim != 1 or not where.size or len(np.unique(where)) != len(where):
            raise ValueError(f"tiles must be distinct integers [tiles], got {shorten(tiles)}")
        view = copy(self)
        view._tile_numbers = self._machine_tiles(where, "a virtual graph has")
        across = view._tile_numbers // self.root.target.processor_tiles
        processors = len(np.unique(across))
        if processors > 1 and len(where) % processors:
            raise ValueError("a virtual graph over several processors needs as many tiles of each")
        view.target = self.root.target.with_(tiles=len(where), processors=processors)
        return view

    # Vertices.

    @check_types
    def add_compute_set(self, name: str) -> ComputeSet:
        return ComputeSet(self, name)

    def add_vertices(
        self, compute_set: ComputeSet, codelet: Codelet, tiles: Any, values: Mapping[str, Any]
    ) -> VertexSet:
        """Add many vertices of one codelet, which run as one call.

        Args:
            compute_set: the compute set they are added to.
            codelet: the codelet they run.
            tiles: the tile of each vertex, [vertices]; or a grid of any shape, e.g.
                [tiles, workers], so that broadcast views can share an operand among vertices.
            values: for each field a tensor [*grid, ...] (vertex i gets entry i), or a `Ragged`
                for a plain list of vertices; for each scalar a number or an array [*grid].

        Raises:
            TypeError, ValueError: a field missing, unknown, or of a wrong type or count.
            MappingError: a tile that does not exist.
        """
        check_kind("compute_set", compute_set, ComputeSet, "a ComputeSet")
        check_kind("codelet", codelet, Codelet, "a Codelet")
        check_kind("values", values, Mapping, "tensors and numbers by name")
        if compute_set.graph is not self.root:
            raise ValueError(f"compute set {compute_set.name!r} belongs to another graph")
        grid = check_array("tiles", tiles, "iu", "integers [vertices]")
        if not grid.ndim:
            raise TypeError(f"tiles must be integers [vertices], got {grid.dtype} {grid.shape}")
        machine_grid = self._machine_tiles(grid, f"{codelet.name!r} is placed on")
        names = {*codelet.fields, *codelet.scalars}
        if names != set(values):
            raise ValueError(
                f"codelet {codelet.name!r} takes {sorted(names)}, got {shorten([*values])}"
            )
        edges: dict[str, Tensor] = {}
        offsets: dict[str, np.ndarray] = {}
        for name, edge in codelet.fields.items():
            value = values[name]
            tensor = self._check_tensor(value.tensor if isinstance(value, Ragged) else value)
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
        vertices = VertexSet(codelet, machine_grid, edges, offsets, scalars)
        compute_set.vertex_sets.append(vertices)
        return vertices

    def add_vertex(
        self, compute_set: ComputeSet, codelet: Codelet, tile: int, values: Mapping[str, Any]
    ) -> VertexSet:
        """Add one vertex. Fields are tensors without the leading axis of `add_vertices`."""
        check_kind("values", values, Mapping, "tensors and numbers by name")
        lifted = {
            name: value.expand_dims(0) if isinstance(value, Tensor) else value
            for name, value in values.items()
        }
        return self.add_vertices(
            compute_set, codelet, np.array([check_integer("tile", tile)]), lifted
        )

    # Host access.

    @check_types
    def add_handle(self, name: str, tensor: Tensor) -> None:
        """Let the host read and write a tensor by this name, outside programs and for free."""
        if name in self.handles:
            raise ValueError(f"the handle {name!r} exists already")
        self.handles[name] = self._check_tensor(tensor)

    @check_types
    def add_stream(self, name: str, dtype: Any, numel: int, *, to_device: bool) -> Stream:
        """Add a stream for `Copy`: `numel` elements at a time, to or from the machine."""
        if name in self.streams:
            raise ValueError(f"the stream {name!r} exists already")
        stream = Stream(name, as_dtype(dtype), check_integer("numel", numel, 0), to_device)
        self.streams[name] = stream
        return stream

    @check_types
    def add_remote_buffer(self, name: str, dtype: Any, numel: int, rows: int = 1) -> RemoteBuffer:
        """Add memory beside the processor for `Copy`: `rows` of `numel` elements, initially zero.

        Each replica has its own buffer.

        Raises:
            ValueError: a name that exists, fewer than one row or element, a row above 128 MiB.
            OutOfMemoryError: more memory than the processors have beside them.
        """
        if name in self.remote_buffers:
            raise ValueError(f"the remote buffer {name!r} exists already")
        numel, rows = check_integer("numel", numel, 1), check_integer("rows", rows, 1)
        buffer = RemoteBuffer(name, as_dtype(dtype), numel, rows)
        row_bytes = numel * buffer.dtype.size
        if row_bytes > _MOST_REMOTE:
            raise ValueError(
                f"a row of a remote buffer has at most {_MOST_REMOTE:,} bytes, got "
                f"{row_bytes:,}: use more rows"
            )
        beside = self.root.target.processors * self.root.target.remote_bytes
        taken = buffer.bytes + sum(other.bytes for other in self.remote_buffers.values())
        if taken > beside:
            raise OutOfMemoryError(
                f"remote buffers take {taken:,} bytes, with {name!r}, of the {beside:,} beside "
                f"{self.root.target.processors} processors"
            )
        self.remote_buffers[name] = buffer
        return buffer


def _as_assignment(tile_map: TileMap) -> tuple[Runs, np.ndarray]:
    mapped = tile_map.tiles >= 0
    starts = tile_map.bounds[:-1][mapped]
    return Runs(starts, np.diff(tile_map.bounds)[mapped]), tile_map.tiles[mapped]
