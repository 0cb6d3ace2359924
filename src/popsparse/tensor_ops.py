"""Operations on tensors of the tile machine, wherever their elements lie.

Each adds its steps to a program and returns a new tensor. Data that a tile needs and does not hold
is copied to it; sums are computed in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from dynsparse._core.checks import (
    check_choice,
    check_integer,
    check_kind,
    check_types,
    is_number,
    shorten,
)
from popsparse.machine import (
    FLOAT,
    HALF,
    Codelet,
    Copy,
    DType,
    Graph,
    In,
    MappingError,
    Out,
    Ragged,
    Tensor,
    VertexView,
    as_dtype,
)
from popsparse.machine import Sequence as Program
from popsparse.machine.intervals import equal_runs
from popsparse.planning import dense as planner
from popsparse.planning.params import ceil_div
from popsparse.programs.dense import Layout, add_product
from popsparse.programs.layout import PlannedTensor, execute

__all__ = ["OPERATIONS", "elementwise", "matmul", "reduce", "softmax"]


class Spread(NamedTuple):
    """A tensor's elements, tile by tile: one vertex per tile.

    Attributes:
        shape: shape of the tensor.
        owner: the tile of each element, [numel].
        order: the elements in the order of their tiles, [numel]; None if already in that order.
        tiles: the tile of each vertex, [vertices].
        offsets: where the elements of each vertex begin, [vertices + 1].
    """

    shape: tuple[int, ...]
    owner: np.ndarray
    order: np.ndarray | None
    tiles: np.ndarray
    offsets: np.ndarray

    @classmethod
    def of(cls, graph: Graph, tensor: Tensor) -> Spread:
        """The layout of a tensor; raises MappingError for elements without a tile."""
        owner = graph.tiles_of(tensor).reshape(-1)
        if not owner.size or owner.min() < 0:
            what = "has no elements" if not owner.size else "has elements without a tile"
            raise MappingError(f"{tensor.name} {what}: map it with set_tile_mapping")
        order = np.argsort(owner, kind="stable")
        placed = owner[order]
        first = equal_runs(placed).starts
        is_sorted = bool((np.diff(owner) >= 0).all())
        offsets = np.append(first, len(owner))
        return cls(tensor.shape, owner, None if is_sorted else order, placed[first], offsets)

    def edge(self, tensor: Tensor) -> Ragged:
        """The edge of the vertices for a tensor with this layout."""
        flat = tensor.flatten()
        return Ragged(flat if self.order is None else flat[self.order], self.offsets)

    def create_like(
        self, graph: Graph, dtype: Any, name: str, like: Tensor | None = None
    ) -> Tensor:
        """A new variable with this layout; a `PlannedTensor` if `like` is one with this layout."""
        if isinstance(like, PlannedTensor) and like.shape == self.shape:
            return like.create_like(graph, as_dtype(dtype), name)
        tiles = self.owner.reshape(self.shape)
        return graph.add_variable(as_dtype(dtype), list(self.shape), name, tiles=tiles)

    def bring(
        self, graph: Graph, tensor: Tensor, pairs: list[tuple[Tensor, Tensor]], name: str
    ) -> Tensor:
        """A tensor [of this shape, or broadcast to it] in this layout: itself, or the target of a
        copy added to `pairs`. A tile receives an element once, however often it needs it."""
        full = tensor.broadcast_to(*self.shape)
        if np.array_equal(graph.tiles_of(full).reshape(-1), self.owner):
            return full
        if tensor.numel == full.numel:
            local = self.create_like(graph, tensor.dtype, f"{name} brought")
            pairs.append((full, local))
            return local
        at = full.addresses().reshape(-1)
        size = int(at.max()) + 1
        needed, place = np.unique(self.owner * size + at, return_inverse=True)
        tiles = needed // size
        local = graph.add_variable(tensor.dtype, [len(needed)], f"{name} brought", tiles=tiles)
        source = Tensor(graph, tensor.dtype, needed.shape, addresses=needed % size)
        pairs.append((source, local))
        return local[place.reshape(self.shape)]


# Section 7.3 of docs/popsparse-formulas.md: adding vectors takes 3 cycles each: two loads, or a
# load and a store, and one operation. No source gives cycles for the functions; they are charged
# one instruction for each element.
_START = 58 + 2
_LOADS = 2


class _Operation(NamedTuple):
    operands: int
    compute: Callable[..., np.ndarray]
    in_vectors: bool


OPERATIONS = {
    "add": _Operation(2, np.add, True),
    "subtract": _Operation(2, np.subtract, True),
    "multiply": _Operation(2, np.multiply, True),
    "maximum": _Operation(2, np.maximum, True),
    "minimum": _Operation(2, np.minimum, True),
    "divide": _Operation(2, np.divide, False),
    "scaled add": _Operation(3, lambda a, b, scale: a + scale * b, True),
    "negative": _Operation(1, np.negative, True),
    "absolute": _Operation(1, np.abs, True),
    "square": _Operation(1, np.square, True),
    "relu": _Operation(1, lambda a: np.maximum(a, np.float32(0)), True),
    "exp": _Operation(1, np.exp, False),
    "log": _Operation(1, np.log, False),
    "sqrt": _Operation(1, np.sqrt, False),
    "tanh": _Operation(1, np.tanh, False),
    "sigmoid": _Operation(1, lambda a: 1 / (1 + np.exp(-a)), False),
    "copy": _Operation(1, lambda a: a, True),
}
"""The operations by name: number of operands and computation. "scaled add" computes a + c b from
(a, b, c); "copy" casts to the type of `out`."""


@check_types
def elementwise(
    graph: Graph,
    operation: str,
    operands: Sequence[Any],
    program: Program,
    *,
    out: Tensor | None = None,
    name: str | None = None,
) -> Tensor:
    """Add an element-wise operation to a program.

    Args:
        graph: the graph of the tensors.
        operation: one of `OPERATIONS`.
        operands: tensors (float16 or float32), broadcast to the shape of the first or of `out`, and
            numbers.
        program: the steps are appended to it.
        out: the tensor for the result; it may be an operand. Defaults to a new tensor with the
            first operand's layout and type.
        name: name of the steps.

    Returns:
        The result.

    Raises:
        ValueError: an unknown operation, a wrong number of operands, no tensor among them, shapes
            that do not broadcast.
        TypeError: operands that are neither tensors nor numbers, or of another type.
    """
    definition = OPERATIONS[check_choice("operation", operation, OPERATIONS)]
    items = list(check_kind("operands", operands, (list, tuple), "a list of tensors and numbers"))
    if len(items) != definition.operands:
        raise ValueError(f"{operation!r} takes {definition.operands} operands, got {len(items)}")
    for operand in items:
        if not isinstance(operand, Tensor) and not is_number(operand):
            raise TypeError(f"operands must be tensors or numbers, got {shorten(operand)}")
    tensors = [operand for operand in items if isinstance(operand, Tensor)]
    if not tensors:
        raise ValueError("expected a tensor among the operands, got only numbers")
    for operand in [*tensors, *([] if out is None else [out])]:
        if operand.dtype not in (HALF, FLOAT):
            raise TypeError(
                f"operands must be float16 or float32, got {operand.dtype.name} ({operand.name})"
            )

    def compute(*arrays: np.ndarray) -> list[np.ndarray]:
        values = iter([array.astype(np.float32) for array in arrays])
        return [
            definition.compute(
                *(next(values) if isinstance(x, Tensor) else np.float32(x) for x in items)
            )
        ]

    result = tensors[0].dtype if out is None else out
    (made,) = map_elements(
        graph,
        operation if name is None else name,
        tensors,
        [result],
        compute,
        program,
        like=tensors[0] if out is None else out,
        vector_operations=int(definition.in_vectors),
        functions=int(not definition.in_vectors),
    )
    return made


def map_elements(
    graph: Graph,
    name: str,
    operands: Sequence[Tensor],
    results: Sequence[Any],
    compute: Callable[..., Sequence[np.ndarray]],
    program: Program,
    *,
    like: Tensor,
    vector_operations: int,
    functions: int,
) -> list[Tensor]:
    """Add an element-wise computation with any number of operands and results to a program.

    Args:
        name: name of the step.
        operands: broadcast to the shape of `like`; elements on other tiles are copied.
        results: for each its type, or the tensor that takes it, with the layout of `like`.
        compute: from the elements of each operand, in the order of the tiles, to those of each
            result.
        like: the tensor whose layout the results have.
        vector_operations, functions: how many operations on an element run as vector instructions,
            and how many, such as exp, take an instruction for each element.

    Returns:
        The results.
    """
    spread = Spread.of(graph, like)
    pairs: list[tuple[Tensor, Tensor]] = []
    edges: dict[str, Any] = {}
    for number, operand in enumerate(operands):
        local = spread.bring(graph, operand, pairs, f"{name} operand")
        edges[f"operand{number}"] = spread.edge(local)
    if pairs:
        program.add(Copy(pairs, name=f"{name}: bring"))
    outputs = [
        result
        if isinstance(result, Tensor)
        else spread.create_like(graph, result, f"{name} result", like)
        for result in results
    ]
    sources = [*edges]
    edges |= {f"result{number}": spread.edge(result) for number, result in enumerate(outputs)}

    def run(v: VertexView) -> None:
        arrays = [getattr(v, source).values for source in sources]
        if v.is_wide:
            arrays = [a.astype(np.float32) if a.dtype == np.float16 else a for a in arrays]
        for number, values in enumerate(compute(*arrays)):
            getattr(v, f"result{number}").values[...] = values

    def cycles(v: VertexView) -> np.ndarray:
        edges = [getattr(v, edge) for edge in fields]
        # The widest element fills the data path first.
        width = v.target.data_path_bits // (8 * max(edge.values.itemsize for edge in edges))
        vectors = ceil_div(ceil_div(edges[-1].lengths, v.target.workers), width)
        moved = max(_LOADS, len(edges) - 1)
        return _START + vectors * (moved + vector_operations + functions * width)

    fields = {edge: In() if edge in sources else Out() for edge in edges}
    operations = vector_operations + functions
    codelet = Codelet(
        name, fields, run, cycles, "workers", flops=lambda v: operations * v.result0.lengths
    )
    program.add(execute(graph, name, codelet, spread.tiles, edges))
    return outputs


# Cycles of a vertex, an output and a vector: section 3.4 of docs/popsparse-formulas.md.
_REDUCE_START, _OUTPUT, _REDUCE_VECTOR = 32, 7, 3

_KINDS = {"add": np.add, "max": np.maximum, "min": np.minimum}


@check_types
def reduce(
    graph: Graph,
    tensor: Tensor,
    axis: int | Sequence[int],
    program: Program,
    *,
    operation: str = "add",
    dtype: Any = None,
    name: str | None = None,
) -> Tensor:
    """Add a reduction to a program: each tile reduces what it holds, then the parts are reduced.

    Args:
        tensor: any type; integers must be below 2^24.
        axis: dimensions to reduce.
        operation: "add", "max" or "min".
        dtype: type of the result; defaults to the tensor's.

    Returns:
        The tensor without these dimensions, spread over the tiles that held it.

    Raises:
        ValueError: an unknown operation, a dimension that does not exist or is repeated.
    """
    check_choice("operation", operation, _KINDS)
    check_kind("axis", axis, (int, list, tuple), "a dimension or a list of them")
    dims = [axis] if isinstance(axis, int) else list(axis)
    axes = [check_integer("axis", dim) for dim in dims]
    if not axes or any(not -tensor.ndim <= dim < tensor.ndim for dim in axes):
        raise ValueError(f"axis must be dimensions of {list(tensor.shape)}, got {axes}")
    reduced = {dim % tensor.ndim for dim in axes}
    if len(reduced) < len(axes):
        raise ValueError(f"axis names a dimension twice: {axes}")
    what = f"reduce {operation}" if name is None else name
    kept = [dim for dim in range(tensor.ndim) if dim not in reduced]
    shape = [tensor.shape[dim] for dim in kept]
    ordered = tensor.transpose(*kept, *sorted(reduced)).reshape(int(np.prod(shape)), -1)
    result = tensor.dtype if dtype is None else as_dtype(dtype)
    return _reduce_rows(graph, ordered, operation, result, program, what).reshape(*shape)


def _reduce_rows(
    graph: Graph, ordered: Tensor, operation: str, dtype: DType, program: Program, what: str
) -> Tensor:
    """Reduce [outputs, values] to [outputs], spread evenly over the tiles that held the values."""
    spread = Spread.of(graph, ordered)
    outputs, depth = ordered.shape
    # The values of one output on one tile are reduced to a partial result.
    output = np.repeat(np.arange(outputs), depth)
    by_tile = np.lexsort((output, spread.owner))
    tile, output = spread.owner[by_tile], output[by_tile]
    begins = equal_runs(tile, output).starts
    placed, owner = tile[begins], output[begins]
    partials = graph.add_variable(FLOAT, [len(begins)], f"{what} partials", tiles=placed)
    ends = np.append(np.searchsorted(placed, spread.tiles), len(begins))
    edges = {
        "src": Ragged(ordered.flatten()[by_tile], spread.offsets),
        "out": Ragged(partials, ends),
    }
    codelet = _reduce_codelet(operation, begins, len(tile))
    program.add(execute(graph, f"{what} on tiles", codelet, spread.tiles, edges))
    # The partial results of each output are brought to one tile and reduced.
    order = np.argsort(owner, kind="stable")
    begins = np.searchsorted(owner[order], np.arange(outputs))
    each = ceil_div(outputs, len(spread.tiles))
    tiles = spread.tiles[np.arange(outputs) // each]
    used = spread.tiles[: ceil_div(outputs, each)]
    result = graph.add_variable(dtype, [outputs], f"{what} result", tiles=tiles)
    to = tiles[owner[order]]
    arriving = graph.add_variable(FLOAT, [len(owner)], f"{what} arriving", tiles=to)
    program.add(Copy(partials[order], arriving, name=f"{what}: exchange"))
    bounds = np.minimum(np.arange(len(used) + 1) * each, outputs)
    ends = np.append(begins, len(owner))
    edges = {"src": Ragged(arriving, ends[bounds]), "out": Ragged(result, bounds)}
    codelet = _reduce_codelet(operation, begins, len(owner))
    program.add(execute(graph, f"{what} of parts", codelet, used, edges))
    return result


def _reduce_codelet(operation: str, begins: np.ndarray, count: int) -> Codelet:
    """Reduces stretches of the source; `begins` are their starts, for all vertices together."""
    kind = _KINDS[operation]
    lengths = np.diff(np.append(begins, count))

    def compute(v: VertexView) -> None:
        v.out.values[...] = kind.reduceat(v.src.values.astype(np.float32), begins)

    def cycles(v: VertexView) -> np.ndarray:
        width = v.target.data_path_bits // (8 * v.src.values.itemsize)
        each = _OUTPUT + _REDUCE_VECTOR * ceil_div(lengths, width)
        total = np.add.reduceat(each, v.out.offsets[:-1])
        return _REDUCE_START + ceil_div(total, v.target.workers)

    fields = {"src": In(), "out": Out()}
    name = f"reduce, {operation}"
    return Codelet(name, fields, compute, cycles, "workers", flops=lambda v: v.src.lengths)


@check_types
def softmax(graph: Graph, tensor: Tensor, program: Program, *, name: str = "softmax") -> Tensor:
    """Add exp(x - max) / sum(exp(x - max)) along the last dimension to a program.

    Args:
        tensor: float16 or float32, [..., n].
        name: name of the steps.

    Returns:
        A new tensor with the layout of `tensor`.

    Raises:
        ValueError: a tensor without dimensions. TypeError: a tensor of another type.
    """
    if not tensor.ndim:
        raise ValueError("softmax takes a tensor [..., n], got a scalar")
    steps = Program(name=name)
    program.add(steps)
    highest = reduce(graph, tensor, -1, steps, operation="max", name="highest")
    moved = [tensor, highest.expand_dims(-1)]
    powers = elementwise(graph, "subtract", moved, steps, name="subtract highest")
    elementwise(graph, "exp", [powers], steps, out=powers, name="exp")
    total = reduce(graph, powers, -1, steps, name="total")
    shares = [powers, total.expand_dims(-1)]
    return elementwise(graph, "divide", shares, steps, out=powers, name="divide by total")


@check_types
def matmul(
    graph: Graph,
    a: Tensor,
    b: Tensor,
    program: Program,
    *,
    partials: Any = None,
    available_memory_proportion: float = 0.6,
    name: str = "matmul",
) -> Tensor:
    """Add a [m, k] times b [k, n] to a program, split over the tiles by `dense.plan`.

    Args:
        a, b: both float16 or both float32, on any tiles; copied to where the plan needs them.
        partials: type of the partial sums; defaults to that of the operands.
        available_memory_proportion: the part of a tile's memory for temporary data.
        name: name of the steps.

    Returns:
        [m, n] of the same type.

    Raises:
        ValueError: shapes that do not match; operands that do not fit the machine's memory.
        TypeError: operands of different types, or types other than float16 and float32.
    """
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"expected a [m, k] and b [k, n], got {list(a.shape)} and {list(b.shape)}")
    if a.dtype != b.dtype or a.dtype not in (HALF, FLOAT):
        raise TypeError(
            f"a and b must both be float16 or both float32, got {a.dtype.name} and {b.dtype.name}"
        )
    plan = planner.plan(
        a.shape[0],
        a.shape[1],
        b.shape[1],
        a.dtype.name,
        graph.target,
        partials=partials,
        available_memory_proportion=available_memory_proportion,
    )
    operands = a.expand_dims(0), b.expand_dims(0)
    product = add_product(graph, Layout(plan), *operands, program, name)
    return product.reshape(a.shape[0], b.shape[1])
