"""Embedding: rows of a sparse table, and updates of them.

The same weights serve as the output projection of a language model (tied embeddings), so the
operations work on the buckets of a fully connected layer: the sparse matrix is [entries, size].
Each tile gathers the columns of its y partition for a share of the indices. Every bucket of those
columns has to pass by: the buckets of equal y go round once, and again for each distance in y in
the overflow record. An update works the other way round: indices and slices travel, and buckets
stay. See section 5.4 of docs/popsparse-formulas.md.

`EmbeddingLayer` is the short way to `embedding_slice` and `embedding_update_add`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dynsparse._core.checks import check_integer, check_types, is_number, shorten
from popsparse.encoding.partitioner import EncodedPattern, Partitioner
from popsparse.formats import to_numpy
from popsparse.machine import (
    BOOL,
    FLOAT,
    HALF,
    UNSIGNED_INT,
    UNSIGNED_SHORT,
    Codelet,
    Copy,
    DType,
    Engine,
    Execute,
    Graph,
    In,
    Out,
    Profile,
    Repeat,
    RepeatWhileTrue,
    Sequence,
    Tensor,
    VertexView,
    codelets,
)
from popsparse.planning.options import Options
from popsparse.planning.params import FullyConnectedParams, ceil_div
from popsparse.planning.plan import Plan, PlanningCache
from popsparse.planning.search import make_plan
from popsparse.programs.codelets import EmbeddingCodelets
from popsparse.programs.layout import (
    HOST_ORDER,
    PlannedTensor,
    SparseTensor,
    check_weights,
    control_tile,
    execute,
    reorder,
    tile_grid,
)
from popsparse.programs.product import RotatingBuckets

_PADDING = np.iinfo(np.uint32).max


@dataclass(frozen=True)
class SliceLayout:
    """Tiles of equal y share the indices among them; each holds the columns of its y.

    The tiles are [1, y, ring]: those of equal y form a ring, x by x.
    """

    plan: Plan
    num_indices: int

    @property
    def tiles(self) -> np.ndarray:
        return tile_grid(self.plan, "gyxz").reshape(1, self.plan.partition.y, -1)

    @property
    def columns(self) -> np.ndarray:
        """The y of every tile."""
        return np.indices(self.tiles.shape)[1]

    def order_by_ring(self, buckets: Tensor) -> Tensor:
        """View words or values of buckets [1, x, y, z, ...] in the order of the tiles."""
        ordered = reorder(buckets, "gxyz", "gyxz")
        return ordered.reshape(*self.tiles.shape, *buckets.shape[4:])

    @property
    def share(self) -> int:
        """Number of indices on each tile."""
        return ceil_div(self.num_indices, self.plan.partition.x * self.plan.partition.z)

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_indices, self.plan.sizes.y

    def add(self, graph: Graph, dtype: DType, name: str) -> Tensor:
        """A variable for rows, [*grid, indices of a tile, columns of a tile]."""
        shape = [*self.tiles.shape, self.share, self.plan.elements_per_tile.y]
        tensor = graph.add_variable(dtype, shape, name, tiles=self.tiles)
        graph.set_initial_value(tensor, 0)
        return tensor

    def add_indices(self, graph: Graph, indices: Tensor, steps: Sequence, name: str) -> Tensor:
        """The indices of each tile, [*grid, indices of a tile]; a new step copies them there."""
        tiles, count = self.tiles, self.num_indices
        local = graph.add_variable(UNSIGNED_INT, [*tiles.shape, self.share], name, tiles=tiles)
        graph.set_initial_value(local, _PADDING)
        parts = tiles.shape[1]
        here = local.reshape(parts, -1)[:, :count]
        steps.add(Copy(indices.broadcast_to(parts, count), here, name="distribute indices"))
        return local

    def natural(self, home: Tensor) -> PlannedTensor:
        """View rows in this layout as [num_indices, columns]."""
        at = home.addresses()
        parts_y, columns = at.shape[1], at.shape[-1]
        at = at.reshape(parts_y, -1, columns)[:, : self.num_indices].transpose(1, 0, 2)
        return PlannedTensor(home, at.reshape(self.num_indices, -1)[:, : self.plan.sizes.y], self)


def _add_round(
    graph: Graph,
    weights: SparseTensor,
    layout: SliceLayout,
    name: str,
    codelet: Codelet,
    passing: Mapping[str, Tensor],
    staying: Mapping[str, Any],
    way: int,
    steps: Sequence,
) -> None:
    """Add steps that pass data round the tiles of equal y, then on to the next y as often as the
    overflow record says.

    Args:
        codelet: runs on every tile at every turn.
        passing: fields that travel, [*tiles, ...].
        staying: the other fields.
        way: +1 if a tile receives from the next one, -1 from the one before.
    """
    tiles = layout.tiles
    moving = {
        field: RotatingBuckets.create_like(graph, home, "gyr", tiles, f"{name} passing {field}")
        for field, home in passing.items()
    }
    compute = []
    for n in (0, 1):
        edges = {**staying, **{field: rotating.buffers[n] for field, rotating in moving.items()}}
        compute.append(execute(graph, f"{name} {n}", codelet, tiles, edges, f"compute {n}"))

    def move(source: int, dim: str) -> Copy:
        pairs = [pair for rotating in moving.values() for pair in rotating.move(source, dim, way)]
        return Copy(pairs, name=f"pass on {'xz' if dim == 'r' else 'y'} {source}")

    around = tiles.shape[2]
    turns = Sequence(name="round")
    if around == 1:
        turns.add(compute[0])
    else:
        both = Sequence(compute[0], move(0, "r"), compute[1], move(1, "r"))
        turns.add(Repeat(around // 2, both))
        if around % 2:
            turns.add(compute[0], move(0, "r"))
    at = around % 2 if around > 1 else 0
    load = [(home, moving[field].buffers[0]) for field, home in passing.items()]
    steps.add(Copy(load, name="load"))
    if tiles.shape[1] == 1:
        steps.add(turns)
        return
    turns.add(move(at, "y"))
    if at == 0:
        back = [rotating.buffers[::-1] for rotating in moving.values()]
        turns.add(Copy(back, name="copy back"))
    tile = control_tile(layout.plan)
    count = graph.add_variable(UNSIGNED_INT, [1], f"{name} count", tiles=tile)
    more = graph.add_variable(BOOL, [1], f"{name} goes on", tiles=tile)

    def step(what: str, codelet: Codelet, edges: dict) -> Execute:
        compute = graph.add_compute_set(f"{name} {what}")
        graph.add_vertex(compute, codelet, tile, edges)
        return Execute(compute, name=what)

    begin = step("count", _COUNT, {"words": weights.overflow, "count_of_y": count})
    test = step("loop condition", codelets.NOT_ZERO, {"value": count, "out": more})
    less = step("decrement", codelets.DECREMENT, {"value": count})
    steps.add(begin, RepeatWhileTrue(test, more[0], Sequence(turns, less), name="loop"))


def _count_words(v: VertexView) -> None:
    v.count_of_y[...] = v.words[..., 1:2]


_COUNT = Codelet(
    "count", {"words": In(UNSIGNED_SHORT), "count_of_y": Out(UNSIGNED_INT)}, _count_words, 20
)


# The fewest indices on a tile (section 5.4 of docs/popsparse-formulas.md).
_LEAST_INDICES = 32


@check_types
def create_indices_tensor(
    graph: Graph, params: FullyConnectedParams, num_indices: int, *, name: str = "indices"
) -> Tensor:
    """Create row indices, uint32 [num_indices], spread over the tiles.

    Raises:
        ValueError: fewer than one index; several groups.
    """
    _require_one_group(params)
    count = _check_num_indices(num_indices, graph)
    indices = graph.add_variable(UNSIGNED_INT, [count], name)
    graph.map_linearly(indices, min_per_tile=_LEAST_INDICES)
    return indices


@check_types
def create_slice_tensor(
    graph: Graph,
    dtype: Any,
    params: FullyConnectedParams,
    num_indices: int,
    options: Options | dict[str, Any] | None = None,
    cache: PlanningCache | None = None,
    *,
    name: str = "slices",
) -> PlannedTensor:
    """Create rows to add to the matrix, [num_indices, input channels], in the layout updates need.

    Raises:
        ValueError: fewer than one index; several groups; options that no plan satisfies.
    """
    _require_one_group(params)
    plan = make_plan(graph.target, dtype, params, options, cache)
    layout = SliceLayout(plan, _check_num_indices(num_indices, graph))
    return layout.natural(layout.add(graph, plan.dtype, name))


def _check_num_indices(num_indices: Any, graph: Graph) -> int:
    count = check_integer("num_indices", num_indices, 1)
    room = graph.target.tiles * graph.target.bytes_per_tile
    if count * UNSIGNED_INT.size > room:
        raise ValueError(f"num_indices must fit the {room:,} bytes of all tiles, got {count:,}")
    return count


def _require_one_group(params: FullyConnectedParams) -> None:
    if params.num_groups != 1:
        raise ValueError(f"an embedding has one group, got num_groups={params.num_groups}")


def _check_operands(
    weights: Any,
    indices: Tensor,
    params: FullyConnectedParams,
    options: Any,
    cache: PlanningCache | None,
) -> Plan:
    _require_one_group(params)
    plan = check_weights(weights, params, options, cache).plan
    if plan.use_dense:
        raise ValueError("an embedding needs sparse weights: leave out use_dense")
    if indices.ndim != 1 or indices.dtype != UNSIGNED_INT:
        raise ValueError(
            "indices must be uint32 [num_indices] as create_indices_tensor makes them, got "
            f"{indices.dtype.name} {list(indices.shape)}"
        )
    return plan


@check_types
def embedding_slice(
    graph: Graph,
    weights: SparseTensor,
    indices: Tensor,
    program: Sequence,
    params: FullyConnectedParams,
    options: Options | dict[str, Any] | None = None,
    cache: PlanningCache | None = None,
) -> PlannedTensor:
    """Add a gather of rows to a program.

    Args:
        weights: of a fully connected layer, [entries, size].
        indices: uint32 [num_indices], below the number of entries.
        cache: keeps the plan of the weights.

    Returns:
        [num_indices, size]: rows of the sparse matrix, zeros included. An index out of range gives
        a row of zeros.

    Raises:
        ValueError: weights made for other parameters or options, indices of another type or shape.
    """
    plan = _check_operands(weights, indices, params, options, cache)
    layout = SliceLayout(plan, indices.shape[0])
    steps = Sequence(name="embedding slice")
    program.add(steps)
    local = layout.add_indices(graph, indices, steps, "slice indices")
    slices = layout.add(graph, plan.dtype, "embedding slices")
    zero = {"out": slices, "value": 0}
    steps.add(execute(graph, "zero slices", codelets.FILL, layout.tiles, zero))
    codelet = EmbeddingCodelets(plan).gather
    passing = {
        "words": layout.order_by_ring(weights.pass_words("forward", "gxyz")),
        "values": layout.order_by_ring(weights.values),
    }
    staying = {"indices": local, "slices": slices, "column": layout.columns}
    _add_round(graph, weights, layout, "slice", codelet, passing, staying, -1, steps)
    return layout.natural(slices)


@check_types
def embedding_update_add(
    graph: Graph,
    weights: SparseTensor,
    slices: Tensor,
    indices: Tensor,
    scale: Tensor | float,
    program: Sequence,
    params: FullyConnectedParams,
    options: Options | dict[str, Any] | None = None,
    cache: PlanningCache | None = None,
) -> None:
    """Add an update to a program: matrix[indices] += scale x slices, where the matrix has values.

    Sums are accumulated in float32 and rounded once, when they are added.

    Args:
        slices: [num_indices, size], of the weights' type.
        indices: uint32 [num_indices]; an index may repeat.
        scale: a number, or a scalar tensor (float16 or float32).
        cache: keeps the plan of the weights.

    Raises:
        ValueError: as `embedding_slice`; slices or scale of another shape; options without
            `do_grad_w_pass`.
    """
    plan = _check_operands(weights, indices, params, options, cache)
    if not plan.options.do_grad_w_pass:
        raise ValueError("embedding_update_add needs the option do_grad_w_pass=True")
    layout = SliceLayout(plan, indices.shape[0])
    dtype = plan.dtype
    if list(slices.shape) != list(layout.shape) or slices.dtype != dtype:
        raise ValueError(
            f"slices must be {dtype.name} {list(layout.shape)}, got {slices.dtype.name} "
            f"{list(slices.shape)}"
        )
    steps = Sequence(name="embedding update")
    program.add(steps)
    local = layout.add_indices(graph, indices, steps, "update indices")
    if isinstance(slices, PlannedTensor) and slices.layout == layout:
        home = slices.home
    else:
        home = layout.add(graph, dtype, "slices at home")
        steps.add(Copy(slices, layout.natural(home), name="regroup"))
    tiles = layout.tiles
    partials = graph.add_variable(
        FLOAT, [*tiles.shape, plan.buckets.nz_elements], "update partials", tiles=tiles
    )
    zero = {"out": partials, "value": 0}
    steps.add(execute(graph, "zero partials", codelets.FILL, tiles, zero))
    column = graph.add_constant(
        UNSIGNED_INT, tiles.shape, layout.columns, "own column", tiles=tiles
    )
    staying = {
        "words": layout.order_by_ring(weights.pass_words("forward", "gxyz")),
        "partials": partials,
        "scale": _spread_scale(graph, scale, tiles, steps),
    }
    passing = {"indices": local, "slices": home, "column": column}
    codelet = EmbeddingCodelets(plan).scatter
    _add_round(graph, weights, layout, "update", codelet, passing, staying, 1, steps)
    edges = {"a": layout.order_by_ring(weights.values), "b": partials, "scale": 1.0}
    steps.add(execute(graph, "add update", codelets.ADD_SCALED, tiles, edges))


def _spread_scale(graph: Graph, scale: Any, tiles: np.ndarray, steps: Sequence) -> Tensor:
    """The scale on every tile, float."""
    if not isinstance(scale, Tensor):
        if not is_number(scale):
            raise TypeError(f"scale must be a number or a Tensor, got {shorten(scale)}")
        return graph.add_constant(FLOAT, tiles.shape, float(scale), "scale", tiles=tiles)
    if scale.numel != 1 or scale.dtype not in (FLOAT, HALF):
        raise ValueError(
            f"scale must be a number or one float16 or float32, got {scale.dtype.name} "
            f"{list(scale.shape)}"
        )
    local = graph.add_variable(scale.dtype, tiles.shape, "scale of tile", tiles=tiles)
    steps.add(Copy(scale.reshape(1).broadcast_to(*tiles.shape), local, name="broadcast scale"))
    if scale.dtype == FLOAT:
        return local
    wide = graph.add_variable(FLOAT, tiles.shape, "scale in float", tiles=tiles)
    steps.add(execute(graph, "cast scale", codelets.CAST, tiles, {"src": local, "out": wide}))
    return wide


class EmbeddingLayer:
    """A table [entries, size] of one plan, looked up for `num_indices` indices at a time.

    Args:
        plan: the plan of a layer whose outputs are the entries; the gradient needs
            `do_grad_w_pass`.
        num_indices: indices of each call.

    Attributes:
        profiles: profiles of the last runs of "slice" and "gradient", by name.

    Raises:
        OutOfMemoryError: a tile that does not fit.
        ValueError: a plan of dense weights or of several groups.
    """

    @check_types
    def __init__(self, plan: Plan, num_indices: int) -> None:
        self.plan, self.num_indices = plan, check_integer("num_indices", num_indices, 1)
        self.profiles: dict[str, Profile] = {}
        self._encoded: EncodedPattern | None = None
        self._partitioner = Partitioner(plan)
        graph = Graph(plan.target)
        settings = plan.params, plan.options
        weights = SparseTensor.create(graph, plan, "table")
        indices = create_indices_tensor(graph, plan.params, self.num_indices)
        look_up = Sequence()
        rows = embedding_slice(graph, weights, indices, look_up, *settings)
        graph.add_handle("rows", rows)
        programs = {"slice": look_up}
        if plan.options.do_grad_w_pass:
            programs["gradient"] = self._gradient(graph, weights, indices)
        graph.add_handle("words", weights.meta_info)
        graph.add_handle("values", weights.nz_values)
        graph.add_handle("indices", indices)
        self.engine = Engine(graph, programs)

    def _gradient(self, graph: Graph, weights: SparseTensor, indices: Any) -> Sequence:
        """Steps that add rows into zeros laid out like the values."""
        plan = self.plan
        tiles = tile_grid(plan, HOST_ORDER)
        values = graph.add_variable(
            weights.values.dtype, weights.values.shape, "gradient of table", tiles=tiles
        )
        gradient = replace(weights, nz_values=values.flatten(), values=values)
        slices = create_slice_tensor(
            graph, plan.dtype, plan.params, self.num_indices, plan.options, name="gradient of rows"
        )
        program = Sequence()
        zero = {"out": values, "value": 0}
        program.add(execute(graph, "zero gradient", codelets.FILL, tiles, zero))
        settings = plan.params, plan.options
        embedding_update_add(graph, gradient, slices, indices, 1.0, program, *settings)
        graph.add_handle("gradient of rows", slices)
        graph.add_handle("gradient", gradient.nz_values)
        return program

    def set_weights(self, pattern: Any, values: Any) -> None:
        """Encode and write a pattern and its values; raises what `Layer.set_weights` raises."""
        encoded = self._partitioner.encode(pattern, values)
        self._encoded = encoded.pattern
        self.engine.write("words", encoded.meta_info)
        self.engine.write("values", encoded.nz_values)

    def set_values(self, values: Any) -> None:
        """Write values of the pattern that was set; raises what `Layer.set_values` raises."""
        self.engine.write("values", self._require_encoded().place(to_numpy(values)))

    def slice(self, indices: Any) -> np.ndarray:
        """The rows of the table at `indices` [num_indices]: [num_indices, size]."""
        self._require_encoded()
        self.engine.write("indices", indices)
        self.profiles["slice"] = self.engine.run("slice")
        return self.engine.read("rows")

    def gradient(self, indices: Any, rows: Any) -> np.ndarray:
        """Sum rows [num_indices, size] where the pattern has values: [nnz] or [nnz, b, b]."""
        self._require_encoded()
        self.engine.write("indices", indices)
        self.engine.write("gradient of rows", rows)
        self.profiles["gradient"] = self.engine.run("gradient")
        return self._require_encoded().gather(self.engine.read("gradient"))

    def _require_encoded(self) -> EncodedPattern:
        """The encoded pattern; raises ValueError if none is set."""
        if self._encoded is None:
            raise ValueError("set a pattern first")
        return self._encoded
