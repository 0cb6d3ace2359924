"""Softmax, of the other operations."""

from __future__ import annotations

from dynsparse.typed import typed
from popsparse.machine import Graph, Tensor
from popsparse.machine import Sequence as Program
from popsparse.tensor_ops.by_element import elementwise
from popsparse.tensor_ops.reduction import reduce


@typed
def softmax(graph: Graph, tensor: Tensor, program: Program, *, name: str = "softmax") -> Tensor:
    """Add exp(x - max) / sum(exp(x - max)) along the last dimension to a program.

    Args:
        tensor: half or float, [..., n].
        name: of the steps.

    Returns:
        A new tensor that lies as `tensor` does.

    Raises:
        ValueError: a tensor without dimensions. TypeError: of another type.
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
