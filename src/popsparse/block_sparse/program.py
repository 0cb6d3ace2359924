"""Block-sparse products on the machine.

Known figures of the machine are used: matrix units and reductions as for dense products,
element-wise work as in `machine.codelets`. The exponential and the inverse have none, and are
charged like functions in `tensor_ops`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dynsparse._core.checks import check_types
from popsparse.block_sparse.partition import BlockSparsePlan, MatmulParams, plan
from popsparse.machine import (
    Codelet,
    Copy,
    DType,
    Execute,
    Graph,
    In,
    Out,
    Ragged,
    Sequence,
    Tensor,
    VertexView,
)
from popsparse.machine.dtypes import FLOAT
from popsparse.machine.intervals import Runs, offsets_of
from popsparse.planning import cycles as tile_cycles
from popsparse.planning.cycles import AMP
from popsparse.planning.params import ceil_div
from popsparse.programs.layout import execute


def transpose_codelet(counts: np.ndarray, rows: int, cols: int, dtype: DType) -> Codelet:
    """Transposes a tile's `counts` blocks [rows, cols] to [cols, rows]."""

    def compute(v: VertexView) -> None:
        blocks = v.src.values.reshape(-1, rows, cols)
        v.out.values[...] = blocks.transpose(0, 2, 1).reshape(-1)

    def cycles(v: VertexView) -> Any:
        workers = v.target.workers
        return tile_cycles.transpose_blocks(counts, rows, cols, dtype, workers)

    return Codelet("block transpose", {"src": In(), "out": Out()}, compute, cycles, "supervisor")


def _matrix_units(dtype: DType, partials: DType) -> AMP:
    """The matrix units, as in a dense product of these types."""
    if dtype is FLOAT:
        return AMP(8, 8, 8)
    return AMP(8, 16, 8) if partials is FLOAT else AMP(16, 16, 16)


def multiply_codelet(
    tile_of: np.ndarray,
    products: np.ndarray,
    block_size: tuple[int, int, int],
    dtype: DType,
    partials: DType,
) -> Codelet:
    """The pieces of each tile: sums of products of blocks a [bm, bk] and b [bn, bk].

    Args:
        tile_of: the tile index of each piece, ascending; products: its number of products.
    """
    bm, bk, bn = block_size
    of = np.repeat(np.arange(len(products)), products)

    def compute(v: VertexView) -> None:
        a = v.a.values.reshape(-1, bm, bk).astype(np.float32)
        b = v.b.values.reshape(-1, bn, bk).astype(np.float32)
        total = np.zeros((len(products), bm, bn), np.float32)
        np.add.at(total, of, a @ b.transpose(0, 2, 1))
        v.out.values[...] = total.reshape(-1)

    def cycles(v: VertexView) -> Any:
        kind = _matrix_units(dtype, partials)
        load = v.target.coefficient_load_bytes_per_cycle
        groups = ceil_div(bk, kind.in_channels) * products
        sizes = bm, groups, ceil_div(bn, kind.out_channels)
        of_piece = tile_cycles.amp(*sizes, kind, dtype, partials, v.target.workers, load)
        return np.bincount(tile_of, of_piece, minlength=v.count)

    fields = {"a": In(), "b": In(), "out": Out()}

    def flops(v: VertexView) -> Any:
        return 2 * bm * bk * bn * np.bincount(tile_of, products, minlength=v.count)

    return Codelet("block products", fields, compute, cycles, "supervisor", flops=flops)


def reduce_codelet(
    tile_of: np.ndarray,
    depth: np.ndarray,
    area: int,
    partials: DType,
    result: DType,
    mask: np.ndarray | None,
) -> Codelet:
    """The blocks of the result of each tile, from their partial sums, one after another.

    Args:
        tile_of: the tile index of each block, ascending; depth: its number of partial sums.
        mask: bool [blocks, area], False where the result is zeroed; None keeps all of it.
    """
    of = np.repeat(np.arange(len(depth)), depth)

    def compute(v: VertexView) -> None:
        total = np.zeros((len(depth), area), np.float32)
        np.add.at(total, of, v.partials.values.reshape(-1, area).astype(np.float32))
        v.out.values[...] = (total if mask is None else total * mask).reshape(-1)

    def cycles(v: VertexView) -> Any:
        each = tile_cycles.reduce(area, np.maximum(depth, 1), partials, result, v.target.workers)
        total_cycles = np.bincount(tile_of, np.broadcast_to(each, depth.shape), minlength=v.count)
        if mask is not None:
            masked = np.bincount(tile_of, area * ~mask.all(1), minlength=v.count)
            cleared = elementwise_cycles(masked, result, v.target.workers)
            total_cycles = total_cycles + np.where(masked > 0, cleared, 0)
        return total_cycles

    fields = {"partials": In(), "out": Out()}

    def flops(v: VertexView) -> Any:
        return area * np.bincount(tile_of, depth, minlength=v.count)

    return Codelet("block reduce", fields, compute, cycles, "supervisor", flops=flops)


