"""Sums and largest elements along dimensions of a tensor."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dynsparse.checks import check_choice, check_integer, check_kind
from dynsparse.typed import typed
from popsparse.machine import (
    FLOAT,
    HALF,
    Codelet,
    Copy,
    DType,
    Execute,
    Graph,
    In,
    Out,
    Ragged,
    Tensor,
    VertexView,
)
from popsparse.machine import Sequence as Program
from popsparse.planning.parts import ceil_div
from popsparse.tensor_ops.spread import Spread

# Of the reduction in section 3.4 of docs/popsparse-formulas.md: a vertex, an output, a vector.
_START, _OUTPUT, _VECTOR = 32, 7, 3

_KINDS = {"add": np.add, "max": np.maximum}


@typed
def reduce(
    graph: Graph,
    tensor: Tensor,
    axis: int | Sequence[int],
    program: Program,
    *,
    operation: str = "add",
    name: str | None = None,
) -> Tensor:
    """Add a reduction to a program: each tile reduces what it holds, then the parts are reduced.

    Args:
        tensor: half or float.
        axis: dimensions that go away.
        operation: "add" or "max".

    Returns:
        The tensor without these dimensions, of the same type, spread over the tiles that held it.

    Raises:
        ValueError: an unknown operation, a dimension that does not exist or comes twice.
        TypeError: a tensor that is neither half nor float.
    """
    check_choice("operation", operation, _KINDS)
    if tensor.dtype not in (HALF, FLOAT):
        raise TypeError(f"a reduction takes half or float, got {tensor.dtype.name}")
    check_kind("axis", axis, (int, list, tuple), "a dimension or a list of them")
    given = [axis] if isinstance(axis, int) else list(axis)
    axes = [check_integer("axis", one) for one in given]
    if not axes or any(not -tensor.ndim <= one < tensor.ndim for one in axes):
        raise ValueError(f"axis must be dimensions of {list(tensor.shape)}, got {axes}")
    gone = {one % tensor.ndim for one in axes}
    if len(gone) < len(axes):
        raise ValueError(f"axis names a dimension twice: {axes}")
    what = f"reduce {operation}" if name is None else name
    kept = [dim for dim in range(tensor.ndim) if dim not in gone]
    shape = [tensor.shape[dim] for dim in kept]
    ordered = tensor.transpose(*kept, *sorted(gone)).reshape(int(np.prod(shape)), -1)
    spread = Spread.of(graph, ordered)
    partials, owner = _reduce_tiles(graph, ordered, spread, operation, program, what)
    sizes = ordered.shape[0], tensor.dtype
    made = _reduce_parts(graph, partials, owner, *sizes, spread, operation, program, what)
    return made.reshape(*shape)


def _reduce_tiles(
    graph: Graph,
    ordered: Tensor,
    spread: Spread,
    operation: str,
    program: Program,
    what: str,
) -> tuple[Tensor, np.ndarray]:
    """What each tile holds of each output: float [partials], and their outputs [partials]."""
    outputs, depth = ordered.shape
    output = np.repeat(np.arange(outputs), depth)
    by_tile = np.lexsort((output, spread.owner))
    tile, output = spread.owner[by_tile], output[by_tile]
    begins = np.flatnonzero(np.append(True, (np.diff(tile) != 0) | (np.diff(output) != 0)))
    placed = tile[begins]
    first = np.searchsorted(placed, spread.tiles)
    partials = graph.add_variable(FLOAT, [len(begins)], f"{what} partials")
    new = np.flatnonzero(np.append(True, np.diff(placed) != 0))
    graph.map_stretches(partials, placed[new], np.diff(np.append(new, len(placed))))
    edges = {
        "src": Ragged(ordered.flatten()[by_tile], spread.offsets),
        "out": Ragged(partials, np.append(first, len(begins))),
    }
    compute = graph.add_compute_set(f"{what} on tiles")
    graph.add_vertices(compute, _codelet(operation, begins, len(tile)), spread.tiles, edges)
    program.add(Execute(compute))
    return partials, output[begins]


def _reduce_parts(
    graph: Graph,
    partials: Tensor,
    owner: np.ndarray,
    outputs: int,
    dtype: DType,
    spread: Spread,
    operation: str,
    program: Program,
    what: str,
) -> Tensor:
    """The partial results of each output reduced, the outputs evenly over the tiles."""
    order = np.argsort(owner, kind="stable")
    begins = np.searchsorted(owner[order], np.arange(outputs))
    each = ceil_div(outputs, len(spread.tiles))
    tiles = spread.tiles[np.arange(outputs) // each]
    used = spread.tiles[: ceil_div(outputs, each)]
    result = graph.add_variable(dtype, [outputs], f"{what} result")
    graph.set_tile_mapping(result, tiles)
    counts = np.diff(np.append(begins, len(owner)))
    arriving = graph.add_variable(FLOAT, [len(owner)], f"{what} arriving")
    graph.map_stretches(arriving, tiles, counts)
    program.add(Copy(partials[order], arriving, name=f"{what}: exchange"))
    bounds = np.minimum(np.arange(len(used) + 1) * each, outputs)
    ends = np.append(begins, len(owner))
    edges = {"src": Ragged(arriving, ends[bounds]), "out": Ragged(result, bounds)}
    compute = graph.add_compute_set(f"{what} of parts")
    graph.add_vertices(compute, _codelet(operation, begins, len(owner)), used, edges)
    program.add(Execute(compute))
    return result


def _codelet(operation: str, begins: np.ndarray, count: int) -> Codelet:
    """Reduces stretches of the source, of all vertices together, that begin so."""
    kind = _KINDS[operation]
    lengths = np.diff(np.append(begins, count))

    def compute(v: VertexView) -> None:
        v.out.values[...] = kind.reduceat(v.src.values.astype(np.float32), begins)

    def cycles(v: VertexView) -> np.ndarray:
        width = v.target.data_path_bits // (8 * v.src.values.itemsize)
        each = _OUTPUT + _VECTOR * ceil_div(lengths, width)
        total = np.add.reduceat(each, v.out.offsets[:-1])
        return _START + ceil_div(total, v.target.workers)

    fields = {"src": In(HALF, FLOAT), "out": Out(HALF, FLOAT)}
    name = f"reduce, {operation}"
    return Codelet(name, fields, compute, cycles, "workers", flops=lambda v: v.src.lengths)
