"""Block-sparse products: their parameters, and plans of which tile multiplies which blocks.

Names follow PopSparse's experimental `BSMatMulParams` and its options, in snake case.

A piece is the part of one block of the result that one tile computes: some of its products. The
methods have PopSparse's names. `strip` follows its source; `block`, `block-naive`, `block-group2`
and `stripv0` keep the idea of the name and the options. The hypergraph partitioner that the
original used for `block` is replaced by a greedy rule with the same weights (memory_cycle_ratio of
memory to products).
"""

from __future__ import annotations

import heapq
from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from dynsparse._core.checks import (
    check_array,
    check_choice,
    check_flag,
    check_integer,
    check_sizes,
    check_types,
)
from dynsparse.pattern import SparsePattern
from popsparse.machine import Target
from popsparse.machine.dtypes import FLOAT, HALF, DType
from popsparse.machine.intervals import offsets_of
from popsparse.planning.options import Options
from popsparse.planning.params import data_type

_RATIO = 0.2

SUBBLOCK_MASKS = ("none", "zero_upper_triangle", "zero_lower_triangle")


def mask_of(sparsity: Any, groups: int, rows: int, cols: int) -> np.ndarray:
    """The mask, bool [groups, rows, cols], of a `SparsePattern` with all groups stacked vertically,
    or of a mask of blocks.

    Raises:
        ValueError: a wrong number of blocks. TypeError: neither of them.
    """
    expected = groups * rows * cols
    if isinstance(sparsity, SparsePattern):
        grid = sparsity.grid
        if grid != (groups * rows, cols):
            raise ValueError(
                f"the pattern must have {groups * rows} x {cols} blocks, got {grid[0]} x {grid[1]}"
            )
        mask = np.zeros(expected, bool)
        mask[sparsity.flat.numpy()] = True
        return mask.reshape(groups, rows, cols)
    array = check_array("sparsity", sparsity, "biuf", "a SparsePattern or a mask of blocks")
    if array.size % groups:
        raise ValueError(f"the mask's {array.size} blocks do not divide into {groups} groups")
    if array.size != expected:
        raise ValueError(f"the mask must have {expected} blocks, got {array.size}")
    return array.reshape(groups, rows, cols) != 0