def elementwise_cycles(
    elements: Any, dtype: DType, workers: int, *, vector: int = 1, single: int = 0
) -> Any:
    """A tile's cycles for element-wise operations: numbers of those that work on vectors, by
    section 7.3 of docs/popsparse-formulas.md, and of those that do not."""
    width = dtype.vector_width
    vectors = ceil_div(ceil_div(elements, workers), width)
    # No source gives cycles for the latter: a load, an instruction for each element, a store.
    each = 11 + workers * (58 + (2 + width) * vectors)
    return vector * tile_cycles.add_in_place(elements, dtype, workers) + single * each


def add_blocks(
    graph: Graph, dtype: DType, home: np.ndarray, shape: tuple[int, ...], name: str
) -> Tensor:
    """Add a variable [blocks, *shape], each block on its tile; those of tile -1 on any tile."""
    spread = np.arange(len(home)) * graph.target.tiles // max(len(home), 1)
    tiles = np.where(home < 0, spread, home)
    return graph.add_variable(dtype, [len(home), *shape], name, tiles=tiles)


def join_blocks(blocks: Tensor, rows: int) -> Tensor:
    """Join blocks [rows * cols, height, width] into their matrix."""
    count, height, width = blocks.shape
    grid = blocks.reshape(rows, count // rows, height, width).transpose(0, 2, 1, 3)
    return grid.reshape(rows * height, count // rows * width)


class _Product:
    def __init__(self, graph: Graph, plan: BlockSparsePlan, name: str) -> None:
        self.graph, self.plan, self.name = graph, plan, name
        self.params, self.pieces = plan.params, plan.pieces
        self.dtype = self.params.dtype

    def add_variable(self, dtype: DType, what: str, tiles: np.ndarray, each: int) -> Tensor:
        """Add a variable [len(tiles), each], row i on tiles[i]."""
        shape = [len(tiles), each]
        return self.graph.add_variable(dtype, shape, f"{self.name} {what}", tiles=tiles)

    def view(self, dtype: DType, addresses: np.ndarray) -> Tensor:
        return Tensor(self.graph, dtype, addresses.shape, addresses=addresses)

    def execute(self, what: str, codelet: Any, tiles: np.ndarray, edges: dict[str, Any]) -> Execute:
        return execute(self.graph, f"{self.name} {what}", codelet, tiles, edges, what)

    def add(self, a: np.ndarray, b: np.ndarray, program: Sequence) -> Tensor:
        """Add the product to a program: [results, bm, bn], in the order of the plan's products.

        Args:
            a: address of each element of the blocks [.., bm, bk] of the left operand.
            b: likewise of the right one, as they are stored: [.., bk, bn] or [.., bn, bk].
        """
        steps = Sequence(name=self.name)
        program.add(steps)
        count, kind = len(self.pieces.products.row), self.params.partials_type
        area = self.params.block_size[0] * self.params.block_size[2]
        out = self._add_results(count, area)
        partials = self.add_variable(kind, "partials", self.pieces.tile, area)
        for turn in range(self.plan.options.number_of_pass):
            now = np.flatnonzero(self.pieces.turn == turn)
            if len(now):
                self._multiply(now, a, b, partials, steps)
        self._reduce(partials, out, steps)
        return out.reshape(count, self.params.block_size[0], self.params.block_size[2])

    def _add_results(self, count: int, area: int) -> Tensor:
        """Create the result: each block on the tile of its first piece."""
        home = np.full(count, -1)
        home[self.pieces.result[::-1]] = self.pieces.tile[::-1]
        dtype = self.params.out_dtype
        return add_blocks(self.graph, dtype, home, (area,), f"{self.name} result")

    def _multiply(
        self,
        now: np.ndarray,
        a: np.ndarray,
        b: np.ndarray,
        partials: Tensor,
        steps: Sequence,
    ) -> None:
        pieces, products = self.pieces, self.pieces.products
        counts = np.diff(pieces.first)[now]
        where = Runs(pieces.first[now], counts).addresses()
        chosen = pieces.chosen[where]
        tile = np.repeat(pieces.tile[now], counts)
        pairs: list[tuple[Tensor, Tensor]] = []
        left = self._gather_blocks("left blocks", products.a[chosen], tile, a, pairs)
        right = self._gather_blocks("right blocks", products.b[chosen], tile, b, pairs)
        if pairs:
            steps.add(Copy(pairs, name="gather blocks"))
        if not self.params.transposed:
            right = self._transpose_blocks(right, tile, steps)
        tiles, inverse = np.unique(pieces.tile[now], return_inverse=True)
        held = offsets_of(np.bincount(inverse, counts).astype(np.int64))
        outs = offsets_of(np.bincount(inverse))
        size = self.params.block_size
        sums = self.view(partials.dtype, partials.addresses()[now])
        edges = {
            "a": Ragged(self.view(self.dtype, left.reshape(-1)), held * size[0] * size[1]),
            "b": Ragged(self.view(self.dtype, right.reshape(-1)), held * size[1] * size[2]),
            "out": Ragged(sums.flatten(), outs * size[0] * size[2]),
        }
        kinds = (self.params.dtype, self.params.partials_type)
        codelet = multiply_codelet(inverse, counts, size, *kinds)
        steps.add(self.execute("multiply", codelet, tiles, edges))

    def _gather_blocks(
        self,
        what: str,
        blocks: np.ndarray,
        tile: np.ndarray,
        addresses: np.ndarray,
        pairs: list[tuple[Tensor, Tensor]],
    ) -> np.ndarray:
        """Addresses of each product's block on its tile: [products, *block]. Missing blocks are
        copied, each once per tile."""
        shape = addresses.shape[1:]
        area = int(np.prod(shape))
        keys, of = np.unique(tile * len(addresses) + blocks, return_inverse=True)
        tiles, block = np.divmod(keys, len(addresses))
        located = addresses[block]
        flat = located.reshape(-1, area)
        owner = self.graph.tiles_of(self.view(self.dtype, flat))
        away = np.flatnonzero((owner != tiles[:, None]).any(1))
        if len(away):
            local = self.add_variable(self.dtype, what, tiles[away], area)
            pairs.append((self.view(self.dtype, flat[away]), local))
            located = located.copy()
            located[away] = local.addresses().reshape(-1, *shape)
        return located[of]

    def _transpose_blocks(self, right: np.ndarray, tile: np.ndarray, steps: Sequence) -> np.ndarray:
        """Transpose blocks [bk, bn] on their tile into the order of the matrix units."""
        _, bk, bn = self.params.block_size
        first = right.reshape(len(right), -1)[:, 0]
        _, at, of = np.unique(first, return_index=True, return_inverse=True)
        order = np.argsort(tile[at], kind="stable")
        at, back = at[order], np.argsort(order)
        transposed = self.add_variable(self.dtype, "transposed blocks", tile[at], bk * bn)
        tiles, counts = np.unique(tile[at], return_counts=True)
        offsets = offsets_of(counts) * bk * bn
        edges = {
            "src": Ragged(self.view(self.dtype, right[at].reshape(-1)), offsets),
            "out": Ragged(transposed.flatten(), offsets),
        }
        codelet = transpose_codelet(counts, bk, bn, self.params.dtype)
        steps.add(self.execute("transpose blocks", codelet, tiles, edges))
        return transposed.addresses()[back[of]]

    def _reduce(self, partials: Tensor, out: Tensor, steps: Sequence) -> None:
        """Copy partial sums to the tiles of the results, and add them there."""
        area = out.shape[1]
        home = self.graph.tiles_of(out)[:, 0] if out.numel else np.zeros(0, np.int64)
        order = np.argsort(home, kind="stable")  # results, tile by tile
        rank = np.argsort(order)
        by_result = np.argsort(rank[self.pieces.result], kind="stable")
        depth = np.bincount(self.pieces.result, minlength=len(out))[order]
        target = home[self.pieces.result[by_result]]
        addresses = partials.addresses()[by_result].reshape(-1, area)
        away = np.flatnonzero(self.pieces.tile[by_result] != target)
        if len(away):
            local = self.add_variable(partials.dtype, "partials brought", target[away], area)
            pair = (self.view(partials.dtype, addresses[away]), local)
            steps.add(Copy(*pair, name="exchange partials"))
            addresses = addresses.copy()
            addresses[away] = local.addresses()
        if not out.numel:
            return
        tiles, inverse = np.unique(home[order], return_inverse=True)
        held = np.bincount(inverse, depth, minlength=len(tiles)).astype(np.int64)
        outs = offsets_of(np.bincount(inverse))
        edges = {
            "partials": Ragged(
                self.view(partials.dtype, addresses.reshape(-1)),
                offsets_of(held) * area,
            ),
            "out": Ragged(self.view(out.dtype, out.addresses()[order].reshape(-1)), outs * area),
        }
        mask = self._element_mask()
        kinds = (self.params.partials_type, self.params.out_dtype)
        codelet = reduce_codelet(
            inverse, depth, area, *kinds, None if mask is None else mask[order]
        )
        steps.add(self.execute("reduce", codelet, tiles, edges))

    def _element_mask(self) -> np.ndarray | None:
        """The elements that the mask inside blocks keeps, bool [results, area]."""
        mask = self.params.subblock_mask
        if mask == "none":
            return None
        bm, _, bn = self.params.block_size
        rows = self.pieces.products.row % self.params.grid[0]
        row = rows[:, None, None] * bm + np.arange(bm)[:, None]
        col = self.pieces.products.col[:, None, None] * bn + np.arange(bn)
        kept = col <= row if mask == "zero_upper_triangle" else col >= row
        return kept.reshape(len(rows), -1)


def _rhs_block_shape(params: MatmulParams) -> tuple[int, int]:
    """The shape of a block of the right operand as stored."""
    _, bk, bn = params.block_size
    return (bn, bk) if params.transposed else (bk, bn)


def _add_operand(
    graph: Graph, plan: BlockSparsePlan, which: str, shape: tuple[int, int], count: int, name: str
) -> Tensor:
    """Add the blocks of operand "a" or "b", each on the tile of the first piece that reads it."""
    pieces = plan.pieces
    home = np.full(count, -1)
    read = getattr(pieces.products, which)[pieces.chosen]
    home[read[::-1]] = np.repeat(pieces.tile, np.diff(pieces.first))[::-1]
    return add_blocks(graph, plan.params.dtype, home, shape, name)


@check_types
def create_matmul_lhs(
    graph: Graph, params: MatmulParams, options: Any = None, *, name: str = "lhs"
) -> Tensor:
    """Create the left operand, [groups * m, k], its blocks on tiles that use them.

    Args:
        graph: a graph for the target to plan for.
        params: from a class method of `MatmulParams`.
        options: `Options` or a mapping.

    Raises:
        ValueError, TypeError: as `plan`.
    """
    product = plan(params, graph.target, options)
    rows, blocks = params.groups * params.grid[0], params.grid[1]
    shape = params.block_size[:2]
    return join_blocks(_add_operand(graph, product, "a", shape, rows * blocks, name), rows)


@check_types
def create_matmul_rhs(
    graph: Graph, params: MatmulParams, options: Any = None, *, name: str = "rhs"
) -> Tensor:
    """Create the right operand: dense [groups * k, n], or for "dense_sparse" the blocks [nnz, area]
    in the order of the mask. Arguments and errors as above."""
    product, shape = plan(params, graph.target, options), _rhs_block_shape(params)
    if params.kind == "dense_sparse":
        blocks = _add_operand(graph, product, "b", shape, params.nnz, name)
        return blocks.reshape(params.nnz, shape[0] * shape[1])
    rows = params.groups * params.grid[1]
    return join_blocks(_add_operand(graph, product, "b", shape, rows * params.grid[2], name), rows)


@check_types
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
        lhs, rhs: from `create_matmul_lhs` and `create_matmul_rhs`, or any tensors of their shapes
            that are mapped to tiles.

    Returns:
        Dense [groups * m, n]; for "dense_dense" the blocks [nnz, area] in the order of the mask.

    Raises:
        ValueError: operands of wrong shapes (88, 89); as `plan`. TypeError: operands of wrong
            types.
    """
    product = plan(params, graph.target, options)
    groups, (m, k, n), shape = params.groups, params.dim, _rhs_block_shape(params)
    is_sparse = params.kind == "dense_sparse"
    _check_operand(lhs, [groups * m, k], params, "lhs")
    of_rhs = [params.nnz, shape[0] * shape[1]] if is_sparse else [groups * k, n]
    _check_operand(rhs, of_rhs, params, "rhs")
    a = _cut_blocks(lhs.addresses(), *params.block_size[:2])
    b = rhs.addresses()
    b = b.reshape(-1, *shape) if is_sparse else _cut_blocks(b, *shape)
    out = _Product(graph, product, name).add(a, b, program)
    if is_sparse:
        return join_blocks(out, groups * params.grid[0])
    return out.reshape(len(out), out.shape[1] * out.shape[2])


def _cut_blocks(addresses: np.ndarray, height: int, width: int) -> np.ndarray:
    """Cut a matrix into blocks [rows * cols, height, width]."""
    rows, cols = addresses.shape[0] // height, addresses.shape[1] // width
    grid = addresses.reshape(rows, height, cols, width).transpose(0, 2, 1, 3)
    return grid.reshape(rows * cols, height, width)


def _check_operand(tensor: Tensor, shape: list[int], params: MatmulParams, what: str) -> None:
    if list(tensor.shape) != shape:
        raise ValueError(f"{what} must have the shape {shape}, got {list(tensor.shape)}")
    if tensor.dtype != params.dtype:
        raise TypeError(
            f"{what} must be {params.dtype.name} as the parameters say, got {tensor.dtype.name}"
        )
