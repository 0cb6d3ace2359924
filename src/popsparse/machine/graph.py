"""Variables on tiles, and the compute sets of vertices that work on them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dynsparse.checks import check_array, check_integer, check_kind
from dynsparse.files.shorten import shortened
from dynsparse.typed import typed
from popsparse.machine.dtypes import DType, MappingError, as_dtype
from popsparse.machine.mapping import TileMapping
from popsparse.machine.objects import ComputeSet, RemoteBuffer, Stream, Variable, callers
from popsparse.machine.target import Target
from popsparse.machine.tensor import Tensor
from popsparse.machine.vertex import Codelet, Ragged, VertexSet

# Variables start at multiples of this many elements, so that rows can be loaded as vectors, and at
# least one element apart, so that no run of addresses crosses from one into the next.
_ALIGNMENT = 64
_MOST = 2**48

# Of one transfer of a remote buffer: Graphcore's cookbook.
_MOST_REMOTE = 128 * 2**20


class Graph(TileMapping):
    """Variables with tile mappings, constants, compute sets and vertices, for one target.

    Args:
        target: the machine.
        replicas: so many copies of the program run side by side, each on its share of the
            processors and with variables of its own; `graph.target` is what one of them has.

    Attributes:
        root: the graph itself; of a virtual graph, that which it is part of.

    Raises:
        TypeError: no target. ValueError: processors that replicas cannot share evenly.
    """

    def __init__(self, target: Target, replicas: int = 1) -> None:
        if not isinstance(target, Target):
            raise TypeError(f"Graph takes a Target, got {type(target).__name__}")
        self.replicas = check_integer("replicas", replicas, 1)
        self.target = target.share(self.replicas)
        super().__init__()
        self.remote_buffers: dict[str, RemoteBuffer] = {}
        self.variables: dict[DType, list[Variable]] = {}
        self.sizes: dict[DType, int] = {}
        self.initial: list[tuple[Tensor, np.ndarray]] = []
        self.handles: dict[str, Tensor] = {}
        self.streams: dict[str, Stream] = {}

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
        group.append(Variable(name, tensor, start, is_constant, callers()))
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
        if compute_set.graph is not self.root:
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
        made = VertexSet(codelet, self._placed(grid), edges, offsets, scalars)
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

    @typed
    def add_remote_buffer(self, name: str, dtype: Any, numel: int, rows: int = 1) -> RemoteBuffer:
        """Memory beside the processor for `Copy`: `rows` of `numel` elements each, zeros at first.

        Each replica has one of its own.

        Raises:
            ValueError: a name that exists, fewer than one row or element, a row above 128 MiB.
        """
        if name in self.remote_buffers:
            raise ValueError(f"the remote buffer {name!r} exists already")
        made = RemoteBuffer(
            name, as_dtype(dtype), check_integer("numel", numel, 1), check_integer("rows", rows, 1)
        )
        if made.numel * made.dtype.size > _MOST_REMOTE:
            raise ValueError(
                f"a row of a remote buffer has at most {_MOST_REMOTE:,} bytes, got "
                f"{made.numel * made.dtype.size:,}: use more rows"
            )
        self.remote_buffers[name] = made
        return made
