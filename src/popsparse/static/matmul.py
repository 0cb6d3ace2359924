"""Products with a sparse matrix whose pattern is known when the program is made: the API."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dynsparse.pattern import SparsePattern
from dynsparse.tracing import spanned
from popsparse.encoding.formats import Blocks, COOMatrix, CSRMatrix, SparseMatrix, row_major
from popsparse.machine import Graph, Sequence, Tensor, as_dtype
from popsparse.planning.plan import PlanningCache
from popsparse.static.layout import StaticPlan
from popsparse.static.params import MatmulParams, Options, pattern_of
from popsparse.static.planner import make_plan
from popsparse.static.program import DenseTensor, add_product, add_values, dense_operand

_Options = Options | dict[str, Any] | None


@dataclass(frozen=True, eq=False)
class SparseTensor:
    """A sparse operand on the machine: `nz_values` takes what `Partitioner.encode` made."""

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
        target: a `popsparse.machine.Target`; by default the Mk2.
        options: `static.Options` or a mapping.

    Raises:
        ValueError, TypeError: as `make_plan`.
    """
    if target is None:
        from popsparse.machine import Target

        target = Target.mk2()
    shape = getattr(pattern, "shape", None)
    if shape is None:
        raise TypeError(f"pattern must be a SparsePattern or a SparseMatrix, got {pattern!r}")
    params = MatmulParams(1, shape[0], shape[1], n)
    return make_plan(target, dtype, params, pattern, options)


def _expect(params: MatmulParams, *, transposed: bool) -> None:
    if not isinstance(params, MatmulParams):
        raise TypeError(f"params must be static.MatmulParams, got {params!r}")
    if params.transposed != transposed:
        made = "create_for_dense_sparse" if transposed else "create_for_sparse_dense"
        raise ValueError(f"the parameters are of the other product: make them by {made}")


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
    """The sparse operand [m, k] of sparse x dense.

    Args:
        graph: of the target to plan for.
        dtype: float16 or float32.
        params: by `MatmulParams.create_for_sparse_dense`.
        matrix: its pattern; values it may have are not written, see `Partitioner.encode`.

    Raises:
        ValueError, TypeError: parameters of the other product; as `make_plan`.
    """
    _expect(params, transposed=False)
    found = make_plan(graph.target, dtype, params, matrix, options, cache)
    return SparseTensor(found, add_values(graph, found, name))


def create_sparse_dense_matmul_rhs(
    graph: Graph,
    dtype: Any,
    params: MatmulParams,
    matrix: SparseMatrix | SparsePattern,
    options: _Options = None,
    cache: PlanningCache | None = None,
    *,
    name: str = "dense",
) -> DenseTensor:
    """The dense operand [1, k, n] of sparse x dense, laid out by its use. Errors as above.

    Any other tensor of this shape serves too, at the price of a rearrangement.
    """
    _expect(params, transposed=False)
    found = make_plan(graph.target, dtype, params, matrix, options, cache)
    return dense_operand(graph, found, name)


def create_dense_sparse_matmul_rhs(
    graph: Graph,
    dtype: Any,
    params: MatmulParams,
    matrix: SparseMatrix | SparsePattern,
    options: _Options = None,
    cache: PlanningCache | None = None,
    *,
    name: str = "sparse",
) -> SparseTensor:
    """The sparse operand [k, m] of dense x sparse; parameters by `create_for_dense_sparse`."""
    _expect(params, transposed=True)
    found = make_plan(graph.target, dtype, params, matrix, options, cache)
    return SparseTensor(found, add_values(graph, found, name))


def create_dense_sparse_matmul_lhs(
    graph: Graph,
    dtype: Any,
    params: MatmulParams,
    matrix: SparseMatrix | SparsePattern,
    options: _Options = None,
    cache: PlanningCache | None = None,
    *,
    name: str = "dense",
) -> DenseTensor:
    """The dense operand [1, n, k] of dense x sparse, laid out by its use."""
    _expect(params, transposed=True)
    found = make_plan(graph.target, dtype, params, matrix, options, cache)
    return dense_operand(graph, found, name, turned=True)


