"""The planner of static products.

The pattern is known. Columns are cut into bands with about equally many non-zeros; each band gets
tiles in proportion to them; each tile gets an equal number of the band's blocks, in row order. The
estimate assumes that blocks are spread at random over the kept rows and columns (section 6.2 of
docs/popsparse-formulas.md); `static_timing` then times the actual result.

The cycles of the kernels (section 6.3 there) are per tile; a worker's instruction takes `workers`
of them. Arguments may be arrays. Partial sums have the type of the data.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import numpy as np

from dynsparse._core.checks import check_types
from dynsparse.pattern import SparsePattern
from popsparse.formats import SparseMatrix
from popsparse.machine.dtypes import DType
from popsparse.planning.cycles import clear_memory
from popsparse.planning.options import Options
from popsparse.planning.params import WORD_LIMIT, MatmulParams, ceil_div, data_type
from popsparse.planning.plan import RUNNERS_UP, PlanningCache, Search
from popsparse.planning.static_layout import (
    Bands,
    Interval,
    StaticPlan,
    column_bands,
    plan_key,
    sort_kept_first,
    split_n,
    split_tiles,
    tiles_of_bands,
    work_list_words,
)

_MOST_N_SPLITS, _MOST_BANDS = 32, 128  # The original's bounds of the search.


def _choices(fixed: int, most: int, what: str, limit: int) -> range:
    """The numbers of parts to try: `fixed` if it is not 0, else 1 to `most`; none above `limit`."""
    if fixed > limit:
        raise ValueError(f"{what} must be at most {limit}, got {fixed}")
    return range(fixed, fixed + 1) if fixed else range(1, min(most, limit) + 1)


Numbers = Any
_PATH_BYTES = 8  # The data path, and a load of weights: 64 bits.


def element_product(rows: Numbers, nz: Numbers, n: int, dtype: DType) -> Numbers:
    """Instructions of a worker with `rows` rows of `nz` elements in all, times n columns.

    The published formula has k elements for each of m rows; here m k is the number of elements, so
    rows may have any length.
    """
    rows, more = np.asarray(rows), np.asarray(nz) - rows  # Each row's first element is apart.
    if dtype.size == 2:
        if n == 4:
            return 31 + rows * 7 + more * 2
        if n == 8:
            return 31 + rows * 8 + more * 3
        vectors, rest = n // 8, n % 8 != 0
        return 33 + rows * (11 + vectors * 14 + rest * 9) + more * (vectors * 3 + rest * 2)
    if n == 2:
        return 29 + rows * 5 + more * 2
    if n == 4:
        return 30 + rows * 6 + more * 3
    vectors, rest = n // 4, n % 4 != 0
    return 31 + rows * (12 + (vectors + rest) * 10) + more * (vectors * 3 + rest * 2)


def _block_constants(block: int, n: int, dtype: DType) -> tuple[int, int, int]:
    """Instructions of a worker with n columns: start, each row, each block."""
    if dtype.size == 2:
        if block == 4:
            return 17, 1, (7 if n <= 2 else 13) + n
        return 13, 1, 14 + 2 * (n - 1) if block == 8 else 19 + 4 * (n - 1)
    if block == 4:
        return 13, 1, 12 + 4 * (n - 1)
    if block == 8:
        return 13, 4, 19 + 8 * (n - 1)
    # A block is stored as two halves of 16 x 8.
    return 16, 4, 58 if n == 1 else 2 * (37 + 8 * (n - 1))


def block_product(
    rows: Numbers, blocks: Numbers, n: int, block: int, dtype: DType, workers: int
) -> Numbers:
    """Cycles of a tile with `rows` block rows of `blocks` blocks in all; workers share n."""
    start, by_row, by_block = _block_constants(block, ceil_div(n, workers), dtype)
    load = block * block * dtype.size // _PATH_BYTES
    return (
        30
        + start * workers
        + np.asarray(rows) * (by_row * workers + 17)
        + np.asarray(blocks) * (16 + load + by_block * workers)
    )


def zero(rows: Numbers, n: int, block: int, dtype: DType, workers: int) -> Numbers:
    """Cycles of zeroing the partials, which only 8 x 8 and 16 x 16 float32 blocks need."""
    if dtype.size == 2 or block < 8:
        return 0 * np.asarray(rows)
    return clear_memory(np.asarray(rows) * block * n * dtype.size, workers)


def reduce(vectors: Numbers, partials: Numbers, dtype: DType, workers: int) -> Numbers:
    """Cycles of a tile that adds `partials` vectors into `vectors` results.

    The published formula has `depth` partials for every result: partials = vectors x depth.
    A vector is 8 float16 or 4 float32 numbers.
    """
    store = 8 if dtype.size == 2 else 5
    share = ceil_div(np.asarray(vectors), workers)
    added = ceil_div(np.asarray(partials), workers)
    return workers * (16 + share * (5 + store) + added)


BLOCK_SIZES = (1, 4, 8, 16)
"""Block sizes that have a kernel."""


def pattern_of(matrix: Any, params: MatmulParams) -> tuple[SparsePattern, np.ndarray | None]:
    """The pattern [m, k] to multiply with, its slots in row-major order, and the values
    [nnz, b, b] if the matrix has any.

    Args:
        matrix: a `SparseMatrix` or a `SparsePattern` of the shape `params.sparse_shape`.

    Raises:
        ValueError: a wrong shape, or blocks without a kernel. TypeError: another type of matrix.
    """
    if params.groups != 1:
        raise ValueError(f"a static product has one group, got {params.groups}")
    values = None
    if isinstance(matrix, SparseMatrix):
        pattern, tensor = matrix.to_pattern()
        values = tensor.numpy().reshape(-1, pattern.block_size, pattern.block_size)
    elif isinstance(matrix, SparsePattern):
        pattern = matrix
        if len(pattern.slots):
            pattern = SparsePattern.from_flat(
                matrix.sorted_flat, shape=matrix.shape, block_size=matrix.block_size
            )
    else:
        raise TypeError(
            "the sparse operand must be a COO, CSR or CSC matrix or a SparsePattern, got "
            f"{type(matrix).__name__}"
        )
    if tuple(pattern.shape) != params.sparse_shape:
        raise ValueError(
            f"the sparse operand must have the shape {list(params.sparse_shape)}, "
            f"got {list(pattern.shape)}"
        )
    if pattern.block_size not in BLOCK_SIZES:
        raise ValueError(
            f"static products take blocks of {', '.join(map(str, BLOCK_SIZES))}, got "
            f"{pattern.block_size}: split the blocks"
        )
    return transpose(pattern, values) if params.transposed else (pattern, values)


def transpose(
    pattern: SparsePattern, values: np.ndarray | None
) -> tuple[SparsePattern, np.ndarray | None]:
    """The transposed matrix; values [nnz, b, b]."""
    transposed = SparsePattern(
        pattern.cols, pattern.rows, shape=pattern.shape[::-1], block_size=pattern.block_size
    )
    if values is not None:
        order = np.lexsort((pattern.rows.numpy(), pattern.cols.numpy()))
        values = values[order].transpose(0, 2, 1)
    return transposed, values


_log = logging.getLogger("dynsparse.popsparse")


@check_types
def make_plan(
    target: Any,
    dtype: Any,
    params: MatmulParams,
    matrix: Any,
    options: Any = None,
    cache: PlanningCache | None = None,
) -> StaticPlan:
    """Plan a product whose pattern is known.

    Args:
        target: a `popsparse.machine.Target`.
        dtype: float16 or float32, of all operands and the result.
        params: sizes.
        matrix: the sparse operand, a `SparseMatrix` or only its `SparsePattern`.
        options: an `Options` or a mapping.
        cache: reuses plans made earlier, and keeps this one.

    Raises:
        ValueError: a pattern of a wrong shape, options out of range, or no partition that fits the
            memory and 16-bit offsets. TypeError: arguments of other types.
    """
    kind, requested = data_type(dtype), Options.parse(options, "static")
    pattern, _ = pattern_of(matrix, params)
    request = plan_key(target, kind, params, requested, pattern)
    if cache is None:
        return _plan(request, pattern)
    return cache.find(request, lambda: _plan(request, pattern))


class _CutSearch:
    """The search over all cuts of one product.

    Args:
        planned: numbers of rows and columns of the pattern that the estimate includes.
        columns: blocks of each column of the pattern, included columns first.
    """

    def __init__(
        self,
        target: Any,
        dtype: DType,
        params: MatmulParams,
        options: Options,
        pattern: SparsePattern,
        planned: tuple[int, int],
        columns: np.ndarray,
    ) -> None:
        self.target, self.dtype, self.params, self.options = target, dtype, params, options
        self.pattern, self.block = pattern, pattern.block_size
        self.rows, self.columns = planned
        self.density = min(1.0, pattern.nnz / (self.rows * self.columns))
        self.n = ceil_div(params.n, dtype.vector_width) * dtype.vector_width
        bus = target.exchange_bus_tiles
        self.grain = bus if target.tiles % bus == 0 else 1
        self.bands = cache(partial(column_bands, columns))
        self.band_tiles = cache(self._band_tiles)

    def parts(self, split: int) -> tuple[list[Interval], list[Interval]]:
        """The parts of n and the tiles of each."""
        n_parts = split_n(self.n, split, self.dtype.vector_width)
        return n_parts, split_tiles(n_parts, self.target.tiles, self.grain)

    def _band_tiles(self, number: int, tiles: int) -> tuple[int, ...] | None:
        """How many of a part's tiles each of `number` bands gets; None: too few tiles."""
        return tiles_of_bands(self.bands(number).blocks, tiles, self.grain)

    def _cuts(self) -> Iterator[tuple[int, int, set[tuple[int, int]]]]:
        """The possible numbers of parts of n and of bands, and the different (columns of n, tiles)
        of the parts.

        Raises:
            ValueError: options that request more parts or bands than possible.
        """
        options, vector = self.options, self.dtype.vector_width
        tile_grains = self.target.tiles // self.grain
        most = min(self.n // vector, tile_grains)
        # A grain is one column, or as many block columns as the data path has numbers.
        columns = ceil_div(self.columns, 1 if self.block == 1 else vector)
        most_bands = min(tile_grains, self.pattern.grid[1])
        numbers = _choices(options.num_bands, min(_MOST_BANDS, columns), "num_bands", most_bands)
        for split in _choices(options.n_split, _MOST_N_SPLITS, "n_split", most):
            n_parts, tile_parts = self.parts(split)
            kinds = {(n.size, t.size) for n, t in zip(n_parts, tile_parts, strict=True)}
            same_as_fewer = len(n_parts) < split and not options.n_split
            if same_as_fewer or any(tiles <= 0 for _, tiles in kinds):
                continue
            for number in numbers:
                if split * number > tile_grains:
                    break
                yield split, number, kinds

    def _expected_count(self, probability: float, of: int) -> int:
        """The number of `of` expected to be present, plus one standard deviation."""
        spread = math.ceil(math.sqrt(probability * (1 - probability) * of))
        return min(of, math.ceil(probability * of + spread))

    def _terms(
        self, bands: Bands, tiles: tuple[int, ...], n: int, splits: int
    ) -> tuple[dict[str, int], int] | str:
        """Cycles by term and temporary bytes; or the rule that is broken."""
        size, block, workers = self.dtype.size, self.block, self.target.workers
        rate, bus = self.target.exchange_bytes_per_cycle, self.target.exchange_bus_tiles
        worst = max(range(len(tiles)), key=lambda i: bands.blocks[i] / tiles[i])
        blocks, band_tiles = bands.blocks[worst], tiles[worst]
        width = int(bands.bounds[worst + 1] - bands.bounds[worst])
        share = ceil_div(blocks, band_tiles)
        rows = ceil_div(self.rows, band_tiles)
        # A tile with at most one row gets no more columns than hold the band's blocks.
        reach = width
        if rows == 1:
            reach = min(math.ceil(blocks / self.density), self.columns)
        row_probability = 1 - (1 - self.density) ** reach
        column_probability = 1 - (1 - self.density) ** rows
        m = self._expected_count(row_probability, rows)
        k = self._expected_count(column_probability, reach)
        if bands.widest * block * n * size > WORD_LIMIT * (1 if block == 1 else 8 * block):
            return "offsets into the dense operand exceed 16 bits"
        if work_list_words(m, share, block, workers) > WORD_LIMIT:
            return "work lists exceed 16 bits"
        each = ceil_div(share, m)
        if block == 1:
            part = ceil_div(m, workers)
            worker = int(element_product(part, part * each, n, self.dtype))
            compute = workers * worker
        else:
            compute = int(block_product(m, m * each, n, block, self.dtype, workers))
        operand, values = n * k * block * size, share * block * block * size
        outputs = m * n * block
        spread = math.ceil(math.sqrt(row_probability * (1 - row_probability) * len(tiles)))
        depth = max(1, math.ceil((row_probability * len(tiles) + spread) * width / reach))
        moved = ceil_div(outputs * size * (depth - 1), depth)
        summed = ceil_div(outputs, depth)
        vectors = ceil_div(ceil_div(summed, workers), 16 // size) * workers
        clear = int(zero(m, n, block, self.dtype, workers))
        terms = {
            # Neighbouring tiles share the bus, so common columns arrive at twice the rate.
            "gather dense operand": int(math.ceil(operand / (bus * rate)) * (reach / k)),
            "fetch values": math.ceil(values / rate) if splits > 1 else 0,
            "zero partials": clear,
            "compute": compute,
            "exchange partials": math.ceil(moved / rate),
            "reduce": 0
            if depth == 1
            else int(reduce(vectors, vectors * depth, self.dtype, workers)),
            "move output": ceil_div(self.params.m * self.n * size, self.target.tiles),
        }
        held = outputs * size
        return terms, max(operand + values + held, moved + held)

    def _price(
        self, split: int, number: int, kinds: set[tuple[int, int]], bound: int
    ) -> tuple[dict[str, int], int] | str:
        """Cycles by term and temporary bytes of a cut; or the rule that is broken."""
        slowest: dict[str, int] = {}
        bytes_ = 0
        # Parts of n run side by side: the slowest counts.
        for n, tiles in kinds:
            band_tiles = self.band_tiles(number, tiles)
            if band_tiles is None:
                return "too few tiles for the bands"
            priced = self._terms(self.bands(number), band_tiles, n, split)
            if isinstance(priced, str):
                return priced
            terms, held = priced
            bytes_ = max(bytes_, held)
            slowest = max(slowest, terms, key=lambda t: sum(t.values()))
        if bytes_ > bound:
            return f"temporary data exceed {bound} bytes a tile"
        return slowest, bytes_

    def find_best(self) -> tuple[dict[str, Any], Search]:
        """The cheapest cut ("n_split", "bands", "terms", "temporary_bytes"), and the statistics of
        the search.

        Raises:
            ValueError: no cut is possible; the message lists the rules that exclude them.
        """
        if not self.pattern.nnz:  # Nothing to multiply: the output is zeros.
            moved = ceil_div(self.params.m * self.n * self.dtype.size, self.target.tiles)
            best = {"n_split": 1, "bands": 1, "terms": {"move output": moved}, "temporary_bytes": 0}
            return best, Search({"partitions": 1, "possible": 1}, (1,), ())
        bound = int(self.options.available_memory_proportion * self.target.bytes_per_tile)
        possible: list[dict[str, Any]] = []
        broken: Counter[str] = Counter()
        for split, number, kinds in self._cuts():
            priced = self._price(split, number, kinds, bound)
            if isinstance(priced, str):
                broken[priced] += 1
                continue
            terms, bytes_ = priced
            possible.append(
                {
                    "n_split": split,
                    "bands": number,
                    "cycles": sum(terms.values()),
                    "temporary_bytes": bytes_,
                    "terms": terms,
                }
            )
        count = len(possible) + broken.total()
        if not count:
            raise ValueError(
                f"n_split={self.options.n_split} and num_bands={self.options.num_bands} leave "
                f"parts without any of the {self.target.tiles} tiles: use fewer parts"
            )
        if not possible:
            rules = ", ".join(f"{rule} ({times})" for rule, times in broken.items())
            raise ValueError(
                f"none of {count} static partitions is possible: {rules}; raise "
                "available_memory_proportion, loosen num_bands and n_split, or use a smaller n"
            )
        # Of cuts with equal cycles, take fewer parts of n, then fewer bands.
        possible.sort(key=lambda cut: (cut["cycles"], cut["n_split"], cut["bands"]))
        counts = {"partitions": count, "possible": len(possible)}
        return possible[0], Search(counts, (bound,), tuple(possible[1 : 1 + RUNNERS_UP]))


def _plan(request: tuple[Any, ...], pattern: SparsePattern) -> StaticPlan:
    target, dtype, params, options, *_ = request
    counts = [
        np.bincount(at.numpy(), minlength=size)
        for at, size in zip((pattern.rows, pattern.cols), pattern.grid, strict=True)
    ]
    sorted_counts = [sort_kept_first(count, options.enable_preprocessing) for count in counts]
    (row_order, rows), (column_order, columns) = sorted_counts
    cuts = _CutSearch(
        target, dtype, params, options, pattern, (rows, columns), counts[1][column_order]
    )
    best, search = cuts.find_best()
    bands, n_split = best["bands"], best["n_split"]
    _log.info("planned static %s: %d bands, %d parts of n", params, bands, n_split)
    n_parts, tile_parts = cuts.parts(n_split)
    return StaticPlan(
        params=params,
        options=options,
        dtype=dtype,
        target=target,
        pattern=pattern,
        row_order=row_order,
        column_order=column_order,
        planned=(rows, columns),
        bands=cuts.bands(bands),
        n_parts=tuple(n_parts),
        tile_parts=tuple(tile_parts),
        band_tiles=tuple(cuts.band_tiles(bands, part.size) or () for part in tile_parts),
        terms=best["terms"],
        temporary_bytes=best["temporary_bytes"],
        search=search,
    )
