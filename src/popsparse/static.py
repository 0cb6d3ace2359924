"""Products with a sparse matrix whose pattern is known when the program is built.

The names follow PopSparse's `static_` API. Each function adds variables and steps to a machine's
`Graph` and `Sequence`; an `Engine` runs them. The short way, without a machine:

    plan = static.plan(pattern, n, dtype="float16", target=Target.bow())
    static.predict(plan).tflops

Source: Li, Z. et al., arXiv:2303.16999; section 6 of docs/popsparse-formulas.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dynsparse._core.checks import check_kind
from dynsparse.pattern import SparsePattern
from dynsparse.tracing import spanned
from popsparse.formats import CSRMatrix, SparseMatrix
from popsparse.machine import Graph, Sequence, Target, Tensor
from popsparse.planning.options import Options
from popsparse.planning.params import MatmulParams
from popsparse.planning.plan import PlanningCache, store_plan
from popsparse.planning.static import make_plan, pattern_of, transpose
from popsparse.planning.static_layout import StaticPlan
from popsparse.plans import plan_report, plan_text, predict, tile_memory
from popsparse.programs.layout import PlannedTensor
from popsparse.programs.static import add_product, add_values, dense_operand

__all__ = [
    "MatmulParams",
    "Options",
    "Partitioner",
    "PlannedTensor",
    "PlanningCache",
    "SparseTensor",
    "StaticPlan",
    "create_dense_sparse_matmul_lhs",
    "create_dense_sparse_matmul_rhs",
    "create_sparse_dense_matmul_lhs",
    "create_sparse_dense_matmul_rhs",
    "dense_sparse_matmul",
    "make_plan",
    "plan",
    "plan_report",
    "plan_text",
    "predict",
    "sparse_dense_matmul",
    "tile_memory",
]

_Options = Options | dict[str, Any] | None


@dataclass(frozen=True, eq=False)
class SparseTensor:
    """A sparse operand on the machine; write the result of `Partitioner.encode` to `nz_values`."""

    plan: StaticPlan
    nz_values: Tensor


def plan(
    pattern: Any, n: int, dtype: Any = "float16", target: Any = None, *, options: Any = None
) -> StaticPlan:
    """Plan sparse [m, k] times dense [k, n].

    Args:
        pattern: a `SparsePattern` or a `SparseMatrix`, [m, k].
        n: columns of the dense operand.
        dtype: float16 or float32.
        target: a `popsparse.machine.Target`; defaults to the Mk2.
        options: `Options` or a mapping.

    Raises:
        ValueError, TypeError: as `make_plan`.
    """
    target = Target.mk2() if target is None else target
    shape = getattr(pattern, "shape", None)
    if shape is None:
        raise TypeError(f"pattern must be a SparsePattern or a SparseMatrix, got {pattern!r}")
    params = MatmulParams.create_for_sparse_dense(1, shape[0], shape[1], n)
    return make_plan(target, dtype, params, pattern, options)


def create_sparse_dense_matmul_lhs(
    graph: Graph,
    dtype: Any,
    params: MatmulParams,
    matrix: SparseMatrix | SparsePattern,
    options: _Options = None,
    cache: PlanningCache | None = None,
    *,
    name: str = "sparse",
) -> SparseTensor:
    """Create the sparse operand: [m, k] for sparse x dense, or [k, m] for dense x sparse.

    Args:
        graph: a graph for the target to plan for.
        dtype: float16 or float32.
        params: from `MatmulParams.create_for_sparse_dense` or `create_for_dense_sparse`.
        matrix: provides the pattern; its values are ignored, see `Partitioner.encode`.

    Raises:
        ValueError, TypeError: as `make_plan`.
    """
    plan = make_plan(graph.target, dtype, params, matrix, options, cache)
    return SparseTensor(plan, add_values(graph, plan, name))


def create_sparse_dense_matmul_rhs(
    graph: Graph,
    dtype: Any,
    params: MatmulParams,
    matrix: SparseMatrix | SparsePattern,
    options: _Options = None,
    cache: PlanningCache | None = None,
    *,
    name: str = "dense",
) -> PlannedTensor:
    """Create the dense operand, in the layout the plan needs: [1, k, n] for sparse x dense, or
    [1, n, k] for dense x sparse. Arguments and errors as above.

    Any other tensor of this shape works too, at the cost of a rearrangement.
    """
    plan = make_plan(graph.target, dtype, params, matrix, options, cache)
    return dense_operand(graph, plan, name, transposed=params.transposed)


# `params` decides which of the two products is meant.
create_dense_sparse_matmul_rhs = create_sparse_dense_matmul_lhs
create_dense_sparse_matmul_lhs = create_sparse_dense_matmul_rhs


def sparse_dense_matmul(
    graph: Graph,
    sparse: SparseTensor,
    dense: Tensor,
    program: Sequence,
    transpose_lhs: bool = False,
    transpose_rhs: bool = False,
    options: _Options = None,
    cache: PlanningCache | None = None,
    *,
    name: str = "static matmul",
) -> Tensor:
    """Add sparse [m, k] x dense [1, k, n] to a program; returns [1, m, n].

    Args:
        dense: [1, k, n], or [1, n, k] with `transpose_rhs`.
        transpose_lhs: must be False: a static sparse operand cannot be transposed.
        options: if given, must equal those of the sparse operand.
        cache: keeps the plan of the sparse operand.

    Raises:
        ValueError: an operand of a wrong shape, for the other product or with other options;
            `transpose_lhs`. TypeError: operands of other types.
    """
    plan, dense = _check_operands(sparse, dense, transpose_lhs, transpose_rhs, options, "right")
    store_plan(cache, plan)
    return add_product(graph, plan, sparse.nz_values, dense, program, name)


def dense_sparse_matmul(
    graph: Graph,
    dense: Tensor,
    sparse: SparseTensor,
    program: Sequence,
    transpose_lhs: bool = False,
    transpose_rhs: bool = False,
    options: _Options = None,
    cache: PlanningCache | None = None,
    *,
    name: str = "static matmul",
) -> Tensor:
    """Add dense [1, n, k] x sparse [k, m] to a program; returns [1, n, m].

    Args and errors as `sparse_dense_matmul`, with left and right exchanged.
    """
    plan, dense = _check_operands(sparse, dense, transpose_rhs, transpose_lhs, options, "left")
    store_plan(cache, plan)
    return add_product(graph, plan, sparse.nz_values, dense, program, name, transposed=True)


def _check_operands(
    sparse: Any, dense: Any, transpose_sparse: bool, transpose_dense: bool, options: _Options,
    side: str,
) -> tuple[StaticPlan, Tensor]:  # fmt: skip
    """The plan, and the dense operand (on the "left" or "right" `side`) without its transpose."""
    if transpose_sparse:
        raise ValueError(
            "a static sparse operand cannot be transposed: create it from the transposed matrix"
        )
    check_kind("the sparse operand", sparse, SparseTensor, "a static.SparseTensor")
    plan = sparse.plan
    params = plan.params
    if params.transposed != (side == "left"):
        function = "create_for_sparse_dense" if side == "right" else "create_for_dense_sparse"
        raise ValueError(f"the parameters are of the other product: make them by {function}")
    if options is not None:
        plan.options.check_equal(Options.parse(options, "static"), "the sparse operand was")
    check_kind("the dense operand", dense, Tensor, "a Tensor")
    if dense.dtype != plan.dtype:
        raise TypeError(
            f"the sparse operand is {plan.dtype}, the dense one {dense.dtype}: cast one"
        )
    if transpose_dense:
        dense = dense.transpose(0, 2, 1)
    shape = [1, params.k, params.n] if side == "right" else [1, params.n, params.k]
    if list(dense.shape) != shape:
        raise ValueError(f"the {side} operand must have the shape {shape}, got {list(dense.shape)}")
    return plan, dense


class Partitioner:
    """Converts the values of a matrix to device order and back.

    Args:
        params, dtype, target, matrix, options, cache: the same as for the operand on the device.
            This partitioner accepts only the pattern of `matrix`.
    """

    def __init__(
        self,
        params: MatmulParams,
        dtype: Any,
        target: Any,
        matrix: SparseMatrix | SparsePattern,
        options: _Options = None,
        cache: PlanningCache | None = None,
    ) -> None:
        self.plan = make_plan(target, dtype, params, matrix, options, cache)

    @spanned("encode")
    def encode(self, matrix: SparseMatrix | SparsePattern, values: Any = None) -> np.ndarray:
        """The values of a matrix in device order, [nnz x block area], of the same dtype.

        Args:
            matrix: a COO, CSR or CSC matrix; or a pattern with `values`, [nnz] or
                [nnz, b, b].

        Raises:
            ValueError: a pattern other than the partitioner's, or values of a wrong shape.
        """
        if isinstance(matrix, SparsePattern):
            if values is None:
                raise ValueError("a SparsePattern has no values: pass them too")
            matrix = CSRMatrix.from_pattern(matrix, values)
        elif values is not None:
            raise ValueError(f"a {type(matrix).__name__} brings its own values: give none")
        pattern, blocks = pattern_of(matrix, self.plan.params)
        if pattern != self.plan.pattern:
            raise ValueError(
                "the positions differ from those planned for: a static pattern cannot change; "
                "make another operand or use the dynamic product"
            )
        assert blocks is not None
        return np.ascontiguousarray(blocks[self.plan.order]).reshape(-1)

    def decode(self, nz_values: Any) -> CSRMatrix:
        """The matrix, sorted, from values in device order.

        Raises:
            ValueError: a wrong number of values.
        """
        pattern, block = self.plan.pattern, self.plan.pattern.block_size
        array = np.asarray(nz_values)
        if array.shape != (pattern.nnz * block * block,):
            raise ValueError(
                f"nz_values must have the shape {[pattern.nnz * block * block]}, "
                f"got {list(array.shape)}"
            )
        blocks: Any = np.empty((pattern.nnz, block, block), array.dtype)
        blocks[self.plan.order] = array.reshape(-1, block, block)
        if self.plan.params.transposed:
            pattern, blocks = transpose(pattern, blocks)
        return CSRMatrix.from_pattern(pattern, blocks.reshape(pattern.values_shape))
