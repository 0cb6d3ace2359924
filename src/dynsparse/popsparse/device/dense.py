"""The passes of plans that are constrained to `use_dense`: dense products, weights with their
zeros.

Each pass is planned for itself. The weights lie as forward wants them; the others copy them, and
their operands, to where they want them.
"""

from __future__ import annotations

from dynsparse.machine import Graph, Sequence, Tensor
from dynsparse.popsparse.dense import program as product
from dynsparse.popsparse.dense.layout import Layout, Operand, OperandView
from dynsparse.popsparse.dense.layout import create_operand as create
from dynsparse.popsparse.device.layout import OperandLayout
from dynsparse.popsparse.device.weights import SparseTensor
from dynsparse.popsparse.product.plan import Plan

__all__ = ["add_grad_weight", "add_product", "create_operand", "create_weights"]


def _layout(plan: Plan, name: str) -> Layout:
    """The cut of a pass, each group on its share of the tiles."""
    return Layout(plan.dense[name], plan.sizes.groups)


def _as_user(made: Operand | Tensor, view: Tensor) -> Tensor:
    return OperandView(made, view) if isinstance(made, Operand) else view


def create_weights(graph: Graph, plan: Plan, name: str) -> SparseTensor:
    """Variables for the weights of a plan with `use_dense`, as forward wants them."""
    layout = _layout(plan, "forward")
    made = create(graph, layout, "a", f"{name} values", turned=True)
    graph.set_initial_value(made.home if isinstance(made, Operand) else made, 0)
    values = made.tensor() if isinstance(made, Operand) else made
    return SparseTensor.of_dense(graph, plan, _as_user(made, values), name)


def create_operand(graph: Graph, plan: Plan, dim: str, name: str) -> Tensor:
    """The input (`dim` "y") or the gradient of the output ("x"), [batch, groups * channels], as
    forward or grad_input want them."""
    layout = _layout(plan, "forward" if dim == "y" else "grad_input")
    made = create(graph, layout, "b", name, turned=True)
    view = made.tensor() if isinstance(made, Operand) else made
    view = view.transpose(1, 0, 2).reshape(*OperandLayout(plan, dim).shape)
    return _as_user(made, view)


def _by_group(plan: Plan, dim: str, tensor: Tensor) -> Tensor:
    """[batch, groups * channels] as [groups, batch, channels]."""
    layout = OperandLayout(plan, dim)
    layout.check(tensor)
    view = tensor.reshape(plan.sizes.z, plan.sizes.groups, layout.channels).transpose(1, 0, 2)
    return OperandView(tensor.operand, view) if isinstance(tensor, OperandView) else view


def add_product(
    graph: Graph, weights: SparseTensor, operand: Tensor, program: Sequence, name: str
) -> Tensor:
    """Add "forward" or "grad_input" of a plan with `use_dense`; returns [batch, groups * channels].

    Errors as of the sparse products.
    """
    plan = weights.plan
    forward = name == "forward"
    result = product.add_product(
        graph,
        _layout(plan, name),
        weights.values,
        _by_group(plan, "y" if forward else "x", operand),
        program,
        name,
        turned=(forward, True),
    )
    shape = OperandLayout(plan, "x" if forward else "y").shape
    return result.tensor().transpose(2, 0, 1).reshape(*shape)


def add_grad_weight(
    graph: Graph, weights: SparseTensor, gradient: Tensor, inputs: Tensor, program: Sequence
) -> Tensor:
    """Add grad_weight of a plan with `use_dense`; [groups * in * out], like the weights."""
    plan = weights.plan
    operands = _by_group(plan, "y", inputs), _by_group(plan, "x", gradient)
    layout = _layout(plan, "grad_weight")
    turned = (True, False)
    result = product.add_product(graph, layout, *operands, program, "grad_weight", turned=turned)
    return result.tensor().flatten()