def sparse_dense_matmul(
    graph: Graph,
    sparse: SparseTensor,
    dense: Tensor,
    program: Sequence,
    transpose_lhs: bool = False,
    transpose_rhs: bool = False,
    options: _Options = None,
    *,
    name: str = "static matmul",
) -> Tensor:
    """Add sparse [m, k] x dense [1, k, n] to a program; returns [1, m, n].

    Args:
        dense: [1, k, n], or [1, n, k] with `transpose_rhs`.
        transpose_lhs: must be False: a static sparse operand cannot be transposed.
        options: if given, must be those of the sparse operand.

    Raises:
        ValueError: an operand of another shape, of the other product or with other options;
            `transpose_lhs`. TypeError: operands of other types.
    """
    if transpose_lhs:
        raise ValueError(
            "a static sparse operand cannot be transposed: create it from the transposed matrix"
        )
    found = _checked(sparse, dense, options, transposed=False)
    turned = dense.transpose(0, 2, 1) if transpose_rhs else dense
    _check_shape(turned, [1, found.params.k, found.params.n], "right operand")
    return add_product(graph, found, sparse.nz_values, turned, program, name)


def dense_sparse_matmul(
    graph: Graph,
    dense: Tensor,
    sparse: SparseTensor,
    program: Sequence,
    transpose_lhs: bool = False,
    transpose_rhs: bool = False,
    options: _Options = None,
    *,
    name: str = "static matmul",
) -> Tensor:
    """Add dense [1, n, k] x sparse [k, m] to a program; returns [1, n, m].

    Args and errors as `sparse_dense_matmul`, with left and right exchanged.
    """
    if transpose_rhs:
        raise ValueError(
            "a static sparse operand cannot be transposed: create it from the transposed matrix"
        )
    found = _checked(sparse, dense, options, transposed=True)
    turned = dense.transpose(0, 2, 1) if transpose_lhs else dense
    _check_shape(turned, [1, found.params.n, found.params.k], "left operand")
    return add_product(graph, found, sparse.nz_values, turned, program, name, turned=True)


def _checked(sparse: Any, dense: Any, options: _Options, *, transposed: bool) -> StaticPlan:
    if not isinstance(sparse, SparseTensor):
        raise TypeError(
            "the sparse operand must be a static.SparseTensor as a create_..._matmul function "
            f"makes it, got {type(sparse).__name__}"
        )
    found = sparse.plan
    _expect(found.params, transposed=transposed)
    if options is not None and Options.parse(options) != found.options:
        raise ValueError(
            f"the sparse operand was made with {found.options}, not with {Options.parse(options)}"
        )
    if not isinstance(dense, Tensor):
        raise TypeError(f"the dense operand must be a Tensor, got {type(dense).__name__}")
    wanted = as_dtype(found.dtype.name)
    if dense.dtype != wanted:
        raise TypeError(
            f"the sparse operand is {wanted.name}, the dense one {dense.dtype.name}: cast one"
        )
    return found


def _check_shape(dense: Tensor, wanted: list[int], what: str) -> None:
    if list(dense.shape) != wanted:
        raise ValueError(f"the {what} must have the shape {wanted}, got {list(dense.shape)}")


class Partitioner:
    """Puts the values of a matrix in the order in which the device has them, and back.

    Args:
        params, dtype, target, matrix, options, cache: as of the operand on the device. The
            pattern of `matrix` is the only one this partitioner takes.
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
        """The values of a matrix in device order, [nnz x block area], their dtype kept.

        Args:
            matrix: a COO, CSR, CSC or BSR matrix; or a pattern with `values`, [nnz] or
                [nnz, b, b].

        Raises:
            ValueError: another pattern than the partitioner's, or values of another shape.
        """
        if isinstance(matrix, SparsePattern):
            if values is None:
                raise ValueError("a SparsePattern has no values: give them as well")
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
        """The matrix whose values are in device order, sorted.

        Raises:
            ValueError: another number of values.
        """
        pattern, block = self.plan.pattern, self.plan.pattern.block_size
        array = np.asarray(nz_values)
        if array.shape != (pattern.nnz * block * block,):
            raise ValueError(
                f"nz_values must have the shape {[pattern.nnz * block * block]}, "
                f"got {list(array.shape)}"
            )
        blocks = np.empty((pattern.nnz, block, block), array.dtype)
        blocks[self.plan.order] = array.reshape(-1, block, block)
        rows, columns = (at.numpy().astype(np.int64) for at in (pattern.rows, pattern.cols))
        if self.plan.params.transposed:
            stored = row_major(Blocks(columns, rows, blocks.transpose(0, 2, 1)))
        else:
            stored = Blocks(rows, columns, blocks)
        coo = COOMatrix(
            stored.data.reshape(-1),
            stored.col * block,
            stored.row * block,
            self.plan.params.sparse_shape,
            (block, block),
        )
        return coo.to_csr()
