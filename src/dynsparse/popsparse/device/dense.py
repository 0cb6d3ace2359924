"""The dense product, for plans that are constrained to `use_dense`: weights with their zeros.

The cut and the cycles of the vertices are those of `dense`, a model of poplibs' planner; serial
splits, which only save memory, are not carried out.
"""

from __future__ import annotations

import numpy as np

from dynsparse.machine import codelets
from dynsparse.machine.graph import Graph
from dynsparse.machine.program import Copy, Execute, Sequence
from dynsparse.machine.tensor import Tensor
from dynsparse.machine.vertex import Codelet, In, InOut, VertexView
from dynsparse.popsparse.dense import planner as dense
from dynsparse.popsparse.device.layout import OperandLayout, PlannedTensor, tile_grid
from dynsparse.popsparse.device.product import Product
from dynsparse.popsparse.device.weights import SparseTensor, dense_layout
from dynsparse.popsparse.product.parts import ceil_div
from dynsparse.popsparse.product.plan import Plan

__all__ = ["add_dense_grad_weight", "add_dense_product"]

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


class _GradWeight(Product):
    """dW = X^T dY of every part of the batch, summed over them."""

    def __init__(self, graph: Graph, plan: Plan) -> None:
        super().__init__(graph, plan, "grad_weight")
        self.order = "gzyx"  # The dimension that is summed over comes first.
        self.tiles = tile_grid(plan, self.order)

    def add(self, gradient: Tensor, inputs: Tensor, program: Sequence) -> Tensor:
        graph, plan = self.graph, self.plan
        steps = Sequence(name=self.name)
        program.add(steps)
        pairs, operands = [], {}
        for dim, tensor in (("x", gradient), ("y", inputs)):
            layout = OperandLayout(plan, dim)
            what = f"{self.name} {'gradient' if dim == 'x' else 'input'}"
            home, regroup = layout.at_home(graph, tensor, f"{what} at home")
            local, pair = layout.add_local(graph, home, what, self.order)
            steps.add(*regroup)
            pairs.append(pair)
            operands[dim] = local.reshape(*self.tiles.shape, *layout.part)
        steps.add(Copy(pairs, name="fetch inputs"))
        part, depth = plan.elements_per_tile, self.tiles.shape[1]
        outputs = part.x * part.y
        partials = self.variable("partials", [depth * ceil_div(outputs, depth)], partials=True)
        zero = graph.add_compute_set("zero partials")
        fill = {"out": partials, "value": 0}
        graph.add_vertices(zero, codelets.FILL, self.tiles, fill)
        sizes = plan.sizes
        target = plan.target.with_(tiles=max(1, plan.target.tiles // sizes.groups))
        cut = dense.plan(
            sizes.y, sizes.z, sizes.x, plan.dtype, target, partials=plan.options.partials_type
        )
        # Its best cut is another one, so the work of its tiles is spread over those in use here.
        spread = cut.tiles_used * sizes.groups / plan.tiles_used
        cycles = sum(cut.terms.get(term, 0) for term in _COMPUTE) * spread
        compute = graph.add_compute_set("dense product")
        shape = (*self.tiles.shape, part.y, part.x)
        edges = {
            "input": operands["y"],
            "gradient": operands["x"],
            "partials": partials[..., :outputs].reshape(*shape),
        }
        graph.add_vertices(compute, _grad_weight_codelet(cycles), self.tiles, edges)
        steps.add(Execute(zero, name="zero partials"), Execute(compute, name="dense product"))
        return self.reduce(partials, steps)

    def _result(self, out: Tensor) -> Tensor:
        part, sizes = self.plan.elements_per_tile, self.plan.sizes
        at = out.addresses().transpose(0, 2, 3, 1, 4)
        groups, parts_y, parts_x = at.shape[:3]
        at = at.reshape(groups, parts_y, parts_x, -1)[..., : part.y * part.x]
        at = at.reshape(groups, parts_y, parts_x, part.y, part.x).transpose(0, 1, 3, 2, 4)
        at = at.reshape(groups, parts_y * part.y, parts_x * part.x)[:, : sizes.y, : sizes.x]
        flat = at.reshape(-1)
        return Tensor(self.graph, out.dtype, flat.shape, addresses=flat)


def add_dense_grad_weight(
    graph: Graph, weights: SparseTensor, gradient: Tensor, inputs: Tensor, program: Sequence
) -> Tensor:
    """Add grad_weight of a plan with `use_dense`; [groups * in * out], like the weights."""
    assert weights.dense is not None
    plan = dense_layout(weights.plan, weights.dense)
    return _GradWeight(graph, plan).add(gradient, inputs, program)


def _grad_weight_codelet(cycles: float) -> Codelet:
    def multiply(v: VertexView) -> None:
        gradient = v.gradient.astype(np.float32).swapaxes(-1, -2)
        v.partials[...] += np.matmul(v.input.astype(np.float32), gradient)

    fields = {"input": In(), "gradient": In(), "partials": InOut()}
    return Codelet("dense grad_weight", fields, multiply, cycles, "supervisor")


def _codelet(cycles: int, turned: bool) -> Codelet:
    def multiply(v: VertexView) -> None:
        weights = v.weights.astype(np.float32)
        if not turned:
            weights = weights.swapaxes(-1, -2)
        v.partials[...] += np.matmul(weights, v.operand.astype(np.float32))

    fields = {"weights": In(), "operand": In(), "partials": InOut()}
    return Codelet("dense product", fields, multiply, cycles, "supervisor")
