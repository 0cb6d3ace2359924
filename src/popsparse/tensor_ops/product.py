"""Dense products of tensors."""

from __future__ import annotations

from typing import Any

from dynsparse.typed import typed
from popsparse.dense.layout import Layout
from popsparse.dense.program import add_product
from popsparse.machine import FLOAT, HALF, Graph, Tensor
from popsparse.machine import Sequence as Program
from popsparse.planning import dense_planner as planner


@typed
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
    """Add a [m, k] times b [k, n] to a program, cut over the tiles as `dense.plan` finds best.

    Args:
        a, b: of one type, half or float, wherever they lie; brought to where the plan wants them.
        partials: type of the partial sums, by default that of the operands.
        available_memory_proportion: the part of a tile's memory for temporary data.
        name: of the steps.

    Returns:
        [m, n] of the same type.

    Raises:
        ValueError: shapes that do not fit; operands the machine's memory cannot hold.
        TypeError: operands of different types, or neither half nor float.
    """
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"expected a [m, k] and b [k, n], got {list(a.shape)} and {list(b.shape)}")
    if a.dtype != b.dtype or a.dtype not in (HALF, FLOAT):
        raise TypeError(
            f"a and b must both be half or both float, got {a.dtype.name} and {b.dtype.name}"
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
    found = add_product(graph, Layout(plan), *operands, program, name).tensor()
    return found.reshape(a.shape[0], b.shape[1])
