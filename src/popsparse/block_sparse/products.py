"""Block-sparse products on the machine: operands, and the product itself."""

from __future__ import annotations

from typing import Any

import numpy as np

from dynsparse.checks import check_kind
from popsparse.block_sparse.params import MatmulParams
from popsparse.block_sparse.planning import BlockSparsePlan, plan
from popsparse.block_sparse.program import add_blocks, add_product, at_home, natural
from popsparse.machine import Graph, Sequence, Tensor, as_dtype


def _planned(graph: Graph, params: MatmulParams, options: Any) -> BlockSparsePlan:
    check_kind("graph", graph, Graph, "a Graph")
    return plan(params, graph.target, options)


def _blocks(params: MatmulParams, which: str) -> tuple[int, tuple[int, int], bool]:
    """Of the operand "a" or "b" of `params.forward()`: how many blocks, their shape, whether they
    are sparse."""
    m, k, n = params.grid
    bm, bk, bn = params.block_size
    if which == "a":
        return params.groups * m * k, (bm, bk), False
    if params.kind == "dense_dense":
        return params.groups * k * n, (bk, bn), False
    return params.nnz, ((bn, bk) if params.transposed else (bk, bn)), True


def _create(graph: Graph, params: MatmulParams, options: Any, side: str, name: str) -> Tensor:
    made = _planned(graph, params, options)
    turned = params.kind == "sparse_dense"
    which = {"lhs": "b", "rhs": "a"}[side] if turned else {"lhs": "a", "rhs": "b"}[side]
    forward = params.forward()
    count, shape, sparse = _blocks(forward, which)
    home = at_home(made, which, count)
    blocks = add_blocks(graph, as_dtype(params.dtype.name), home, shape, name)
    if sparse:
        return blocks.reshape(count, shape[0] * shape[1])
    rows = forward.groups * forward.grid[0 if which == "a" else 1]
    if not turned:
        return natural(blocks, rows)
    # [groups * n, k] of the turned product is one [k, n] a group, one below the other.
    matrix = natural(blocks, rows).reshape(forward.groups, forward.dim[0], forward.dim[1])
    return matrix.transpose(0, 2, 1).reshape(forward.groups * forward.dim[1], forward.dim[0])


def create_matmul_lhs(
    graph: Graph, params: MatmulParams, options: Any = None, *, name: str = "lhs"
) -> Tensor:
    """The left operand, its blocks on tiles that use them: dense [groups * m, k], or of
    "sparse_dense" the blocks [nnz, area] in the order of the mask.

    Args:
        graph: of the target to plan for.
        params: by a class method of `MatmulParams`.
        options: `Options` or a mapping.

    Raises:
        ValueError, TypeError: as `plan`.
    """
    return _create(graph, params, options, "lhs", name)


def create_matmul_rhs(
    graph: Graph, params: MatmulParams, options: Any = None, *, name: str = "rhs"
) -> Tensor:
    """The right operand: dense [groups * k, n], or of "dense_sparse" the blocks [nnz, area].
    Args and errors as above."""
    return _create(graph, params, options, "rhs", name)


def matmul(
    graph: Graph,
    params: MatmulParams,
    program: Sequence,
    lhs: Tensor,
    rhs: Tensor,
    options: Any = None,
    *,
    name: str = "block-sparse matmul",
) -> Tensor:
    """Add a product to a program.

    Args:
        lhs, rhs: of `create_matmul_lhs` and `create_matmul_rhs`, or any tensors of their shapes
            that are mapped to tiles.

    Returns:
        dense [groups * m, n]; of "dense_dense" the blocks [nnz, area] in the order of the mask.

    Raises:
        ValueError: operands of other shapes (88, 89); as `plan`. TypeError: of other types.
    """
    made = _planned(graph, params, options)
    forward, turned = params.forward(), params.kind == "sparse_dense"
    check_kind("program", program, Sequence, "a Sequence")
    dense, sparse = (rhs, lhs) if turned else (lhs, rhs)
    groups, (m, k, n) = params.groups, params.dim
    _expect(dense, [groups * k, n] if turned else [groups * m, k], params, "rhs" if turned else
            "lhs")  # fmt: skip
    count, shape, is_sparse = _blocks(forward, "b")
    wanted = [count, shape[0] * shape[1]] if is_sparse else [groups * k, n]
    _expect(sparse, wanted, params, "lhs" if turned else "rhs")
    at = dense.addresses()
    if turned:
        at = at.reshape(groups, k, n).transpose(0, 2, 1).reshape(groups * n, k)
    a = _cut(at, forward.block_size[0], forward.block_size[1])
    b = sparse.addresses()
    b = b.reshape(count, *shape) if is_sparse else _cut(b, shape[0], shape[1])
    out = add_product(graph, made, a, b, program, name, b_is_turned=forward.transposed)
    if params.kind == "dense_dense":
        return out.reshape(len(out), out.shape[1] * out.shape[2])
    found = natural(out, groups * forward.grid[0])
    if not turned:
        return found
    grouped = found.reshape(groups, n, m).transpose(0, 2, 1)
    return grouped.reshape(groups * m, n)


def _cut(addresses: np.ndarray, height: int, width: int) -> np.ndarray:
    """A matrix as blocks [rows * cols, height, width]."""
    rows, cols = addresses.shape[0] // height, addresses.shape[1] // width
    grid = addresses.reshape(rows, height, cols, width).transpose(0, 2, 1, 3)
    return grid.reshape(rows * cols, height, width)


def _expect(tensor: Any, shape: list[int], params: MatmulParams, what: str) -> None:
    check_kind(what, tensor, Tensor, "a Tensor of a graph")
    if list(tensor.shape) != shape:
        raise ValueError(f"{what} must have the shape {shape}, got {list(tensor.shape)}")
    if tensor.dtype != as_dtype(params.dtype.name):
        raise TypeError(
            f"{what} must be {params.dtype.name} as the parameters say, got {tensor.dtype.name}"
        )
