"""Element-wise operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from dynsparse.checks import check_choice, check_kind, is_number
from dynsparse.files.shorten import shortened
from dynsparse.typed import typed
from popsparse.machine import FLOAT, HALF, Codelet, Execute, Graph, In, Out, Tensor, VertexView
from popsparse.machine import Sequence as Program
from popsparse.planning.parts import ceil_div
from popsparse.tensor_ops.spread import Spread

# Section 7.3 of docs/popsparse-formulas.md: of adding vectors, 3 cycles each.
_START = 58 + 2
_VECTOR = 3
# No source gives cycles for the functions: a load, an instruction for each element, a store.
_LOAD_AND_STORE = 2


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
"""By name: how many operands each has, and what it does. "scaled add" is a + c b of (a, b, c);
"copy" casts to the type of `out`."""


@typed
def elementwise(
    graph: Graph,
    operation: str,
    operands: Sequence[Any],
    program: Program,
    *,
    out: Tensor | None = None,
    name: str | None = None,
) -> Tensor:
    """Add an operation to a program, element by element.

    Args:
        graph: of the tensors.
        operation: one of `OPERATIONS`.
        operands: tensors (half or float) and numbers. Tensors broadcast to the shape of the first,
            or of `out`.
        program: the steps are appended to it.
        out: what takes the result; it may be an operand. Without it a new tensor, which lies as the
            first operand does and has its type.
        name: of the steps.

    Returns:
        The result.

    Raises:
        ValueError: an unknown operation, another number of operands, none that is a tensor, shapes
            that do not broadcast.
        TypeError: operands that are neither tensors nor numbers, or of another type.
    """
    made = OPERATIONS[check_choice("operation", operation, OPERATIONS)]
    given = list(check_kind("operands", operands, (list, tuple), "a list of tensors and numbers"))
    if len(given) != made.operands:
        raise ValueError(f"{operation!r} takes {made.operands} operands, got {len(given)}")
    for one in given:
        if not isinstance(one, Tensor) and not is_number(one):
            raise TypeError(f"operands must be tensors or numbers, got {shortened(one)}")
    tensors = [one for one in given if isinstance(one, Tensor)]
    if not tensors:
        raise ValueError("expected a tensor among the operands, got only numbers")
    for one in [*tensors, *([] if out is None else [out])]:
        if one.dtype not in (HALF, FLOAT):
            raise TypeError(f"operands must be half or float, got {one.dtype.name} ({one.name})")
    what = operation if name is None else name
    spread = Spread.of(graph, tensors[0] if out is None else out)
    if out is None:
        out = spread.like(graph, tensors[0].dtype, f"{what} result")
    edges: dict[str, Any] = {"out": spread.edge(out)}
    arguments: list[str | np.float32] = []
    for one in given:
        if not isinstance(one, Tensor):
            arguments.append(np.float32(one))
            continue
        arguments.append(f"operand{len(arguments)}")
        local = spread.bring(graph, one, program, f"{what} operand")
        edges[str(arguments[-1])] = spread.edge(local)
    compute = graph.add_compute_set(what)
    graph.add_vertices(compute, _codelet(operation, made, arguments), spread.tiles, edges)
    program.add(Execute(compute))
    return out


def _codelet(name: str, made: _Operation, arguments: list[str | np.float32]) -> Codelet:
    def compute(v: VertexView) -> None:
        found = [
            getattr(v, one).values.astype(np.float32) if isinstance(one, str) else one
            for one in arguments
        ]
        v.out.values[...] = made.compute(*found)

    def cycles(v: VertexView) -> np.ndarray:
        width = v.target.data_path_bits // (8 * v.out.values.itemsize)
        vectors = ceil_div(ceil_div(v.out.lengths, v.target.workers), width)
        return _START + vectors * (_VECTOR if made.in_vectors else _LOAD_AND_STORE + width)

    fields = {one: In(HALF, FLOAT) for one in arguments if isinstance(one, str)}
    fields["out"] = Out(HALF, FLOAT)
    return Codelet(name, fields, compute, cycles, "workers", flops=lambda v: v.out.lengths)
