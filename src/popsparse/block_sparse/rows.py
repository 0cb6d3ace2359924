"""The softmax of the rows of a block-sparse matrix, and its gradient, on the machine.

Rows of elements are assigned to the tiles, longest first to the lightest, and copied there; then
the original's steps follow, one compute set each: mask, maximum, difference and exponential, sum,
inverse, product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from dynsparse._core.checks import check_choice, check_integer, check_sizes, check_types
from popsparse.block_sparse.partition import SUBBLOCK_MASKS, assign_to_lightest, mask_of
from popsparse.block_sparse.program import elementwise_cycles
from popsparse.machine import (
    FLOAT,
    HALF,
    Codelet,
    Copy,
    Execute,
    Graph,
    In,
    InOut,
    Out,
    Ragged,
    Sequence,
    Tensor,
    VertexView,
)
from popsparse.machine.intervals import offsets_of
from popsparse.planning.cycles import reduce as reduce_cycles
from popsparse.planning.params import ceil_div, data_type
from popsparse.programs.layout import execute


@check_types
def softmax(
    graph: Graph,
    values: Tensor,
    dim: Any,
    block_size: Any,
    sparsity: Any,
    program: Sequence,
    subblock_mask: str = "none",
    num_groups: int = 1,
    *,
    name: str = "block-sparse softmax",
) -> Tensor:
    """Add exp(s) / sum of exp(s) over each row to a program; absent elements count as -infinity.

    Args:
        values: [nnz, area], float16 or float32, mapped to tiles.
        dim: (rows, cols) of the matrix, with the rows of all groups.
        block_size: (rows, cols) of a block.
        sparsity: a `SparsePattern` or a mask of blocks.
        subblock_mask: "zero_upper_triangle" or "zero_lower_triangle" of each group. ("none")
        num_groups: number of matrices, stacked vertically.

    Returns:
        [nnz, area], on the tiles of values. A completely masked row gives zeros.

    Raises:
        ValueError: wrong types (92), shapes (93, 95), sizes (94); a mask of a wrong size.
    """
    rows = _Rows(graph, values, dim, block_size, sparsity, num_groups, name)
    out = rows.add_like_values("out")
    rows.add_softmax(values, out, program, subblock_mask)
    return out


@check_types
def softmax_in_place(
    graph: Graph,
    values: Tensor,
    dim: Any,
    block_size: Any,
    sparsity: Any,
    program: Sequence,
    subblock_mask: str = "none",
    num_groups: int = 1,
    *,
    name: str = "block-sparse softmax",
) -> None:
    """Add a softmax that overwrites the values to a program; arguments and errors as `softmax`."""
    rows = _Rows(graph, values, dim, block_size, sparsity, num_groups, name)
    rows.add_softmax(values, values, program, subblock_mask)


@check_types
def softmax_grad(
    graph: Graph,
    out: Tensor,
    out_grad: Tensor,
    dim: Any,
    block_size: Any,
    sparsity: Any,
    program: Sequence,
    *,
    name: str = "block-sparse softmax gradient",
) -> Tensor:
    """Add out * grad - out * sum over the row of out * grad to a program.

    Args:
        out: the result of `softmax`; out_grad: its gradient, of the same type and shape.
        dim, block_size, sparsity: as in `softmax`.

    Raises:
        ValueError: as `softmax`; a gradient of a wrong type or shape (96).
    """
    rows = _Rows(graph, out, dim, block_size, sparsity, 1, name)
    if out_grad.dtype != out.dtype or out_grad.shape != out.shape:
        raise ValueError(
            f"out_grad must be {out.dtype.name} {list(out.shape)} as out is, got "
            f"{out_grad.dtype.name} {list(out_grad.shape)}"
        )
    in_grad = rows.add_like_values("in")
    rows.add_gradient(out, out_grad, in_grad, program)
    return in_grad


def _elementwise(
    name: str,
    fields: dict[str, Any],
    compute: Callable[[VertexView], None],
    *,
    vector: int = 1,
    single: int = 0,
) -> Codelet:
    """Operations on every element of the field "out" of each tile: numbers of those that work on
    vectors, and of functions that do not."""

    def cycles(v: VertexView) -> Any:
        sizes = v.out.lengths, data_type(v.out.values.dtype), v.target.workers
        return elementwise_cycles(*sizes, vector=vector, single=single)

    return Codelet(name, fields, compute, cycles, "supervisor")


class _Rows:
    """Rows of elements on tiles, and the steps over them."""

    def __init__(
        self,
        graph: Graph,
        values: Tensor,
        dim: Any,
        block_size: Any,
        sparsity: Any,
        groups: Any,
        name: str,
    ) -> None:
        self.graph, self.values, self.name = graph, values, name
        rows, cols = check_sizes("dim", dim, ("rows", "cols"))
        height, width = check_sizes("block_size", block_size, ("rows", "cols"))
        groups = check_integer("num_groups", groups, 1)
        if rows % (height * groups) or cols % width:
            raise ValueError(
                f"dim must be a multiple of the blocks [{height}, {width}] in each of {groups} "
                f"groups, got [{rows}, {cols}]"
            )
        per_group = rows // groups
        mask = mask_of(sparsity, groups, per_group // height, cols // width)
        row, col = np.nonzero(mask.reshape(-1, mask.shape[-1]))
        if values.dtype not in (HALF, FLOAT):
            raise ValueError(f"values must be float16 or float32, got {values.dtype.name}")
        if list(values.shape) != (shape := [len(row), height * width]):
            raise ValueError(
                f"values must have the shape {shape}, got the shape {list(values.shape)}"
            )
        # Every stretch of a row in a block: its row, and its position among the values.
        places = np.arange(len(row) * height * width).reshape(len(row), height, width)
        of = (row[:, None] * height + np.arange(height)).reshape(-1)
        order = np.argsort(of, kind="stable")
        present, lengths = np.unique(of, return_counts=True)
        tile = assign_to_lightest(lengths * width, np.arange(graph.target.tiles))
        by_tile = np.argsort(tile, kind="stable")
        rank = np.argsort(by_tile)
        order = order[np.argsort(rank[np.searchsorted(present, of[order])], kind="stable")]
        # Rows in the order of their tiles.
        self.lengths, self.tile = lengths[by_tile] * width, tile[by_tile]
        self.elements = places.reshape(-1, width)[order].reshape(-1)
        within = col[:, None, None] * width + np.zeros((height, 1), np.int64) + np.arange(width)
        ahead = within - (of % per_group).reshape(len(row), height, 1)
        self.ahead = ahead.reshape(-1, width)[order].reshape(-1)
        self.begins = np.cumsum(self.lengths) - self.lengths
        self.tiles, self.place = np.unique(self.tile, return_inverse=True)
        self.rows_of = np.bincount(self.place, minlength=len(self.tiles))
        held = np.bincount(self.place, self.lengths, minlength=len(self.tiles)).astype(np.int64)
        self.held = offsets_of(held)
        self.row_of = np.repeat(np.arange(len(self.lengths)), self.lengths)

    def add_like_values(self, what: str) -> Tensor:
        """Add a variable with the layout of the values."""
        values, tiles = self.values, self.graph.tiles_of(self.values)
        name = f"{self.name} {what}"
        return self.graph.add_variable(values.dtype, [*values.shape], name, tiles=tiles)

    def add_packed(self, what: str) -> Tensor:
        """Add a variable of all elements, row by row, each row on its tile."""
        dtype = self.values.dtype
        variable = self.graph.add_variable(dtype, [len(self.elements)], f"{self.name} {what}")
        self.graph.map_stretches(variable, self.tile, self.lengths)
        return variable

    def add_numbers(self, what: str) -> Tensor:
        """Add a variable with a float for each row, on its tile."""
        return self.graph.add_variable(
            FLOAT, [len(self.tile)], f"{self.name} {what}", tiles=self.tile
        )

    def by_row(self, values: Tensor) -> Tensor:
        """The values in the order of the packed rows."""
        at = values.addresses().reshape(-1)[self.elements]
        return Tensor(self.graph, values.dtype, at.shape, addresses=at)

    def step(self, codelet: Codelet, **fields: Tensor) -> Execute:
        """A step with one vertex per tile; fields have all elements, or a number for each row."""
        rows = offsets_of(self.rows_of)
        edges = {
            name: Ragged(t, self.held if t.numel == len(self.elements) else rows)
            for name, t in fields.items()
        }
        name = f"{self.name} {codelet.name}"
        return execute(self.graph, name, codelet, self.tiles, edges, codelet.name)

    def reduction(self, name: str, reduceat: Any) -> Codelet:
        """A codelet that reduces every row to one number, at the cost of summing as many."""

        def compute(v: VertexView) -> None:
            v.out.values[...] = reduceat(v.src.values.astype(np.float32), self.begins)

        def cycles(v: VertexView) -> Any:
            rows = self.rows_of
            depth = ceil_div(np.diff(self.held), np.maximum(rows, 1))
            return reduce_cycles(rows, depth, FLOAT, FLOAT, v.target.workers)

        return Codelet(name, {"src": In(), "out": Out()}, compute, cycles, "supervisor")

    def add_softmax(
        self, values: Tensor, out: Tensor, program: Sequence, subblock_mask: str
    ) -> None:
        check_choice("subblock_mask", subblock_mask, SUBBLOCK_MASKS)
        steps = Sequence(name=self.name)
        program.add(steps)
        if not len(self.elements):
            return
        lowest = float(np.finfo(values.dtype.numpy).min)
        data = self.add_packed("rows")
        steps.add(Copy(self.by_row(values), data, name="pack rows"))
        if subblock_mask != "none":
            away = self.ahead > 0 if subblock_mask == "zero_upper_triangle" else self.ahead < 0

            def mask(v: VertexView) -> None:
                v.out.values[away] = lowest

            steps.add(self.step(_elementwise("mask", {"out": InOut()}, mask, vector=2), out=data))
        most, sums = self.add_numbers("largest"), self.add_numbers("sums")

        def exponentials(v: VertexView) -> None:
            shifted = v.out.values.astype(np.float32) - v.most.values[self.row_of]
            v.out.values[...] = np.exp(shifted)

        def inverses(v: VertexView) -> None:
            has_values = v.most.values > lowest  # otherwise all of the row is masked
            v.out.values[...] = np.where(has_values, 1 / v.out.values, 0)

        def scale(v: VertexView) -> None:
            v.out.values[...] = v.out.values.astype(np.float32) * v.factor.values[self.row_of]

        fields: dict[str, Any] = {"out": InOut(), "most": In()}
        exponential = _elementwise("exponential", fields, exponentials, vector=1, single=1)
        inverse = _elementwise("inverse", fields, inverses, vector=0, single=1)
        scale_rows = _elementwise("scale rows", {"out": InOut(), "factor": In()}, scale)
        steps.add(
            self.step(self.reduction("largest of rows", np.maximum.reduceat), src=data, out=most),
            self.step(exponential, out=data, most=most),
            self.step(self.reduction("sum of rows", np.add.reduceat), src=data, out=sums),
            self.step(inverse, out=sums, most=most),
            self.step(scale_rows, out=data, factor=sums),
            Copy(data, self.by_row(out), name="unpack rows"),
        )

    def add_gradient(self, out: Tensor, grad: Tensor, in_grad: Tensor, program: Sequence) -> None:
        steps = Sequence(name=self.name)
        program.add(steps)
        if not len(self.elements):
            return
        y, dy = self.add_packed("out"), self.add_packed("gradient")
        steps.add(Copy([(self.by_row(out), y), (self.by_row(grad), dy)], name="pack rows"))
        sums = self.add_numbers("sums")

        def multiply(v: VertexView) -> None:
            v.out.values[...] = v.out.values.astype(np.float32) * v.y.values

        def subtract(v: VertexView) -> None:
            shares = v.y.values.astype(np.float32) * v.sums.values[self.row_of]
            v.out.values[...] = v.out.values.astype(np.float32) - shares

        fields: dict[str, Any] = {"out": InOut(), "y": In()}
        product = _elementwise("multiply", fields, multiply)
        difference = _elementwise("subtract shares", fields | {"sums": In()}, subtract, vector=2)
        steps.add(
            self.step(product, out=dy, y=y),
            self.step(self.reduction("sum of rows", np.add.reduceat), src=dy, out=sums),
            self.step(difference, out=dy, y=y, sums=sums),
            Copy(dy, self.by_row(in_grad), name="unpack rows"),
        )
