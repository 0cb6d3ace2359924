"""A sparse matrix as an embedding on the tile machine: rows gathered, and updated.

The same weights serve as the output projection of a language model (tied embeddings), so the
operations work on the buckets of a fully connected layer: the sparse matrix is [entries, size].
Each tile gathers for a share of the indices and for the columns of its y partition. Every bucket
of those columns has to pass by: the buckets of equal y go round once, and again for each distance
in y that the overflow record names. An update works the other way round: indices and slices
travel, and buckets stay. See section 5.4 of
docs/popsparse-formulas.md.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dynsparse.checks import check_integer, is_number
from dynsparse.files.shorten import shortened
from dynsparse.typed import typed
from popsparse.machine import (
    FLOAT,
    HALF,
    UNSIGNED_INT,
    Copy,
    Execute,
    Graph,
    Sequence,
    Tensor,
    codelets,
)
from popsparse.planning.cache import PlanningCache
from popsparse.planning.options import Options
from popsparse.planning.params import FullyConnectedParams
from popsparse.planning.plan import Plan
from popsparse.planning.search import make_plan
from popsparse.programs.codelets_embedding import EmbeddingCodelets
from popsparse.programs.embedding import Round, SliceLayout, SliceTensor
from popsparse.programs.layout import machine_type, reorder
from popsparse.programs.weights import SparseTensor, checked_weights

# A tile holds at least so many indices (section 5.4 of docs/popsparse-formulas.md).
_LEAST_INDICES = 32


@typed
def create_indices_tensor(
    graph: Graph, params: FullyConnectedParams, num_indices: int, *, name: str = "indices"
) -> Tensor:
    """Indices of rows, unsigned [num_indices], spread over the tiles.

    Raises:
        ValueError: fewer than one index; several groups.
    """
    _require_one_group(params)
    count = _count(num_indices, graph)
    indices = graph.add_variable(UNSIGNED_INT, [count], name)
    graph.map_linearly(indices, min_per_tile=_LEAST_INDICES)
    return indices


@typed
def create_slice_tensor(
    graph: Graph,
    dtype: Any,
    params: FullyConnectedParams,
    num_indices: int,
    options: Options | dict[str, Any] | None = None,
    cache: PlanningCache | None = None,
    *,
    name: str = "slices",
) -> SliceTensor:
    """Rows to be added to the matrix, [num_indices, input channels], laid out by their use.

    Raises:
        ValueError: fewer than one index; several groups; options no plan can meet.
    """
    _require_one_group(params)
    plan = make_plan(graph.target, dtype, params, options, cache)
    layout = SliceLayout(plan, _count(num_indices, graph))
    return layout.natural(layout.add(graph, machine_type(plan), name))


def _count(num_indices: Any, graph: Graph) -> int:
    count = check_integer("num_indices", num_indices, 1)
    room = graph.target.tiles * graph.target.bytes_per_tile
    if count * UNSIGNED_INT.size > room:
        raise ValueError(
            f"num_indices must be such as fit the {room:,} bytes of all tiles, got {count:,}"
        )
    return count


def _require_one_group(params: FullyConnectedParams) -> None:
    if params.num_groups != 1:
        raise ValueError(f"an embedding has one group, got num_groups={params.num_groups}")


def _require(weights: Any, indices: Tensor, params: FullyConnectedParams, options: Any) -> Plan:
    _require_one_group(params)
    plan = checked_weights(weights, params, options).plan
    if plan.use_dense:
        raise ValueError("an embedding needs sparse weights: leave out use_dense")
    if indices.ndim != 1 or indices.dtype != UNSIGNED_INT:
        raise ValueError(
            "indices must be unsigned int [num_indices] as create_indices_tensor makes them, got "
            f"{indices.dtype.name} {list(indices.shape)}"
        )
    return plan


@typed
def embedding_slice(
    graph: Graph,
    weights: SparseTensor,
    indices: Tensor,
    program: Sequence,
    params: FullyConnectedParams,
    options: Options | dict[str, Any] | None = None,
) -> SliceTensor:
    """Add the gathering of rows to a program.

    Args:
        weights: of a fully connected layer, [entries, size].
        indices: unsigned int [num_indices], below the number of entries.

    Returns:
        [num_indices, size]: rows of the sparse matrix with their zeros. An index that is out of
        range gives a row of zeros.

    Raises:
        ValueError: weights made for other parameters or options, indices of another kind.
    """
    plan = _require(weights, indices, params, options)
    layout = SliceLayout(plan, indices.shape[0])
    steps = Sequence(name="embedding slice")
    program.add(steps)
    local = layout.add_indices(graph, indices, steps, "slice indices")
    slices = layout.add(graph, machine_type(plan), "embedding slices")
    zero = graph.add_compute_set("zero slices")
    graph.add_vertices(zero, codelets.FILL, layout.tiles, {"out": slices, "value": 0})
    steps.add(Execute(zero, name="zero slices"))
    codelet = EmbeddingCodelets(plan).gather
    passing = {
        "words": weights.pass_words("forward", layout.order),
        "values": weights.pass_values(layout.order),
    }
    staying = {"indices": local, "slices": slices, "column": layout.columns}
    steps.add(*Round(graph, weights, layout, "slice").build(codelet, passing, staying, -1))
    return layout.natural(slices)


@typed
def embedding_update_add(
    graph: Graph,
    weights: SparseTensor,
    slices: Tensor,
    indices: Tensor,
    scale: Tensor | float,
    program: Sequence,
    params: FullyConnectedParams,
    options: Options | dict[str, Any] | None = None,
) -> None:
    """Add to a program: the rows `indices` of the matrix += scale x slices, where it has values.

    Sums are kept in float32 and round once, when they are added.

    Args:
        slices: [num_indices, size], of the weights' type.
        indices: unsigned int [num_indices]; an index may come several times.
        scale: a number, or a scalar tensor (half or float).

    Raises:
        ValueError: as `embedding_slice`; slices or scale of another shape; options without
            `do_grad_w_pass`.
    """
    plan = _require(weights, indices, params, options)
    if not plan.options.do_grad_w_pass:
        raise ValueError("embedding_update_add needs the option do_grad_w_pass=True")
    layout = SliceLayout(plan, indices.shape[0])
    dtype = machine_type(plan)
    if list(slices.shape) != list(layout.shape) or slices.dtype != dtype:
        raise ValueError(
            f"slices must be {dtype.name} {list(layout.shape)}, got {slices.dtype.name} "
            f"{list(slices.shape)}"
        )
    steps = Sequence(name="embedding update")
    program.add(steps)
    local = layout.add_indices(graph, indices, steps, "update indices")
    if isinstance(slices, SliceTensor) and slices.layout == layout:
        home = slices.home
    else:
        home = layout.add(graph, dtype, "slices at home")
        steps.add(Copy(slices, layout.natural(home), name="regroup"))
    tiles = layout.tiles
    partials = graph.add_variable(
        FLOAT, [*tiles.shape, plan.buckets.nz_elements], "update partials", tiles=tiles
    )
    zero = graph.add_compute_set("zero partials")
    graph.add_vertices(zero, codelets.FILL, tiles, {"out": partials, "value": 0})
    steps.add(Execute(zero, name="zero partials"))
    column = graph.add_constant(
        UNSIGNED_INT, tiles.shape, layout.columns, "own column", tiles=tiles
    )
    staying = {
        "words": weights.pass_words("forward", layout.order),
        "partials": partials,
        "scale": _spread_scale(graph, scale, tiles, steps),
    }
    passing = {"indices": local, "slices": home, "column": column}
    codelet = EmbeddingCodelets(plan).scatter
    steps.add(*Round(graph, weights, layout, "update").build(codelet, passing, staying, 1))
    add = graph.add_compute_set("add update")
    values = reorder(weights.values, "gxyz", layout.order)
    edges = {"a": values, "b": partials, "scale": 1.0}
    graph.add_vertices(add, codelets.ADD_SCALED, tiles, edges)
    steps.add(Execute(add, name="add update"))


def _spread_scale(graph: Graph, scale: Any, tiles: np.ndarray, steps: Sequence) -> Tensor:
    """The scale on every tile, float."""
    if not isinstance(scale, Tensor):
        if not is_number(scale):
            raise TypeError(f"scale must be a number or a Tensor, got {shortened(scale)}")
        return graph.add_constant(FLOAT, tiles.shape, float(scale), "scale", tiles=tiles)
    if scale.numel != 1 or scale.dtype not in (FLOAT, HALF):
        raise ValueError(
            f"scale must be a number or one half or float, got {scale.dtype.name} "
            f"{list(scale.shape)}"
        )
    local = graph.add_variable(scale.dtype, tiles.shape, "scale of tile", tiles=tiles)
    steps.add(Copy(scale.reshape(1).broadcast_to(*tiles.shape), local, name="broadcast scale"))
    if scale.dtype == FLOAT:
        return local
    wide = graph.add_variable(FLOAT, tiles.shape, "scale in float", tiles=tiles)
    cast = graph.add_compute_set("cast scale")
    graph.add_vertices(cast, codelets.CAST, tiles, {"src": local, "out": wide})
    steps.add(Execute(cast, name="cast scale"))
    return wide
