"""The vertices of block-sparse products and softmax, one a tile, and their cycles.

Where a figure of the machine's is known it is used: the matrix units and reductions as of dense
products, element-wise work as of `machine.codelets`. The exponential and the inverse have none, and
are charged as functions are in `tensor_ops`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from popsparse.machine import Codelet, In, Out, VertexView
from popsparse.planning.data_types import FLOAT32, DataType, data_type
from popsparse.planning.dense_cycles import AMP, amp
from popsparse.planning.parts import ceil_div
from popsparse.planning.tile_cycles import reduce as reduce_cycles
from popsparse.planning.tile_cycles import transpose_blocks

Spent = Callable[[VertexView], Any]


def transpose(counts: np.ndarray, rows: int, cols: int, dtype: DataType) -> Codelet:
    """Blocks [rows, cols] of a tile, `counts` of them, to [cols, rows]."""

    def compute(v: VertexView) -> None:
        blocks = v.src.values.reshape(-1, rows, cols)
        v.out.values[...] = blocks.transpose(0, 2, 1).reshape(-1)

    def spent(v: VertexView) -> Any:
        workers = v.target.workers
        return transpose_blocks(counts, rows, cols, dtype, workers)

    return Codelet("block transpose", {"src": In(), "out": Out()}, compute, spent, "supervisor")


def _units(dtype: DataType, partials: DataType) -> AMP:
    """The matrix units as a dense product of these types finds them."""
    if dtype is FLOAT32:
        return AMP(8, 8, 8)
    return AMP(8, 16, 8) if partials is FLOAT32 else AMP(16, 16, 16)


def multiply(
    tile_of: np.ndarray,
    products: np.ndarray,
    block_size: tuple[int, int, int],
    dtype: DataType,
    partials: DataType,
) -> Codelet:
    """The pieces of each tile: sums of products of blocks a [bm, bk] and b [bn, bk].

    Args:
        tile_of: the place among the tiles of each piece, ascending; products: how many it adds up.
    """
    bm, bk, bn = block_size
    of = np.repeat(np.arange(len(products)), products)

    def compute(v: VertexView) -> None:
        a = v.a.values.reshape(-1, bm, bk).astype(np.float32)
        b = v.b.values.reshape(-1, bn, bk).astype(np.float32)
        found = np.zeros((len(products), bm, bn), np.float32)
        np.add.at(found, of, a @ b.transpose(0, 2, 1))
        v.out.values[...] = found.reshape(-1)

    def spent(v: VertexView) -> Any:
        kind = _units(dtype, partials)
        load = v.target.coefficient_load_bytes_per_cycle
        groups = ceil_div(bk, kind.in_channels) * products
        cycles = amp(bm, groups, ceil_div(bn, kind.out_channels), kind, dtype, partials,
                     v.target.workers, load)  # fmt: skip
        return np.bincount(tile_of, cycles, minlength=v.count)

    fields = {"a": In(), "b": In(), "out": Out()}

    def flops(v: VertexView) -> Any:
        return 2 * bm * bk * bn * np.bincount(tile_of, products, minlength=v.count)

    return Codelet("block products", fields, compute, spent, "supervisor", flops=flops)


def reduce(
    tile_of: np.ndarray,
    depth: np.ndarray,
    area: int,
    partials: DataType,
    result: DataType,
    kept: np.ndarray | None,
) -> Codelet:
    """The blocks of the result of each tile, from their partial sums, one after the other.

    Args:
        tile_of: the place among the tiles of each block, ascending; depth: its partial sums.
        kept: bool [blocks, area] of what is not zeroed, or None.
    """
    of = np.repeat(np.arange(len(depth)), depth)

    def compute(v: VertexView) -> None:
        total = np.zeros((len(depth), area), np.float32)
        np.add.at(total, of, v.partials.values.reshape(-1, area).astype(np.float32))
        v.out.values[...] = (total if kept is None else total * kept).reshape(-1)

    def spent(v: VertexView) -> Any:
        cycles = reduce_cycles(area, np.maximum(depth, 1), partials, result, v.target.workers)
        found = np.bincount(tile_of, np.broadcast_to(cycles, depth.shape), minlength=v.count)
        if kept is not None:
            masked = np.bincount(tile_of, area * ~kept.all(1), minlength=v.count)
            found = found + np.where(masked > 0, _each(masked, result, v.target.workers), 0)
        return found

    fields = {"partials": In(), "out": Out()}

    def flops(v: VertexView) -> Any:
        return area * np.bincount(tile_of, depth, minlength=v.count)

    return Codelet("block reduce", fields, compute, spent, "supervisor", flops=flops)


def _each(elements: Any, dtype: DataType, workers: int, *, vector: int = 1, single: int = 0) -> Any:
    """A tile's cycles for element-wise operations: so many that work on vectors, by section 7.3 of
    docs/popsparse-formulas.md, and so many that do not."""
    width = dtype.vector_width
    vectors = ceil_div(ceil_div(elements, workers), width)
    # No source gives cycles for the latter: a load, an instruction for each element, a store.
    return vector * (11 + workers * (58 + 3 * vectors)) + single * (
        11 + workers * (58 + (2 + width) * vectors)
    )


def elementwise(
    name: str,
    fields: dict[str, Any],
    compute: Callable[[VertexView], None],
    *,
    vector: int = 1,
    single: int = 0,
) -> Codelet:
    """Operations on every element of the field "out" of each tile: so many that work on vectors,
    and so many functions that do not."""

    def spent(v: VertexView) -> Any:
        kind = data_type(v.out.values.dtype)
        return _each(v.out.lengths, kind, v.target.workers, vector=vector, single=single)

    return Codelet(name, fields, compute, spent, "supervisor")


def rows_to_one(
    name: str, rows: np.ndarray, lengths: np.ndarray, compute: Callable[[VertexView], None]
) -> Codelet:
    """Rows of a tile to one number each; [tiles] of how many, and how long those of a tile are in
    all. As a reduction of so many values into each."""

    def spent(v: VertexView) -> Any:
        depth = ceil_div(lengths, np.maximum(rows, 1))
        return reduce_cycles(rows, depth, FLOAT32, FLOAT32, v.target.workers)

    return Codelet(name, {"src": In(), "out": Out()}, compute, spent, "supervisor")