@dataclass(frozen=True, eq=False)
class MatmulParams:
    """Sizes, types and mask of a block-sparse product. Made by its class methods.

    Attributes:
        kind: "dense_sparse" or "dense_dense".
        dim: (m, k, n) of one group's [m, k] x [k, n].
        block_size: (bm, bk, bn), block sizes of m, k and n.
        mask: bool, blocks of all groups [groups, ..] of the sparse operand as stored, or of the
            result.
        transposed: whether the sparse operand is stored as its transpose.
        dtype, out_dtype, partials_type: types of the operands, the result and partial sums.
        subblock_mask: mask inside the blocks of the result of "dense_dense".
        groups: number of products of the same sizes, operands stacked vertically.

    Raises:
        ValueError: sizes that are not multiples of the blocks (84), a mask of a wrong size (85,
            86), types other than float16 and float32 (81), float32 operands with float16 partial
            sums (82), no groups (83); the numbers refer to section 8.3 of popsparse-formulas.md.
    """

    kind: str
    dim: tuple[int, int, int]
    block_size: tuple[int, int, int]
    mask: np.ndarray
    transposed: bool
    dtype: DType
    out_dtype: DType
    partials_type: DType
    subblock_mask: str
    groups: int

    @classmethod
    def create_dense_sparse(
        cls,
        dim: Sequence[int],
        block_size: Sequence[int],
        rhs_sparsity: Any,
        rhs_need_transpose: bool = False,
        *,
        dtype: Any = "float16",
        out_dtype: Any = None,
        partials_type: Any = None,
        num_groups: int = 1,
    ) -> MatmulParams:
        """Dense [m, k] x sparse [k, n].

        Args:
            dim: (m, k, n). block_size: (bm, bk, bn).
            rhs_sparsity: a `SparsePattern` [groups * k, n], or a mask of blocks.
            rhs_need_transpose: the sparse operand is stored as [n, k], with blocks [bn, bk], and so
                is its mask.
            dtype: float16 or float32.
            out_dtype: defaults to `dtype`. partials_type: defaults to float32.
            num_groups: number of products.
        """
        check_flag("rhs_need_transpose", rhs_need_transpose)
        types = dtype, out_dtype, partials_type
        return cls._create(
            "dense_sparse", dim, block_size, rhs_sparsity, types, num_groups, rhs_need_transpose
        )

    @classmethod
    def create_dense_dense(
        cls,
        dim: Sequence[int],
        block_size: Sequence[int],
        result_sparsity: Any,
        *,
        dtype: Any = "float16",
        out_dtype: Any = None,
        partials_type: Any = None,
        subblock_mask: str = "none",
        num_groups: int = 1,
    ) -> MatmulParams:
        """Dense [m, k] x dense [k, n] at the blocks of a mask [m, n].

        Args:
            subblock_mask: zeroes the elements of the result above ("zero_upper_triangle") or below
                ("zero_lower_triangle") the diagonal of each group. ("none")
        """
        types = dtype, out_dtype, partials_type
        params = cls._create("dense_dense", dim, block_size, result_sparsity, types, num_groups)
        check_choice("subblock_mask", subblock_mask, SUBBLOCK_MASKS)
        return replace(params, subblock_mask=subblock_mask)

    @classmethod
    def _create(
        cls,
        kind: str,
        dim: Any,
        block_size: Any,
        sparsity: Any,
        types: tuple[Any, Any, Any],
        num_groups: Any,
        transposed: bool = False,
    ) -> MatmulParams:
        dtype, out_dtype, partials_type = types
        groups = check_integer("num_groups", num_groups, 1)
        m, k, n = sizes = check_sizes("dim", dim, "mkn")
        bm, bk, bn = blocks = check_sizes("block_size", block_size, "mkn")
        for name, size, block in zip("mkn", sizes, blocks, strict=True):
            if size % block:
                raise ValueError(f"{name} must be a multiple of its block {block}, got {size}")
        data = data_type(dtype)
        partials = FLOAT if partials_type is None else data_type(partials_type, "partials_type")
        if data is FLOAT and partials is HALF:
            raise ValueError("float32 operands need float32 partial sums, got float16")
        out = data if out_dtype is None else data_type(out_dtype, "out_dtype")
        grid = [size // block for size, block in zip(sizes, blocks, strict=True)]
        rows, cols = grid[1 if kind == "dense_sparse" else 0], grid[2]
        if transposed:
            rows, cols = cols, rows
        mask = mask_of(sparsity, groups, rows, cols)
        types = data, out, partials
        return cls(kind, (m, k, n), (bm, bk, bn), mask, transposed, *types, "none", groups)

    @property
    def grid(self) -> tuple[int, int, int]:
        """Blocks of m, k and n."""
        m, k, n = (size // b for size, b in zip(self.dim, self.block_size, strict=True))
        return m, k, n

    @property
    def nnz(self) -> int:
        """Number of blocks of the mask."""
        return int(self.mask.sum())


class Products(NamedTuple):
    """Products of blocks by their block of the result: those of result r are first[r] to
    first[r + 1]. `a` and `b` are block numbers in the operands, `k` the place in the sum, `row` and
    `col` the place of the result, with rows numbered across all groups."""

    row: np.ndarray
    col: np.ndarray
    first: np.ndarray
    a: np.ndarray
    b: np.ndarray
    k: np.ndarray

    def numbers(self, result: Any) -> np.ndarray:
        """The numbers of the products of a result."""
        return np.arange(self.first[result], self.first[result + 1])


class Pieces(NamedTuple):
    """The pieces in the order of their tiles: `result`, `tile` and `turn` (the pass) are [pieces];
    the product numbers of piece p are `chosen` from first[p] to first[p + 1]."""

    products: Products
    result: np.ndarray
    tile: np.ndarray
    turn: np.ndarray
    first: np.ndarray
    chosen: np.ndarray

    def loads(self, tiles: int) -> np.ndarray:
        """Number of products of each tile."""
        return np.bincount(self.tile, np.diff(self.first), minlength=tiles)


def products_of(params: MatmulParams) -> Products:
    """List every product of two blocks that contributes to the result."""
    groups, (m, k, n) = params.groups, params.grid
    mask = params.mask
    if params.kind == "dense_dense":
        group, row, col = np.nonzero(mask)
        count = len(group)
        ks = np.tile(np.arange(k), count)
        first = np.arange(count + 1) * k
        of = np.repeat(np.arange(count), k)
        a = (group[of] * m + row[of]) * k + ks
        b = (group[of] * k + ks) * n + col[of]
        return Products(group * m + row, col, first, a, b, ks)
    slots = np.full(mask.shape, -1)
    slots[mask] = np.arange(params.nnz)
    stored = slots.transpose(0, 2, 1) if params.transposed else slots  # [groups, k, n]
    group, col, ks = np.nonzero(stored.transpose(0, 2, 1) >= 0)
    b = stored[group, ks, col]
    # Every block row of the dense operand uses the same column of the sparse one.
    counts = np.bincount(group * n + col, minlength=groups * n).reshape(groups, n)
    per_result = np.repeat(counts[:, None], m, axis=1)  # [groups, m, n]
    first = offsets_of(per_result)
    rows, cols = np.divmod(np.arange(groups * m * n), n)
    of = np.repeat(np.arange(groups * m * n), per_result.reshape(-1))
    start = offsets_of(counts)[:-1].reshape(groups, n)
    inside = np.arange(len(of)) - first[of]
    at = start[rows[of] // m, cols[of]] + inside
    return Products(rows, cols, first, rows[of] * k + ks[at], b[at], ks[at])


def assign_to_lightest(sizes: np.ndarray, tiles: np.ndarray) -> np.ndarray:
    """The tile of each item, when the heaviest first go to the lightest tile; ties in order."""
    bins = [(0.0, int(tile)) for tile in tiles]
    heapq.heapify(bins)
    tile_of = np.empty(len(sizes), np.int64)
    for which in np.argsort(-sizes, kind="stable"):
        load, tile = bins[0]
        heapq.heapreplace(bins, (load + float(sizes[which]), tile))
        tile_of[which] = tile
    return tile_of


def _split(products: np.ndarray, parts: int) -> Iterator[np.ndarray]:
    """Split products into contiguous parts, none of them empty."""
    return (part for part in np.array_split(products, min(parts, len(products))) if len(part))


def _split_tiles(tiles: int, count: int) -> list[np.ndarray]:
    """`count` disjoint ranges of tiles, the first one longer if they do not divide evenly; if there
    are fewer tiles, ranges share them in turn."""
    if count > tiles:
        return [np.array([i % tiles]) for i in range(count)]
    return np.array_split(np.arange(tiles), count)


def _assign_strips(params: MatmulParams, options: Options, products: Products, tiles: int) -> list:
    """Block rows get disjoint ranges of tiles, in the requested number of passes. In a range,
    columns are cut along the sum until there are about two pieces a tile, and dealt heaviest first.
    `stripv0` instead deals uncut columns in order, each tile about its share."""
    passes, (m, k, n) = options.number_of_pass, params.grid
    by_sum = params.kind == "dense_dense"
    along = k if by_sum else m
    if along % passes:
        what = "block columns" if by_sum else "block rows"
        raise ValueError(
            f"the {along} {what} of the left operand must be a multiple of number_of_pass, "
            f"got {passes}"
        )
    rows = params.groups * m
    at_once = rows if by_sum else rows // passes
    pieces: list[tuple[int, int, int, np.ndarray]] = []  # result, tile, pass, products
    ranges = _split_tiles(tiles, at_once)
    results = [np.flatnonzero(products.row == row) for row in range(rows)]
    for turn in range(passes):
        for row in range(rows) if by_sum else range(turn * at_once, (turn + 1) * at_once):
            columns = ranges[row % at_once]
            split = min(max(2 * len(columns) // n, 1), len(columns))
            if options.partition_method == "stripv0":
                split = 1
            parts = []
            for result in results[row]:
                some = products.numbers(result)
                if by_sum and passes > 1:
                    step = k // passes
                    some = some[products.k[some] // step == turn]
                if len(some):
                    parts += [(int(result), part) for part in _split(some, split)]
            if not parts:
                continue
            sizes = np.array([len(part) for _, part in parts])
            if options.partition_method == "stripv0":
                before = np.cumsum(sizes) - sizes
                tile = columns[before * len(columns) // sizes.sum()]
            else:
                tile = assign_to_lightest(sizes, columns)
            pieces += [(r, int(t), turn, p) for (r, p), t in zip(parts, tile, strict=True)]
    return pieces


def _assign_blocks(
    products: Products, tiles: np.ndarray, results: np.ndarray, ratio: float
) -> list:
    """Assign each block of the result to the tile of least cost: weight `ratio` for the memory of
    blocks that the tile does not hold yet, the rest for its products; both as shares of the total.
    """
    all_products = max(int(products.first[-1]), 1)
    all_blocks = max(len(np.unique(products.a)) + len(np.unique(products.b)), 1)
    count = int(tiles.max()) + 1
    # The tiles that hold a block: they are few, so a loop over them is faster than over all tiles.
    holders: defaultdict[int, array[int]] = defaultdict(lambda: array("q"))
    loads, memory = np.zeros(count), np.zeros(count)
    sizes = np.diff(products.first)[results]
    pieces = []
    for result in results[np.argsort(-sizes, kind="stable")]:
        some = products.numbers(result)
        if not len(some):
            continue
        need = {*products.a[some].tolist(), *(-1 - products.b[some]).tolist()}
        holding = np.frombuffer(b"".join([holders[block] for block in need]), np.int64)
        more = len(need) - np.bincount(holding, minlength=count)[tiles]
        cost = (1 - ratio) * (loads[tiles] + len(some)) / all_products
        cost = cost + ratio * (memory[tiles] + more) / all_blocks
        best = int(tiles[np.argmin(cost)])
        for block in need:
            if best not in holders[block]:
                holders[block].append(best)
                memory[best] += 1
        loads[best] += len(some)
        pieces.append((int(result), best, 0, some))
    return pieces


def partition(params: MatmulParams, options: Options, tiles: int) -> Pieces:
    """The pieces of a product on this many tiles.

    Groups get disjoint ranges of tiles.

    Raises:
        ValueError: passes with several groups (87), or that do not divide the block rows (90).
    """
    if options.number_of_pass > 1 and params.groups > 1:
        raise ValueError(
            f"number_of_pass must be 1 with several groups, got {options.number_of_pass}"
        )
    products = products_of(params)
    method = options.partition_method
    if method.startswith("strip"):
        pieces = _assign_strips(params, options, products, tiles)
    else:
        pieces = []
        rows = params.grid[0]
        for group, group_tiles in enumerate(_split_tiles(tiles, params.groups)):
            results = np.flatnonzero(products.row // rows == group)
            pieces += _assign_group(method, options, products, results, group_tiles)
    pieces.sort(key=lambda piece: piece[1])
    chosen = [part for *_, part in pieces]
    lengths = [len(part) for part in chosen]
    result, tile, turn = np.array([piece[:3] for piece in pieces], np.int64).reshape(-1, 3).T
    return Pieces(
        products,
        result,
        tile,
        turn,
        offsets_of(np.array(lengths, np.int64)),
        np.concatenate(chosen) if chosen else np.zeros(0, np.int64),
    )


def _assign_group(
    method: str, options: Options, products: Products, results: np.ndarray, tiles: np.ndarray
) -> list:
    """The pieces of one group's results on its tiles, by a method other than strip."""
    sizes = np.diff(products.first)[results]
    if method == "block-naive":
        # Heaviest first to the lightest tile, regardless of the blocks it holds.
        dealt = assign_to_lightest(sizes, tiles)
        return [
            (int(r), int(t), 0, products.numbers(r))
            for r, t, size in zip(results, dealt, sizes, strict=True)
            if size
        ]
    ratio = _RATIO if options.memory_cycle_ratio is None else options.memory_cycle_ratio
    if method == "block":
        return _assign_blocks(products, tiles, results, ratio)
    # block-group2: block rows to groups of tiles first, then blocks to the tiles of a group.
    groups = max(1, int(len(tiles) ** 0.5))
    rows = np.unique(products.row[results])
    weights = np.array([sizes[products.row[results] == row].sum() for row in rows])
    of_row = assign_to_lightest(weights, np.arange(groups))
    pieces = []
    for group, group_tiles in enumerate(_split_tiles(len(tiles), groups)):
        inside = np.isin(products.row[results], rows[of_row == group])
        if inside.any():
            pieces += _assign_blocks(products, tiles[group_tiles], results[inside], ratio)
    return pieces


@dataclass(frozen=True, eq=False)
class BlockSparsePlan:
    """Which tile multiplies which blocks of a product. Made by `plan`.

    Attributes:
        params, options: the arguments of `plan`. target: the machine.
        pieces: the parts of the result, and their tiles.
    """

    params: MatmulParams
    options: Options
    target: Any
    pieces: Pieces

    @property
    def tiles_used(self) -> int:
        """The number of tiles that multiply."""
        return len(np.unique(self.pieces.tile))

    @property
    def imbalance(self) -> float:
        """PopSparse's measure of a partition: max(load / mean, mean / load) over the tiles that
        multiply, plus the number of those that do not."""
        loads = self.pieces.loads(self.target.tiles)
        busy = loads[loads > 0]
        if not len(busy):
            return float(len(loads))
        mean = loads.mean()
        worst = np.maximum(busy / mean, mean / busy).max()
        return float(worst + (loads == 0).sum())

    def __repr__(self) -> str:
        params = self.params
        return (
            f"BlockSparsePlan({params.kind}, dim={params.dim}, block_size={params.block_size}, "
            f"nnz={params.nnz}, {self.options.partition_method}, {self.tiles_used} tiles)"
        )


@check_types
def plan(
    params: MatmulParams, target: Target | None = None, options: Any = None
) -> BlockSparsePlan:
    """Distribute the products of blocks over the tiles of a machine.

    Args:
        params: from a class method of `MatmulParams`.
        target: a `popsparse.machine.Target`; defaults to the Mk2.
        options: `Options` or a mapping.

    Raises:
        TypeError: arguments of other types. ValueError: options not valid for the product.
    """
    target = Target.mk2() if target is None else target
    requested = Options.parse(options, "block-sparse")
    return BlockSparsePlan(params, requested, target, partition(params, requested, target.tiles))
