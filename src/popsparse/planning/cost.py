"""The planner's cost model: partitions, bucket sizes, and cycles and temporary memory of each pass.

Vectorised over partitions: `x` and `y` are groups (elements or blocks) of a tile, integers or
integer arrays. Partitions and bucket sizes are sections 2.1 and 2.2 of
docs/popsparse-formulas.md, the terms sections 4.1 and 4.2, quirks included: they choose the plans
that the original chose. `timing` says how long a plan really takes.

The original assigns propagation no cost, and with few blocks per bucket its plans are a lottery:
capacity is a rounded number of blocks, and whether the fullest rectangle exceeds it decides between
no propagation and dozens of steps. Here the non-zeros of a rectangle are a binomial variable; the
tail beyond the capacity of its buckets, over all rectangles, gives the probability of a spill, and
the excess of the fullest rectangle over its neighbours' room the distance it has to travel
(section 4.3 of docs/popsparse-formulas.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from scipy.special import bdtrc

from popsparse.machine.dtypes import DType
from popsparse.planning import cycles as tile_cycles
from popsparse.planning.cycles import LOOP_CONTROL, LOOP_STEPS, ExchangeCost, grid_splits
from popsparse.planning.options import Options
from popsparse.planning.params import (
    GRAD_W_WORKER,
    ROW_ENTRY,
    WORD_LIMIT,
    FullyConnectedParams,
    all_partitions,
    block_for_plan,
    ceil_div,
    even_parts,
    header_words,
)
from popsparse.planning.plan import Method, Sizes


@dataclass(frozen=True)
class SearchSpace:
    """The partitions of one product under one method."""

    params: FullyConnectedParams
    options: Options
    dtype: DType
    target: Any
    method: Method

    @cached_property
    def block(self) -> tuple[int, int]:
        return block_for_plan(self.params.sparsity_params.block_dimensions, self.dtype)

    @cached_property
    def grouping(self) -> Sizes:
        return self.method.grouping(self.block, self.dtype)

    @cached_property
    def groups(self) -> Sizes:
        """Groups of each dimension over the full product."""
        p, g = self.params, self.grouping
        return Sizes(
            p.num_groups,
            ceil_div(p.output_channels_per_group, g.x),
            ceil_div(p.input_channels_per_group, g.y),
            ceil_div(p.batch_size, g.z),
        )

    @cached_property
    def partitions(self) -> np.ndarray:
        tiles = self.target.tiles // self.params.num_groups
        if tiles == 0:
            raise ValueError(
                f"each of the {self.params.num_groups} groups needs a tile of its own, "
                f"the target has {self.target.tiles}: use fewer groups or a larger target"
            )
        return all_partitions(tiles)

    @cached_property
    def tiles(self) -> np.ndarray:
        return self.params.num_groups * self.partitions.prod(axis=0)

    @cached_property
    def per_tile(self) -> np.ndarray:
        """Groups of x, y and z on the fullest tile, [3, count]."""
        groups = np.array(self.groups[1:])[:, None]
        return ceil_div(groups, self.partitions)

    def broken_rules(self) -> dict[str, np.ndarray]:
        """For each rule, which partitions break it."""
        px, py, pz = self.partitions
        _, nx, ny, nz = self.groups
        constraints = self.options.plan_constraints
        rules = {
            "x has parts that stay empty": px != even_parts(nx, px),
            "y has parts that stay empty": py != even_parts(ny, py),
            "z is not cut into equal parts": nz % pz != 0,
            "offsets exceed 16 bits": self._exceeds_16_bits(),
        }
        for name, parts in zip("xyz", self.partitions, strict=True):
            value = getattr(constraints, name)
            if value is not None:
                rules[f"{name} is constrained to {value}"] = parts != value
        return rules

    def _exceeds_16_bits(self) -> np.ndarray:
        tx, ty, tz = self.per_tile
        if self.method is not Method.ELEMENT:
            return np.zeros(tx.shape, bool)
        grain = self.grouping.z * self.dtype.size
        beyond = np.maximum((ty - 1) * tz * grain, tx - 1) > WORD_LIMIT
        if self.options.do_grad_a_pass and not self.options.shared_buckets:
            beyond |= np.maximum((tx - 1) * tz * grain, ty - 1) > WORD_LIMIT
        return beyond

    def allowed(self) -> np.ndarray:
        """Which partitions break no rule, bool [count]."""
        return ~np.logical_or.reduce(list(self.broken_rules().values()))


Ints = Any
_SUB_GROUPS = 2  # The number the original reserves room for; a bucket may hold more, smaller ones.


def ceil_fraction(total: Ints, ratio: float) -> Ints:
    """ceil(total * ratio), safe against a product that rounding lifts above an integer."""
    return np.ceil(np.asarray(total) * ratio * (1 - 1e-12)).astype(np.int64)


def align_up(value: Ints, grain: int) -> Ints:
    """Round up to a multiple of `grain`."""
    return ceil_div(np.asarray(value), grain) * grain


def groups_per_bucket(
    groups: int, tiles: Ints, oversize: float, area: int, dtype: DType, exchange_bytes: float
) -> Ints:
    """Elements or blocks a bucket has room for, when `groups` of them are spread over `tiles`."""
    perfect = ceil_div(groups, np.asarray(tiles))
    size = area * dtype.size
    grain = math.lcm(size, max(1, int(exchange_bytes))) // size
    rounded = np.floor(perfect * (1 + oversize) + 0.5).astype(np.int64)
    return align_up(rounded, grain)


def value_elements(groups: Ints, area: int, partials: DType, *, grad_weight: bool) -> Ints:
    """Values of a bucket; a multiple of 64 bits of partials where grad_weight uses them as such."""
    return align_up(groups * area, 8 // partials.size if grad_weight else 1)


def expected_groups(x: Ints, y: Ints, ratio: float) -> tuple[Ints, Ints]:
    """Non-empty rows of a tile of x by y groups, and groups in each, for a uniform pattern."""
    x, y = np.asarray(x), np.asarray(y)
    rows = np.ceil(x * (1.0 - np.power(1.0 - ratio, y))).astype(np.int64)
    rows = np.maximum(rows, 1)
    return rows, ceil_div(ceil_fraction(x * y, ratio), rows)


def _bucket_words(fixed: int, entries: Ints, oversize: float, exchange_bytes: float) -> Ints:
    content = np.ceil(entries * (1 + oversize)).astype(np.int64)
    return align_up(_SUB_GROUPS * fixed + content, math.lcm(2, max(1, int(exchange_bytes))))


def meta_info_words(
    x: Ints,
    y: Ints,
    ratio: float,
    oversize: float,
    workers: int,
    exchange_bytes: float,
    *,
    block: bool,
    grad_weight: bool,
) -> Ints:
    """Words of the meta-info of a bucket that forward (and grad_weight) read."""
    rows, columns = expected_groups(x, y, ratio)
    fixed = header_words(workers, element=not block)
    if grad_weight:
        # The original counts the element format's worker-count word once for each worker.
        fixed += workers * (GRAD_W_WORKER + (0 if block else 1))
    return _bucket_words(fixed, rows * (ROW_ENTRY + columns), oversize, exchange_bytes)


def separate_grad_input_words(
    x: Ints, y: Ints, ratio: float, oversize: float, workers: int, exchange_bytes: float
) -> Ints:
    """Words of grad_input's own buckets; x, y are the groups of the forward pass."""
    rows, columns = expected_groups(y, x, ratio)
    fixed = header_words(workers, element=True)
    return _bucket_words(fixed, rows * (ROW_ENTRY + 2 * columns), oversize, exchange_bytes)


