"""Sparse fully connected layers on the tile machine, with the names of PopSparse's API.

Each function adds variables and steps to a machine's `Graph` and `Sequence`; an `Engine` runs them.
All functions that belong together must get the same parameters and options: the plan follows from
them. `popsparse.Layer` is the short way.
"""

from __future__ import annotations

from typing import Any

from dynsparse.typed import typed
from popsparse.machine import Graph, Sequence, Tensor
from popsparse.planning.cache import PlanningCache
from popsparse.planning.dense_planner import dense_pass
from popsparse.planning.options import Options
from popsparse.planning.params import FullyConnectedParams
from popsparse.planning.search import make_plan
from popsparse.programs.choice import operations
from popsparse.programs.weights import SparseTensor, checked_weights


@typed
def create_fully_connected_weights(
    graph: Graph,
    dtype: Any,
    params: FullyConnectedParams,
    options: Options | dict[str, Any] | None = None,
    cache: PlanningCache | None = None,
    *,
    name: str = "weights",
) -> SparseTensor:
    """The sparse weights of a layer: `.meta_info` and `.nz_values` take what a `Partitioner` made.

    Args:
        graph: of the target to plan for.
        dtype: float16 or float32.
        params, options: see `FullyConnectedParams`, `Options`.
        cache: plans made earlier are taken from it.

    Raises:
        ValueError, TypeError: parameters or options no plan can meet.
    """
    plan = make_plan(graph.target, dtype, params, options, cache)
    return operations(plan).create_weights(graph, plan, name)


@typed
def create_fully_connected_input(
    graph: Graph,
    dtype: Any,
    params: FullyConnectedParams,
    options: Options | dict[str, Any] | None = None,
    cache: PlanningCache | None = None,
    *,
    name: str = "input",
) -> Tensor:
    """The input of a layer, [batch, groups * input channels], laid out by its use.

    Any other tensor of this shape serves as input too, at the price of a rearrangement.
    """
    plan = make_plan(graph.target, dtype, params, options, cache)
    return operations(plan).create_operand(graph, plan, "y", name)


@typed
def fully_connected_forward(
    graph: Graph,
    weights: SparseTensor,
    activations: Tensor,
    params: FullyConnectedParams,
    program: Sequence,
    options: Options | dict[str, Any] | None = None,
) -> Tensor:
    """Add Y = X W^T to a program.

    Args:
        activations: [batch, groups * input channels].
        program: the steps are appended to it.

    Returns:
        [batch, groups * output channels].

    Raises:
        ValueError: activations of another shape; weights made for other parameters or options.
        TypeError: activations of another type.
    """
    weights = checked_weights(weights, params, options)
    return operations(weights.plan).add_product(graph, weights, activations, program, "forward")


@typed
def fully_connected_grad_a(
    graph: Graph,
    weights: SparseTensor,
    gradients: Tensor,
    params: FullyConnectedParams,
    program: Sequence,
    options: Options | dict[str, Any] | None = None,
) -> Tensor:
    """Add dX = dY W to a program: [batch, groups * output channels] to [.., input channels].

    Raises:
        ValueError: as `fully_connected_forward`; options without `do_grad_a_pass`.
    """
    weights = checked_weights(weights, params, options)
    if not weights.plan.options.do_grad_a_pass:
        raise ValueError("fully_connected_grad_a needs the option do_grad_a_pass=True")
    return operations(weights.plan).add_product(graph, weights, gradients, program, "grad_input")


@typed
def fully_connected_grad_w(
    graph: Graph,
    weights: SparseTensor,
    gradients: Tensor,
    activations: Tensor,
    params: FullyConnectedParams,
    program: Sequence,
    options: Options | dict[str, Any] | None = None,
) -> Tensor:
    """Add dW = dY^T X, at the positions of the pattern only, to a program.

    Args:
        gradients: [batch, groups * output channels].
        activations: [batch, groups * input channels].

    Returns:
        [values], laid out like `weights.nz_values`: `EncodedPattern.gather` brings it into the
        pattern's order. With `use_dense` that is the whole gradient, [groups * in * out].

    Raises:
        ValueError: as `fully_connected_forward`; options without `do_grad_w_pass`.
    """
    weights = checked_weights(weights, params, options)
    if not weights.plan.options.do_grad_w_pass:
        raise ValueError("fully_connected_grad_w needs the option do_grad_w_pass=True")
    add = operations(weights.plan).add_grad_weight
    return add(graph, weights, gradients, activations, program)


@typed
def fully_connected_dense_grad_w_serial_splits(
    graph: Graph,
    dtype: Any,
    params: FullyConnectedParams,
    options: Options | dict[str, Any] | None = None,
) -> tuple[int, int, int]:
    """Into how many steps in time the dense product of grad_weight would be cut.

    Returns:
        The serial splits of groups, input channels and output channels of [G, in, out]; the dense
        weight gradient need never exist whole where one of them is above 1.
    """
    wanted = Options.parse(options)
    found = dense_pass(
        "grad_weight",
        graph.target,
        dtype,
        params,
        available_memory_proportion=wanted.available_memory_proportion,
    )
    splits = (found.serial_out, 1) if found.swapped else (1, found.serial_out)
    return 1, *splits
