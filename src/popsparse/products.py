"""PopSparse's functions for fully connected layers and matrix products.

Each function adds variables and steps to a machine's `Graph` and `Sequence`; an `Engine` runs them.
All functions of one layer or product must get the same parameters and options, which determine the
plan. `popsparse.Layer` is the short way.

`sparse_dense_matmul` wraps the fully connected layer: m = output channels, k = input channels,
n = batch. Its plan always serves both forward and grad_input, so the sparse operand can be used
transposed.
"""

from __future__ import annotations

from typing import Any

from dynsparse._core.checks import check_types
from popsparse.machine import Graph, Sequence, Tensor
from popsparse.planning.dense import DensePlan, dense_pass
from popsparse.planning.options import Options
from popsparse.planning.params import FullyConnectedParams, MatmulParams, data_type
from popsparse.planning.plan import PlanningCache, store_plan
from popsparse.planning.search import make_plan, matmul_plan
from popsparse.programs.dense_weights import operations
from popsparse.programs.layout import (
    OperandLayout,
    PlannedTensor,
    SparseTensor,
    check_weights,
    create_operand,
    keep_layout,
)
from popsparse.programs.product import add_product


@check_types
def create_fully_connected_weights(
    graph: Graph,
    dtype: Any,
    params: FullyConnectedParams,
    options: Options | dict[str, Any] | None = None,
    cache: PlanningCache | None = None,
    *,
    name: str = "weights",
) -> SparseTensor:
    """Create a layer's sparse weights: `.meta_info`, `.nz_values` take what a `Partitioner` makes.

    Args:
        graph: a graph for the target to plan for.
        dtype: float16 or float32.
        params, options: see `FullyConnectedParams`, `Options`.
        cache: reuses plans made earlier.

    Raises:
        ValueError, TypeError: parameters or options that no plan satisfies.
    """
    plan = make_plan(graph.target, dtype, params, options, cache)
    return operations(plan).create_weights(graph, plan, name)


@check_types
def create_fully_connected_input(
    graph: Graph,
    dtype: Any,
    params: FullyConnectedParams,
    options: Options | dict[str, Any] | None = None,
    cache: PlanningCache | None = None,
    *,
    name: str = "input",
) -> Tensor:
    """Create the input of a layer, [batch, groups * input channels], in the layout the plan needs.

    Any other tensor of this shape works too, at the cost of a rearrangement.
    """
    plan = make_plan(graph.target, dtype, params, options, cache)
    return operations(plan).create_operand(graph, plan, "y", name)


@check_types
def fully_connected_forward(
    graph: Graph,
    weights: SparseTensor,
    activations: Tensor,
    params: FullyConnectedParams,
    program: Sequence,
    options: Options | dict[str, Any] | None = None,
    cache: PlanningCache | None = None,
) -> Tensor:
    """Add Y = X W^T to a program.

    Args:
        activations: [batch, groups * input channels].
        program: the steps are appended to it.
        options: the options with which the weights were created.
        cache: keeps the plan of the weights, which all functions share.

    Returns:
        [batch, groups * output channels].

    Raises:
        ValueError: activations of another shape; weights made for other parameters or options.
        TypeError: activations of another type.
    """
    weights = check_weights(weights, params, options, cache)
    return operations(weights.plan).add_product(graph, weights, activations, program, "forward")


@check_types
def fully_connected_grad_a(
    graph: Graph,
    weights: SparseTensor,
    gradients: Tensor,
    params: FullyConnectedParams,
    program: Sequence,
    options: Options | dict[str, Any] | None = None,
    cache: PlanningCache | None = None,
) -> Tensor:
    """Add dX = dY W to a program: [batch, groups * output channels] to [.., input channels].

    Raises:
        ValueError: as `fully_connected_forward`; options without `do_grad_a_pass`.
    """
    weights = check_weights(weights, params, options, cache)
    if not weights.plan.options.do_grad_a_pass:
        raise ValueError("fully_connected_grad_a needs the option do_grad_a_pass=True")
    return operations(weights.plan).add_product(graph, weights, gradients, program, "grad_input")


@check_types
def fully_connected_grad_w(
    graph: Graph,
    weights: SparseTensor | Tensor,
    gradients: Tensor,
    activations: Tensor,
    params: FullyConnectedParams,
    program: Sequence,
    options: Options | dict[str, Any] | None = None,
    cache: PlanningCache | None = None,
) -> Tensor:
    """Add dW = dY^T X, at the positions of the pattern only, to a program.

    Args:
        weights: the sparse weights, or only their `meta_info`, as in PopSparse.
        gradients: [batch, groups * output channels].
        activations: [batch, groups * input channels].
        options: the options with which the weights were created.
        cache: provides the plan when `weights` is only meta-info.

    Returns:
        [values], laid out like `weights.nz_values`: `EncodedPattern.gather` puts it in the
        pattern's order. With `use_dense` it is the dense gradient, [groups * in * out].

    Raises:
        ValueError: as `fully_connected_forward`; options without `do_grad_w_pass`; meta-info of
            another size.
    """
    if isinstance(weights, Tensor):
        plan = make_plan(graph.target, activations.dtype.numpy, params, options, cache)
        weights = SparseTensor.of_meta_info(plan, weights)
    else:
        weights = check_weights(weights, params, options, cache)
    if not weights.plan.options.do_grad_w_pass:
        raise ValueError("fully_connected_grad_w needs the option do_grad_w_pass=True")
    add = operations(weights.plan).add_grad_weight
    return add(graph, weights, gradients, activations, program)


