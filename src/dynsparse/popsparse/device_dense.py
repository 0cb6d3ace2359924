"""The dense product, for plans that are constrained to `use_dense`: weights with their zeros.

The cut and the cycles of the vertices are those of `dense`, a model of poplibs' planner; serial
splits, which only save memory, are not carried out.
"""

from __future__ import annotations

import numpy as np

from dynsparse.machine.graph import Graph
from dynsparse.machine.program import Copy, Execute, Sequence
from dynsparse.machine.tensor import Tensor
from dynsparse.machine.vertex import Codelet, In, InOut, VertexView
from dynsparse.popsparse import dense
from dynsparse.popsparse.device_layout import PlannedTensor
from dynsparse.popsparse.device_product import Product
from dynsparse.popsparse.device_weights import SparseTensor, dense_layout

__all__ = ["add_dense_product"]

# Terms of the dense plan that are cycles of vertices on the way to the partial sums.
_COMPUTE = ("compute", "field rearrangement", "coefficient rearrangement")


def add_dense_product(
    graph: Graph, weights: SparseTensor, operand: Tensor, program: Sequence, name: str
) -> PlannedTensor:
    """Add "forward" or "grad_input" of a plan with `use_dense` to a program."""
    cut = weights.dense
    assert cut is not None
    product = Product(graph, dense_layout(weights.plan, cut), name)
    plan, turned = product.plan, name == "grad_input"
    steps = Sequence(name=name)
    program.add(steps)
    if turned:
        sizes = plan.sizes
        cut = dense.plan(
            sizes.y, sizes.x, sizes.z, plan.dtype, cut.target, partials=plan.options.partials_type
        )
    # Weights lie as [groups, y, x, in, out] on the first of the tiles that share them over z.
    values = weights.values.transpose(0, 2, 1, 3, 4) if turned else weights.values
    shape = (*product.tiles.shape, *weights.values.shape[3:])
    local = product.variable("weights", list(shape[4:]))
    here = product.fetch(operand, steps)
    source = values.expand_dims(2).broadcast_to(*shape)
    if plan.partition.z > 1:
        steps.add(Copy(source, local, name="exchange weights"))
    else:
        local = values.expand_dims(2)
    whole, partials = product.add_partials(steps)
    cycles = sum(cut.terms.get(term, 0) for term in _COMPUTE)
    compute = graph.add_compute_set("dense product")
    edges = {"weights": local, "operand": here, "partials": partials}
    graph.add_vertices(compute, _codelet(cycles, turned), product.tiles, edges)
    steps.add(Execute(compute, name="dense product"))
    return product.reduce(whole, steps)


def _codelet(cycles: int, turned: bool) -> Codelet:
    def multiply(v: VertexView) -> None:
        weights = v.weights.astype(np.float32)
        if not turned:
            weights = weights.swapaxes(-1, -2)
        v.partials[...] += np.matmul(weights, v.operand.astype(np.float32))

    fields = {"weights": In(), "operand": In(), "partials": InOut()}
    return Codelet("dense product", fields, multiply, cycles, "supervisor")