def _capacity(space: SearchSpace, groups: Ints, words: Ints) -> Ints:
    """Elements or blocks that fit a bucket, by values and by meta-info."""
    tx, ty, _ = space.per_tile
    workers, grad_weight = space.target.workers, space.options.do_grad_w_pass
    element = space.method is Method.ELEMENT
    fixed = header_words(workers, workers if grad_weight else None, element=element)
    _, columns = expected_groups(tx, ty, space.params.nz_ratio)
    columns = np.maximum(columns, 1)
    # A row costs its entry and a word for each non-zero; a piece may cut two rows short.
    by_words = (words - 1 - fixed - 2 * ROW_ENTRY) * columns // (columns + ROW_ENTRY)
    return np.maximum(0, np.minimum(groups, by_words))


def expected_steps(space: SearchSpace, groups: Ints, words: Ints) -> tuple[Ints, Ints]:
    """Expected propagation steps for each partition, and the excess of the fullest rectangle.

    Args:
        groups: elements or blocks a bucket has room for.
        words: meta-info words of a bucket.
    """
    px, py, pz = space.partitions
    tx, ty, _ = space.per_tile
    ratio = space.params.nz_ratio
    rectangles = px * py * space.params.num_groups
    # Blocks of the pattern that the plan splits are present or absent as a whole.
    pattern = space.params.sparsity_params.area
    together = pattern // (space.block[0] * space.block[1])
    room = pz * _capacity(space, groups, words)
    trials = np.maximum(tx * ty // together, 1)
    tail = bdtrc(np.minimum(room // together, trials), trials, ratio)
    any_spills = -np.expm1(rectangles * np.log1p(-np.minimum(tail, 1 - 1e-12)))
    mean = tx * ty * ratio
    spread = np.sqrt(mean * (1 - ratio) * together)
    fullest = mean + spread * np.sqrt(2 * np.log(rectangles))
    excess = np.maximum(together, fullest - room)
    hops = np.maximum(1, excess / np.maximum(room - mean, 0.5))
    return pz * any_spills * np.minimum(hops, np.maximum(1, rectangles - 1)), excess


def _forward_cycles(
    space: SearchSpace, x: Ints, y: Ints, z: Ints, buckets: Ints = 1, *, retain: bool = True
) -> Ints:
    """Cycles of a worker's vertex of forward, or with `retain` False of grad_input on the same
    blocks."""
    dtype, partials, workers = space.dtype, space.options.partials_type, space.target.workers
    if space.method is Method.ELEMENT:
        return tile_cycles.element_forward(x, y, z, dtype, workers, buckets)
    units = space.target.conv_units(dtype, partials)
    sizes = x, y, z, space.grouping[1:3]
    return tile_cycles.block_forward(
        *sizes, dtype, partials, units, workers, buckets, retain=retain
    )


def _grad_weight_cycles(space: SearchSpace, x: Ints, y: Ints, z: Ints) -> Ints:
    """Cycles of a worker's vertex of grad_weight, for blocks without the matrix units."""
    dtype, workers = space.dtype, space.target.workers
    if space.method is Method.ELEMENT:
        return tile_cycles.element_grad_weight(x, y, z, dtype, workers)
    block = space.grouping[1:3]
    return tile_cycles.block_grad_weight(
        x, y, z, block, dtype, space.options.partials_type, workers
    )


def expected_cycles(
    space: SearchSpace, groups: Ints, words: Ints, bucket_bytes: Ints, *, kind: str
) -> Ints:
    """Expected cycles of the propagation phase of "forward", "grad_input" or "grad_weight"."""
    steps, excess = expected_steps(space, groups, words)
    tx, ty, tz = space.per_tile
    gz = space.grouping.z
    workers = space.target.workers
    _, columns = expected_groups(tx, ty, space.params.nz_ratio)
    # Whole rows move, as long as a bucket has room.
    count = np.clip(np.ceil(excess), np.maximum(columns, 1), np.maximum(groups, 1)).astype(np.int64)
    if kind == "grad_weight":
        compute = _grad_weight_cycles(space, 1, count, tz * gz) // workers
    else:
        compute = _forward_cycles(space, 1, count, ceil_div(tz, workers) * gz)
    turn = compute + ExchangeCost(space.target)(bucket_bytes)
    turn = turn + LOOP_STEPS * space.target.sync_cycles + LOOP_CONTROL * workers
    return np.ceil(steps * turn).astype(np.int64)


class TermArray(NamedTuple):
    """A term of the estimate for each partition."""

    name: str
    cycles: Ints
    temporary_bytes: Ints


@dataclass(frozen=True)
class Buckets:
    """Bucket sizes for each partition."""

    groups: Ints
    area: int
    forward_words: Ints
    grad_input_words: Ints
    """Words of grad_input's own buckets, or the forward words if the buckets are shared."""

    def bytes(self, words: Ints, value_size: int) -> Ints:
        """Bytes of a bucket with this many words and values of this size."""
        return self.groups * self.area * value_size + 2 * words


def bucket_arrays(space: SearchSpace) -> Buckets:
    """The bucket sizes of all partitions."""
    options, ratio = space.options, space.params.nz_ratio
    oversize = options.meta_info_bucket_oversize_proportion
    rate = space.target.exchange_bytes_per_cycle
    _, nx, ny, _ = space.groups
    total = space.params.num_groups * int(ceil_fraction(nx * ny, ratio))
    area = space.grouping.x * space.grouping.y
    held = groups_per_bucket(total, space.tiles, oversize, area, space.dtype, rate)
    tx, ty, _ = space.per_tile
    common = (tx, ty, ratio, oversize, space.target.workers, rate)
    block = space.method is not Method.ELEMENT
    forward = meta_info_words(*common, block=block, grad_weight=options.do_grad_w_pass)
    shared = block or options.shared_buckets
    grad_input_words = forward if shared else separate_grad_input_words(*common)
    return Buckets(held, area, forward, grad_input_words)


class _View(NamedTuple):
    """Forward's dimensions, or grad_input's: the same with x and y exchanged."""

    py: Ints
    tx: Ints
    ty: Ints
    ny: int
    gx: int
    gy: int
    input_sharing: Ints
    """Neighbouring tiles that receive the same part of the dense operand."""


def _view(space: SearchSpace, *, grad_input: bool) -> _View:
    px, py, pz = space.partitions
    tx, ty, _ = space.per_tile
    _, nx, ny, _ = space.groups
    _, gx, gy, _ = space.grouping
    if not grad_input:
        return _View(py, tx, ty, ny, gx, gy, px)
    return _View(px, ty, tx, nx, gy, gx, np.where((pz == 1) & (px == 1), py, 1))


def product_terms(
    space: SearchSpace, buckets: Buckets, *, grad_input: bool
) -> tuple[list[TermArray], Ints]:
    """The terms of forward or of grad_input, and the pass's temporary bytes."""
    v = _view(space, grad_input=grad_input)
    pz, tz = space.partitions[2], space.per_tile[2]
    gz, size = space.grouping.z, space.dtype.size
    dtype, partials = space.dtype, space.options.partials_type
    workers, exchange = space.target.workers, ExchangeCost(space.target)
    words = buckets.grad_input_words if grad_input else buckets.forward_words
    bucket = buckets.bytes(words, size)
    terms = []

    transposed: Ints = 0
    if grad_input and v.gx > 1 and v.gy > 1:
        transposed = buckets.groups * buckets.area * size
        edge = tile_cycles.kernel_edge((v.gx, v.gy), dtype)
        turn = tile_cycles.transpose_blocks(buckets.groups, edge, edge, dtype, workers)
        terms.append(TermArray("transpose buckets", turn, transposed))

    home = ceil_div(space.params.num_groups * v.ny * space.groups.z, space.tiles) * v.gy * gz * size
    needed = v.ty * tz * v.gy * gz * size
    dense = np.where(needed > home, needed, 0)
    moved = np.where(pz > 1, pz * bucket, 0)
    bucket_sharing = np.where(space.partitions[0] == 1, pz, 1)
    cycles = exchange.broadcast(dense, v.input_sharing, space.tiles)
    cycles = cycles + exchange.broadcast(moved, bucket_sharing, space.tiles)
    gathered = dense + (pz - 1) * bucket
    terms.append(TermArray("distribution exchange", cycles, gathered + transposed))

    results = v.tx * tz * v.gx * gz
    cast = dtype is not partials
    # The original uses the partitions of z here where it means those of y.
    held = np.where(cast | (pz > 1), results * partials.size, 0)
    cycles = tile_cycles.zero_partials(results, workers)
    cycles = cycles + _multiply_cycles(space, grad_input=grad_input)
    terms.append(TermArray("distribution compute", cycles, gathered + held + transposed))
    none = np.zeros_like(pz)
    spilling = none
    if space.options.price_propagation:
        kind = "grad_input" if grad_input else "forward"
        spilling = expected_cycles(space, buckets.groups, words, bucket, kind=kind)
    terms.append(TermArray("propagation", spilling, 2 * bucket + dense + held + transposed))

    sent = np.where(v.py > 1, results * partials.size, 0)
    terms.append(TermArray("reduction exchange", exchange(sent), held + sent))
    outputs = ceil_div(results, v.py)
    alone = tile_cycles.cast(outputs, partials, dtype, workers) if cast else 0
    cycles = np.where(v.py > 1, tile_cycles.reduce(outputs, v.py, partials, dtype, workers), alone)
    stored = np.where(cast | (v.py > 1), outputs * size, 0)
    terms.append(TermArray("reduction or cast", cycles, held + sent + stored))
    return terms, np.maximum.reduce([t.temporary_bytes + none for t in terms])


def _multiply_cycles(space: SearchSpace, *, grad_input: bool) -> Ints:
    """Cycles of the slowest worker, with every bucket of the z partitions matching once."""
    pz = space.partitions[2]
    tx, ty, tz = space.per_tile
    gz, dtype, workers = space.grouping.z, space.dtype, space.target.workers
    ratio, shared = space.params.nz_ratio, space.options.shared_buckets
    rows, columns = expected_groups(*((ty, tx) if grad_input else (tx, ty)), ratio)
    if space.method is Method.ELEMENT:
        if grad_input and shared:
            # Rows of the transposed product are counted like columns of the forward one.
            return tile_cycles.element_transposed(columns, ty, tz * gz, dtype, workers, pz)
        x, z = grid_splits(rows, tz, workers)
        if grad_input:
            cycles = tile_cycles.element_grad_input(x, columns, z * gz, dtype, workers, pz)
        else:
            cycles = _forward_cycles(space, x, columns, z * gz, pz)
        return cycles.max(axis=0)
    if grad_input:
        rows, columns = columns, rows
    _, z = grid_splits(np.ones_like(tz), tz, workers)
    cycles = _forward_cycles(space, rows, columns, z * gz, pz, retain=not grad_input)
    return cycles.max(axis=0)


def grad_weight_terms(
    space: SearchSpace, buckets: Buckets, *, exchange_buckets: bool
) -> tuple[list[TermArray], Ints]:
    """The terms of grad_weight, and the pass's temporary bytes."""
    px, py, pz = space.partitions
    tx, ty, tz = space.per_tile
    groups, nx, ny, nz = space.groups
    _, gx, gy, gz = space.grouping
    dtype, partials = space.dtype, space.options.partials_type
    workers, exchange = space.target.workers, ExchangeCost(space.target)
    none = np.zeros_like(pz)
    terms = []

    # Output gradients and activations, as they lie at home and as a tile needs them.
    needed = [tx * tz * gx * gz * dtype.size, ty * tz * gy * gz * dtype.size]
    home = [
        ceil_div(groups * n * nz, space.tiles) * g * gz * dtype.size
        for n, g in ((nx, gx), (ny, gy))
    ]
    moved = [np.where(n > h, n, 0) for n, h in zip(needed, home, strict=True)]
    if exchange_buckets:
        sharing = [np.where((px == 1) & (pz == 1), py, 1), px]
        z_sharing = np.where(px == 1, pz, 1)
    else:
        sharing = [np.where(pz == 1, py, 1), np.where((py == 1) & (pz == 1), px, 1)]
        z_sharing = pz
    cycles = sum(exchange.broadcast(m, s, space.tiles) for m, s in zip(moved, sharing, strict=True))
    terms.append(TermArray("pre-distribution exchange", cycles, moved[0] + moved[1]))

    if space.method is Method.BLOCK_AMP:
        z = tz * gz
        cycles = tile_cycles.rearrange_batch(tx, gx, z, dtype, workers)
        cycles = cycles + tile_cycles.rearrange_batch(ty, gy, z, dtype, workers)
        terms.append(TermArray("rearrange inputs", cycles, sum(needed) + sum(moved)))
        moved = needed

    values = buckets.groups * buckets.area
    meta_info = 2 * buckets.forward_words
    bucket = meta_info + values * partials.size
    if exchange_buckets:
        step = exchange(bucket)
    else:
        step = sum(exchange.broadcast(n, z_sharing, space.tiles) for n in needed)
    terms.append(TermArray("distribution exchange", np.where(pz > 1, step * pz, 0), none))

    cycles = tile_cycles.zero_partials(values, workers) + pz * _multiply_cycles_of_grad_weight(
        space
    )
    terms.append(TermArray("distribution compute", cycles, none))

    if space.options.price_propagation:
        cycles = expected_cycles(
            space, buckets.groups, buckets.forward_words, bucket, kind="grad_weight"
        )
        terms.append(TermArray("propagation", cycles, none))

    cast = dtype is not partials
    # The original mixes up the bytes of the partials with those of the meta-info here.
    kept = meta_info * cast
    held = moved[0] + moved[1] + 2 * bucket if exchange_buckets else 2 * sum(moved) + kept
    terms.append(TermArray("all exchange and compute", none, held))
    if cast:
        cycles = tile_cycles.cast(values, partials, dtype, workers)
        terms.append(TermArray("cast", cycles, kept + values * dtype.size))
    return terms, np.maximum.reduce([t.temporary_bytes + none for t in terms])


def _multiply_cycles_of_grad_weight(space: SearchSpace) -> Ints:
    """Cycles of the slowest worker on the part of the pattern at one step over z."""
    _, _, pz = space.partitions
    tx, ty, tz = space.per_tile
    _, gx, gy, gz = space.grouping
    dtype, partials = space.dtype, space.options.partials_type
    workers, z = space.target.workers, tz * gz
    rows, columns = expected_groups(ceil_div(tx, pz), ty, space.params.nz_ratio)
    if space.method is Method.BLOCK_AMP:
        return tile_cycles.block_grad_weight_amp(
            rows, columns, z, (gx, gy), dtype, partials, workers
        )
    columns = np.maximum(columns, 1)
    total = rows * columns
    share = ceil_div(total, workers)
    worst = np.zeros_like(total)
    for worker in range(workers):
        begin = worker * share
        end = np.minimum(total, begin + share)
        count = np.maximum(end - begin, 0)
        touched = ceil_div(end, columns) - begin // columns
        cycles = _grad_weight_cycles(space, touched, count, z)
        # An average over the rows, which the original takes for the rectangle's rows.
        averaged = ceil_div(cycles, np.maximum(1, ceil_div(count, columns)))
        worst = np.maximum(worst, np.where(count > 0, averaged, 0))
    return worst