@check_types
def fully_connected_dense_grad_w_serial_splits(
    graph: Graph,
    dtype: Any,
    params: FullyConnectedParams,
    options: Options | dict[str, Any] | None = None,
    cache: PlanningCache | None = None,
) -> tuple[int, int, int]:
    """The number of steps in time into which the dense product of grad_weight would be split.

    Its operands have the type `dtype`, its partial sums the effective `partials_type`: float32 for
    elements, never narrower than the data.

    Returns:
        The serial splits of groups, input channels and output channels of [G, in, out]. If one is
        above 1, the dense weight gradient never has to exist as a whole.
    """
    kind = data_type(dtype)
    requested = Options.parse(options).repaired(kind, params.sparsity_params.is_element)

    def make() -> DensePlan:
        return dense_pass(
            "grad_weight",
            graph.target,
            kind,
            params,
            partials=requested.partials_type,
            available_memory_proportion=requested.available_memory_proportion,
        )

    key = (graph.target, kind, params, requested, "dense grad_weight")
    plan = make() if cache is None else cache.find(key, make)
    splits = (plan.serial_out, 1) if plan.swapped else (1, plan.serial_out)
    return 1, *splits


@check_types
def create_sparse_dense_matmul_lhs(
    graph: Graph,
    dtype: Any,
    params: MatmulParams,
    options: Options | dict[str, Any] | None = None,
    cache: PlanningCache | None = None,
    *,
    name: str = "lhs",
) -> SparseTensor:
    """Create the sparse operand [groups, m, k].

    Args:
        graph: a graph for the target to plan for.
        dtype: float16 or float32.
        params, options: see `MatmulParams`, `Options`.
        cache: reuses plans made earlier.

    Raises:
        ValueError, TypeError: parameters or options that no plan satisfies, dense weights.
    """
    plan = matmul_plan(graph.target, dtype, params, options, cache)
    if plan.use_dense:
        raise ValueError("the operand of a product is sparse: leave out use_dense")
    return SparseTensor.create(graph, plan, name)


@check_types
def create_sparse_dense_matmul_rhs(
    graph: Graph,
    dtype: Any,
    params: MatmulParams,
    options: Options | dict[str, Any] | None = None,
    cache: PlanningCache | None = None,
    *,
    name: str = "rhs",
) -> PlannedTensor:
    """Create the dense operand [groups, k, n], in the layout the plan needs. Raises as above."""
    plan = matmul_plan(graph.target, dtype, params, options, cache)
    return _split_groups(create_operand(graph, plan, "y", name))


def _split_groups(natural: PlannedTensor) -> PlannedTensor:
    """View an operand [batch, groups * channels] as [groups, channels, batch]."""
    layout = natural.layout
    view = natural.reshape(natural.shape[0], layout.plan.sizes.groups, layout.channels)
    return PlannedTensor(natural.home, view.transpose(1, 2, 0).addresses(), layout)


@check_types
def sparse_dense_matmul(
    graph: Graph,
    lhs: SparseTensor,
    rhs: Tensor,
    program: Sequence,
    transpose_lhs: bool = False,
    transpose_rhs: bool = False,
    options: Options | dict[str, Any] | None = None,
    cache: PlanningCache | None = None,
) -> PlannedTensor:
    """Add the product of a sparse and a dense matrix to a program.

    Args:
        lhs: the operand of `create_sparse_dense_matmul_lhs`, [groups, m, k].
        rhs: [groups, k, n]; with `transpose_lhs` [groups, m, n]; `transpose_rhs` swaps the last two
            dimensions.
        program: the steps are appended to it.
        transpose_lhs: multiply by the transposed sparse matrix.
        options: the options with which the sparse operand was created.
        cache: keeps the plan of the sparse operand.

    Returns:
        [groups, m, n]; with `transpose_lhs` [groups, k, n].

    Raises:
        TypeError: `lhs` is not a sparse operand, or `rhs` of another element type.
        ValueError: shapes that do not match, or options other than those at creation.
    """
    plan = lhs.plan
    if "grad_input" not in plan.costs or plan.use_dense:
        raise ValueError("lhs must be made by create_sparse_dense_matmul_lhs")
    requested = Options.parse(options).with_passes(grad_a=True, grad_w=False)
    requested = requested.repaired(plan.dtype, plan.params.sparsity_params.is_element)
    plan.options.check_equal(requested, "lhs was")
    store_plan(cache, plan)
    layout = OperandLayout(plan, "x" if transpose_lhs else "y")
    shape = [plan.sizes.groups, layout.channels, plan.sizes.z]
    expected = [shape[0], shape[2], shape[1]] if transpose_rhs else shape
    if list(rhs.shape) != expected:
        how = f"transpose_lhs={transpose_lhs}, transpose_rhs={transpose_rhs}"
        raise ValueError(f"with {how}, rhs must be {expected}, got {list(rhs.shape)}")
    if transpose_rhs:
        rhs = rhs.transpose(0, 2, 1)
    operand = keep_layout(rhs, rhs.transpose(2, 0, 1).reshape(*layout.shape))
    name = "grad_input" if transpose_lhs else "forward"
    return _split_groups(add_product(graph, lhs, operand, program, name))
