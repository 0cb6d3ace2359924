"""The planner of dense products.

`plan(m, k, n, dtype, target)` finds, for C[m, n] = A[m, k] B[k, n], the cut that poplibs' planner
would choose: a 1x1 convolution in the matrix units (AMP) or by vector multiply-accumulate (HMAC),
split over the tiles in the streamed field, the out-channels and the in-channels, and in time
(serial splits). See section 7 of docs/popsparse-formulas.md.

For the dense grad_weight, PopSparse only reports the serial splits that this planner would choose
(`fully_connected_dense_grad_w_serial_splits`); Graphcore's application split its product that way.
Here each piece is planned, computed, pooled and sent before the next.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field
from functools import cached_property, lru_cache
from itertools import chain, product
from typing import Any, NamedTuple

import numpy as np

from dynsparse._core.checks import check_integer, check_types, check_within
from popsparse.machine.dtypes import DType
from popsparse.machine.exchange import link_cycles
from popsparse.machine.target import Target
from popsparse.planning import cycles as tile_cycles
from popsparse.planning.cycles import (
    AMP,
    HMAC,
    ExchangeCost,
    add_in_place,
    amp,
    dynamic_slice,
    hmac,
    rearrange,
    reduce_stage,
    reduction_depths,
    regroup,
)
from popsparse.planning.options import Options, Update
from popsparse.planning.params import (
    FullyConnectedParams,
    all_partitions,
    ceil_div,
    data_type,
    even_parts,
)
from popsparse.planning.plan import Plan

Array = Any


@dataclass(frozen=True)
class Cut:
    """One vertex, orientation and serial split with all its partitions over the tiles.

    `fields` elements are streamed past coefficients of `channels` in- and `outs` out-channels;
    `partitions` [3, count] are the parts of field, out-channels and in-channels.
    """

    kind: AMP | HMAC
    swapped: bool
    fields: int
    outs: int
    channels: int
    partitions: np.ndarray
    serial_out: int
    serial_in: int
    once: bool

    @property
    def serial(self) -> int:
        return self.serial_out * self.serial_in

    @property
    def tile_sizes(self) -> tuple[Array, ...]:
        """Sizes of the fullest tile: field elements, groups of in- and of out-channels; elements
        streamed, held and produced."""
        f, o, i = self.partitions
        kind = self.kind
        ft = ceil_div(self.fields, f)
        ig = ceil_div(ceil_div(self.channels, kind.in_channels), i * self.serial_in)
        og = ceil_div(ceil_div(self.outs, kind.out_channels), o * self.serial_out)
        streamed = ft * ig * kind.in_channels
        held = ig * kind.in_channels * og * kind.out_channels
        return ft, ig, og, streamed, held, ft * og * kind.out_channels

    @property
    def is_rearranged(self) -> tuple[bool, bool, bool]:
        """Whether the field operand, the coefficients and the result have a layout other than the
        user's."""
        pads_in = self.channels % self.kind.in_channels != 0
        pads_out = self.outs % self.kind.out_channels != 0
        field = not self.swapped or pads_in
        return field, field or pads_out, not self.swapped or pads_out


@dataclass(frozen=True)
class Terms:
    """Cycles of each term over the full product, and the other criteria of the search."""

    terms: dict[str, Array]
    cycles: Array
    bytes: Array
    phases: Array
    allowed: Array


def tile_bytes(cut: Cut, dtype: DType, partials: DType) -> Array:
    """Bytes of the operands and partials of one vertex, a lower bound of the temporary memory."""
    streamed, held, results = cut.tile_sizes[3:]
    return (held + streamed) * dtype.size + results * partials.size


def least_cycles(cut: Cut, dtype: DType, target: Any) -> Array:
    """A lower bound for each partition: the peak rate, and the rearrangement of operands."""
    kind = cut.kind
    peak = kind.units * 8 // dtype.size if isinstance(kind, AMP) else dtype.vector_width
    tiles = cut.partitions.prod(axis=0)
    bound = cut.fields * cut.outs * cut.channels / (peak * tiles)
    if not cut.swapped:
        moved = cut.serial * (cut.outs * cut.channels + cut.fields * cut.outs)
        moved += cut.fields * cut.channels * (1 if cut.once else cut.serial)
        rate = 5 / (4 * dtype.size) + 1 / target.exchange_bytes_per_cycle
        bound = bound + moved * dtype.size / tiles * rate
    return bound


def _rearrangement(elements: int, tiles: Array, dtype: DType, copy_bytes: int, *, odd: bool) -> Any:
    """The bytes that a tile holds of an operand to be rearranged, and the cycles to copy them."""
    held = ceil_div(elements * dtype.size, tiles)
    return held, rearrange(held, dtype, copy_bytes, odd=odd)


def _reduction(
    parts: Array, depth: Array, partials: DType, result: DType, target: Any
) -> tuple[Array, Array, Array]:
    """Compute cycles, exchange cycles of the later stages and the number of stages."""
    compute, moved, stages = (np.zeros_like(parts) for _ in range(3))
    exchange = ExchangeCost(target)
    common = (target.workers, target.bytes_per_tile)
    if partials is not result:
        one = depth == 1
        compute[one] = tile_cycles.cast(parts[one], partials, result, target.workers)
    at = np.flatnonzero(depth > 1)
    left = depth[at]
    outputs = ceil_div(parts[at], left) * left
    for remaining in _reduction_depths(int(depth.max(initial=1)))[:, left]:
        # Those that have no further stage go on with as many partials.
        goes_on = remaining > 0
        step = np.where(goes_on, ceil_div(left, np.maximum(remaining, 1)), 1)
        outputs, left = ceil_div(outputs, step), ceil_div(left, step)
        cycles = reduce_stage(outputs, step, partials, partials, *common)
        compute[at] += np.where(goes_on, cycles, 0)
        moved[at] += np.where(goes_on, exchange(outputs * partials.size), 0)
        stages[at] += goes_on
    outputs = ceil_div(outputs, left)
    compute[at] += reduce_stage(outputs, left, partials, result, *common)
    stages[at] += 1
    return compute, moved, stages


@lru_cache(maxsize=64)
def _reduction_depths(largest: int) -> np.ndarray:
    """`reduction_depths` by depth, 0 where there are none: int64 [2, largest + 1]."""
    depths = np.zeros((2, largest + 1), np.int64)
    for depth in range(2, largest + 1):
        middle = reduction_depths(depth)
        depths[: len(middle), depth] = middle
    return depths


def _link_cycles(cut: Cut, dtype: DType, partials: DType, target: Any, moved: Array) -> Array:
    """Cycles of one step's bytes on the links between processors.

    Tiles are numbered by part of the in-channels, of the field, of the out-channels, and divided
    evenly among the processors. An operand's part is spread over the tiles that share it; each of
    their processors receives the rest once. Partial sums and rearranged data, `moved` bytes a tile,
    come evenly from all processors in use.
    """
    f, o, i = cut.partitions
    streamed, held, results = cut.tile_sizes[3:]
    tiles = target.processor_tiles
    used = ceil_div(f * o * i, tiles)
    each = np.minimum(f * o * i, tiles)

    def from_others(processors: Array) -> Array:
        return 1 - 1 / np.maximum(processors, 1)

    received = streamed * dtype.size * ceil_div(each, o) * from_others(ceil_div(o, tiles))
    received += held * dtype.size * np.minimum(o, each) * from_others(ceil_div(f * o, tiles))
    summed_far = from_others(np.minimum(i, used))
    received += (results * partials.size * summed_far + moved * from_others(used)) * each
    # Cycles per byte that each of `count` processors receives evenly from the others.
    cycles = np.zeros(target.processors + 1)
    for count in range(2, target.processors + 1):
        even = (1 - np.eye(count)) / (count - 1)
        cycles[count] = link_cycles(target, 1e6 * even) / 1e6
    return np.ceil(received * cycles[used]).astype(np.int64)


def price(cut: Cut, dtype: DType, partials: DType, target: Any) -> Terms:
    """Price every partition of a cut. Nothing overlaps; synchronisation is not a term."""
    f, o, i = cut.partitions
    kind, serial = cut.kind, cut.serial
    size, width, workers = dtype.size, dtype.vector_width, target.workers
    exchange, copy = ExchangeCost(target), int(target.memcpy_bytes_per_cycle)
    used = f * o * i
    ft, ig, og, streamed, held, results = cut.tile_sizes

    terms: dict[str, Array] = {}
    shared = np.where(o % target.exchange_bus_tiles == 0, target.exchange_bus_tiles, 1)
    arriving = (streamed - streamed // o) * size
    field_exchange = ceil_div(arriving * 16, exchange.rate * shared)
    terms["coefficient exchange"] = exchange((held - held // f) * size)
    terms["partial exchange"] = exchange(results * partials.size)
    if isinstance(kind, AMP):
        compute = amp(
            ft, ig, og, kind, dtype, partials, workers, target.coefficient_load_bytes_per_cycle
        )
        allowed = np.ones(ft.shape, bool)
    else:
        compute = hmac(ft, ig, og, kind, dtype, partials, workers)
        # The planner assumes at most one vector of products a cycle.
        allowed = cut.fields * cut.outs * cut.channels <= width * used * compute * serial
    terms["compute"] = compute
    result = partials if cut.serial_in > 1 else dtype
    reduce_cycles, later, stages = _reduction(results, i, partials, result, target)
    terms["reduction exchange"], terms["reduction"] = later, reduce_cycles

    odd_in = bool(cut.channels % width or cut.outs % width)
    moves_field, moves_coefficients, moves_output = cut.is_rearranged
    none = np.zeros_like(used)
    moved: list[Array] = [none, none, none]  # Of field operand, coefficients and output.
    field_transform = none
    if moves_field:
        moved[0], cycles = _rearrangement(
            cut.fields * cut.channels, used, dtype, copy, odd=bool(cut.channels % width)
        )
        field_transform = cycles + exchange(moved[0])
    if moves_coefficients:
        moved[1], cycles = _rearrangement(cut.outs * cut.channels, used, dtype, copy, odd=odd_in)
        terms["coefficient rearrangement"] = cycles + exchange(moved[1])
    if moves_output:
        moved[2], cycles = _rearrangement(
            cut.fields * cut.outs, used, dtype, copy, odd=bool(cut.outs % width)
        )
        terms["output rearrangement"] = cycles + exchange(moved[2])
    elif kind.out_channels != 4 * width:
        moved[2] = ceil_div(cut.fields * cut.outs * size, used)
        terms["output regrouping"] = regroup(moved[2], kind, dtype, copy)

    if serial > 1:
        slices = dynamic_slice(ceil_div(cut.outs * cut.channels, used) // serial, dtype, workers)
        if cut.serial_in > 1:
            slices = slices + dynamic_slice(
                ceil_div(cut.fields * cut.channels, used) // serial, dtype, workers
            )
            slices = slices + add_in_place(ceil_div(results, i), dtype, workers)
        else:
            slices = slices + dynamic_slice(
                ceil_div(cut.fields * cut.outs, used) // serial, dtype, workers
            )
        terms["serial slices"] = slices
    if target.processors > 1:
        terms["links"] = _link_cycles(cut, dtype, partials, target, moved[0] + moved[1] + moved[2])
    terms = {name: serial * value for name, value in terms.items()}
    repeats = 1 if cut.once else serial
    terms["field exchange"] = repeats * field_exchange
    terms["field rearrangement"] = repeats * field_transform
    if cut.serial_in > 1 and partials is not dtype:
        terms["final cast"] = tile_cycles.cast(ceil_div(results, i), partials, dtype, workers)

    working = held * size + results * partials.size + (0 if cut.once else streamed * size)
    reduce_bytes = np.where(stages > 1, ceil_div(results, i) * i * partials.size, 0)
    bytes_ = np.maximum.reduce([2 * np.maximum.reduce(moved), working, reduce_bytes])
    if cut.once:
        bytes_ = bytes_ + streamed * size + moved[0]
    if cut.serial_in > 1:
        bytes_ = bytes_ + ceil_div(results, i) * partials.size
    phases = serial * (1 + stages + (2 if serial > 1 else 0)) + int(cut.once)
    return Terms(terms, sum(terms.values()), bytes_, phases, allowed)


_log = logging.getLogger("dynsparse.popsparse")


@dataclass(frozen=True)
class DensePlan:
    """The best cut of a dense product.

    Attributes:
        swapped: A is the stationary operand (its rows are the out-channels), the natural case.
        vertex: what multiplies on a tile; `method` is its name, e.g. "amp 16 units 16x16".
        field, out, in_: splits over tiles of the streamed columns, the out- and the in-channels.
        serial_out, serial_in: splits in time; at most one is above 1.
        broadcast_once: the streamed operand is sent to the tiles once, before the serial loop.
        terms: cycles by name as the planner counts them; they add up to `planned_cycles`.
        phases: bulk-synchronous steps, each of which costs the target's `sync_cycles`, with several
            processors its `link_sync_cycles`.
        temporary_bytes, resident_bytes: bytes of a tile; A, B and C are resident.
        cycles: planned cycles plus synchronisation.
        seconds, tflops: at the target's clock; tflops counts 2 m k n.
    """

    m: int
    k: int
    n: int
    dtype: DType
    partials: DType
    swapped: bool
    vertex: AMP | HMAC
    field: int
    out: int
    in_: int
    serial_out: int
    serial_in: int
    broadcast_once: bool
    terms: dict[str, int] = dataclass_field(hash=False)
    phases: int
    temporary_bytes: int
    resident_bytes: int
    target: Any = dataclass_field(compare=False, repr=False)

    @property
    def method(self) -> str:
        return self.vertex.label()

    @cached_property
    def cut(self) -> Cut:
        """The cut with this one partition, [3]."""
        fields, outs = (self.n, self.m) if self.swapped else (self.m, self.n)
        parts = np.array([self.field, self.out, self.in_])
        serial = self.serial_out, self.serial_in, self.broadcast_once
        return Cut(self.vertex, self.swapped, fields, outs, self.k, parts, *serial)

    @property
    def products(self) -> float:
        """Floating-point operations of the product, 2 m k n."""
        return 2.0 * self.m * self.k * self.n

    @property
    def tiles_used(self) -> int:
        return self.field * self.out * self.in_

    @property
    def planned_cycles(self) -> int:
        return sum(self.terms.values())

    @property
    def sync_cycles(self) -> float:
        crosses = self.tiles_used > self.target.processor_tiles
        sync = self.target.whole_sync_cycles if crosses else self.target.sync_cycles
        return self.phases * sync

    @property
    def cycles(self) -> float:
        return self.planned_cycles + self.sync_cycles

    @property
    def seconds(self) -> float:
        return self.cycles / self.target.clock_hz

    @property
    def tflops(self) -> float:
        return self.products / self.seconds / 1e12

    def to_dict(self) -> dict[str, Any]:
        """Plain figures for reports and `--json`."""
        return {
            "method": self.method,
            "swapped": self.swapped,
            "field": self.field,
            "out": self.out,
            "in": self.in_,
            "serial_out": self.serial_out,
            "serial_in": self.serial_in,
            "broadcast_once": self.broadcast_once,
            "tiles": self.tiles_used,
            "terms": dict(self.terms),
            "phases": self.phases,
            "sync_cycles": self.sync_cycles,
            "cycles": self.cycles,
            "seconds": self.seconds,
            "tflops": self.tflops,
            "temporary_bytes": self.temporary_bytes,
            "resident_bytes": self.resident_bytes,
        }


@check_types
def plan(
    m: int,
    k: int,
    n: int,
    dtype: Any,
    target: Target,
    *,
    partials: Any = None,
    available_memory_proportion: float = 0.6,
) -> DensePlan:
    """Plan a dense [m, k] x [k, n] product: find its best cut.

    Args:
        m, k, n: sizes.
        dtype: float16 or float32.
        target: a `popsparse.machine.Target`.
        partials: type of the partial sums; defaults to that of the data.
        available_memory_proportion: the part of a tile temporary data may take; when no cut fits,
            it is doubled twice, then dropped.

    Raises:
        ValueError: sizes below 1, partials narrower than the data, operands that do not fit the
            machine's memory.
        TypeError: sizes that are not integers.
    """
    m, k, n = (check_integer(name, v, 1) for v, name in ((m, "m"), (k, "k"), (n, "n")))
    kind = data_type(dtype)
    sums = kind if partials is None else data_type(partials, "partials")
    if sums.size < kind.size:
        raise ValueError(f"partials must be at least as wide as the data, got {sums} for {kind}")
    name = "available_memory_proportion"
    share = float(check_within(name, available_memory_proportion, "[0, 1e6]"))
    return _plan(m, k, n, kind, sums, target, share)


@lru_cache(maxsize=512)
def _plan(
    m: int, k: int, n: int, dtype: DType, partials: DType, target: Any, share: float
) -> DensePlan:
    resident = ceil_div((m * k + k * n + m * n) * dtype.size, target.tiles)
    # Check before the search, which takes longer for larger products.
    if resident > target.bytes_per_tile:
        raise ValueError(
            f"a dense {m}x{k} by {k}x{n} product of {dtype} needs {resident:,} bytes a tile for "
            f"its operands alone, {target.name} has {target.bytes_per_tile:,}: use smaller sizes"
        )
    best = _search(m, k, n, dtype, partials, target, share, resident)
    cut = f"{best.field} x {best.out} x {best.in_} tiles, {best.method}"
    _log.info("planned dense %dx%d by %dx%d of %s: %s", m, k, k, n, dtype, cut)
    if resident + best.temporary_bytes > target.bytes_per_tile:
        raise ValueError(
            f"a dense {m}x{k} by {k}x{n} product of {dtype} needs "
            f"{resident + best.temporary_bytes} bytes a tile, the target has "
            f"{target.bytes_per_tile}: use smaller operands or more tiles"
        )
    return best


def _amp_kinds(dtype: DType, partials: DType, target: Any) -> list[AMP]:
    available = target.conv_units(dtype, partials)
    if dtype.size == 4:
        return [AMP(units, 8, units) for units in (16, 8) if units <= available]
    if partials.size == 4:
        return [AMP(8, 16, 8), AMP(8, 16, 16)]
    return [AMP(units, 16, units) for units in (16, 8) if units <= available]


def _hmac_kinds(channels: int, dtype: DType, partials: DType) -> list[HMAC]:
    step = 4 // dtype.size  # Half channels come in pairs.
    sizes = {ceil_div(channels, size): size for size in range(channels + step, step - 1, -step)}
    return [HMAC(size, 2 if partials.size == 2 else 1) for size in sizes.values()]


def _serial_splits(groups: int) -> list[int]:
    return [s for s in range(2, groups + 1) if even_parts(groups, s) == s]


@lru_cache(maxsize=64)
def _leaves_no_part_empty(size: int, tiles: int) -> np.ndarray:
    """Which numbers of parts leave no part empty: bool [tiles + 1]."""
    parts = np.arange(1, tiles + 1)
    return np.append(False, even_parts(size, parts) == parts)


def _generate_cuts(
    m: int, k: int, n: int, kind: AMP | HMAC, target: Any, *, swapped: bool
) -> Iterator[Cut]:
    fields, outs = (n, m) if swapped else (m, n)
    out_groups, in_groups = ceil_div(outs, kind.out_channels), ceil_div(k, kind.in_channels)
    splits = [(1, 1)]
    if isinstance(kind, AMP):
        splits += [(s, 1) for s in _serial_splits(out_groups)]
        splits += [(1, s) for s in _serial_splits(in_groups)]
    tiles = target.tiles
    partitions = all_partitions(tiles)
    partitions = partitions[:, _leaves_no_part_empty(fields, tiles)[partitions[0]]]
    for serial_out, serial_in in splits:
        rows = _leaves_no_part_empty(ceil_div(out_groups, serial_out), tiles)[partitions[1]]
        rows &= _leaves_no_part_empty(ceil_div(in_groups, serial_in), tiles)[partitions[2]]
        for once in (False, True) if serial_out > 1 else (False,):
            splits_of = (partitions[:, rows], serial_out, serial_in, once)
            yield Cut(kind, swapped, fields, outs, k, *splits_of)


def _search(
    m: int,
    k: int,
    n: int,
    dtype: DType,
    partials: DType,
    target: Target,
    share: float,
    resident: int,
) -> DensePlan:
    first = int(target.bytes_per_tile * share)
    # The planner limits HMAC to its peak rate: it cannot beat a product that is faster.
    least = m * k * n / (dtype.vector_width * target.tiles)
    # The most promising cuts come first: their cost rules out most of the others.
    cuts = [
        cut
        for swapped in (True, False)
        for kind in _amp_kinds(dtype, partials, target)
        for cut in _generate_cuts(m, k, n, kind, target, swapped=swapped)
    ]
    cuts.sort(key=lambda cut: (not cut.swapped, cut.serial))
    hmac_kinds = _hmac_kinds(k, dtype, partials)
    for bound in (first, 2 * first, 4 * first, None):
        best: tuple[tuple[int, int], Cut, Terms, int] | None = None
        hmac_cuts = (
            cut
            for swapped, kind in product((True, False), hmac_kinds)
            for cut in _generate_cuts(m, k, n, kind, target, swapped=swapped)
        )
        for cut in chain(cuts, hmac_cuts):
            fastest = math.inf if best is None else best[0][0]
            if isinstance(cut.kind, HMAC) and least > fastest:
                break
            candidates = least_cycles(cut, dtype, target) <= fastest
            if bound is not None:
                candidates &= tile_bytes(cut, dtype, partials) <= bound
            if not candidates.any():
                continue
            cut = replace(cut, partitions=cut.partitions[:, candidates])
            terms = price(cut, dtype, partials, target)
            fits = terms.allowed if bound is None else terms.allowed & (terms.bytes <= bound)
            indices = np.flatnonzero(fits)
            if not indices.size:
                continue
            index = indices[np.lexsort((terms.bytes[indices], terms.cycles[indices]))[0]]
            key = (int(terms.cycles[index]), int(terms.bytes[index]))
            if best is None or key < best[0]:
                best = (key, cut, terms, int(index))
        if best is not None:
            break
    assert best is not None  # One tile alone is always allowed.
    _, cut, terms, place = best
    field_, out, in_ = cut.partitions[:, place].tolist()
    return DensePlan(
        m,
        k,
        n,
        dtype=dtype,
        partials=partials,
        swapped=cut.swapped,
        vertex=cut.kind,
        field=field_,
        out=out,
        in_=in_,
        serial_out=cut.serial_out,
        serial_in=cut.serial_in,
        broadcast_once=cut.once,
        terms={name: int(value[place]) for name, value in terms.terms.items() if value[place]},
        phases=int(terms.phases[place]),
        temporary_bytes=int(terms.bytes[place]),
        resident_bytes=resident,
        target=target,
    )


def dense_pass(
    name: str, target: Any, dtype: Any, params: FullyConnectedParams, **options: Any
) -> DensePlan:
    """The dense product of a pass for one group, on its share of the tiles.

    Options and errors as of `dense.plan`.
    """
    x, y = params.output_channels_per_group, params.input_channels_per_group
    z = params.batch_size
    shapes = {"forward": (x, y, z), "grad_input": (y, x, z), "grad_weight": (y, z, x)}
    share = target.with_(tiles=max(1, target.tiles // params.num_groups))
    return plan(*shapes[name], dtype, share, **options)


def dense_passes(
    target: Any, dtype: Any, params: FullyConnectedParams, options: Options
) -> dict[str, DensePlan]:
    """The dense products by pass name; errors as of `dense.plan`."""
    names = ["forward"]
    if options.do_grad_a_pass or options.do_grad_w_pass:
        # The gradient that grad_weight reads has the layout of grad_input.
        names.append("grad_input")
    if options.do_grad_w_pass:
        names.append("grad_weight")
    return {
        name: dense_pass(
            name,
            target,
            dtype,
            params,
            partials=options.partials_type,
            available_memory_proportion=options.available_memory_proportion,
        )
        for name in names
    }


class GradientPiece(NamedTuple):
    """Output channels [x0, x1) and input channels [y0, y1) of each group; `plan` is for the product
    [y1 - y0, batch] x [batch, x1 - x0]."""

    x0: int
    x1: int
    y0: int
    y1: int
    plan: DensePlan


def plan_gradient(plan: Plan, update: Update) -> list[GradientPiece]:
    """The pieces, in the order they are computed; they are cut at block edges.

    Their number is that of the planner's serial splits of the full product, doubled until each
    piece fits.

    Raises:
        ValueError: not even a piece of one block fits.
    """
    sizes = plan.sizes
    edges = plan.params.sparsity_params.block_dimensions
    blocks = sizes.x // edges[0], sizes.y // edges[1]
    try:
        full = _plan_piece(plan, update, sizes.x, sizes.y)
        splits = [1, full.serial_out] if full.swapped else [full.serial_out, 1]
    except ValueError:
        splits = [1, 1]
    while True:
        splits = [min(split, count) for split, count in zip(splits, blocks, strict=True)]
        each = [
            ceil_div(count, split) * edge
            for count, split, edge in zip(blocks, splits, edges, strict=True)
        ]
        try:
            return _cut_pieces(plan, update, each)
        except ValueError:
            room = [dim for dim in (0, 1) if splits[dim] < blocks[dim]]
            if not room:
                raise
            splits[max(room, key=lambda dim: each[dim])] *= 2


def _plan_piece(layer: Plan, update: Update, x: int, y: int) -> DensePlan:
    """The plan of one group's piece of x by y channels."""
    params = replace(layer.params, output_channels_per_group=x, input_channels_per_group=y)
    partials = update.partials_type
    return dense_pass(
        "grad_weight",
        layer.target,
        layer.dtype,
        params,
        partials=partials if partials.size >= layer.dtype.size else layer.dtype,
        available_memory_proportion=update.available_memory_proportion,
    )


def _cut_pieces(plan: Plan, update: Update, each: list[int]) -> list[GradientPiece]:
    sizes = plan.sizes
    pieces = []
    for x0, y0 in product(range(0, sizes.x, each[0]), range(0, sizes.y, each[1])):
        x1, y1 = min(x0 + each[0], sizes.x), min(y0 + each[1], sizes.y)
        piece = GradientPiece(x0, x1, y0, y1, _plan_piece(plan, update, x1 - x0, y1 - y0))
        _check_room(plan, update, piece)
        pieces.append(piece)
    return pieces


def _check_room(plan: Plan, update: Update, piece: GradientPiece) -> None:
    """Raise ValueError if a piece does not fit beside the weights, by the planners' figures."""
    target, size = plan.target, plan.dtype.size
    held = plan.buckets.words * 2 + plan.buckets.nz_elements * size * (1 + update.optimizer_slots)
    if plan.use_dense:
        weights = plan.sizes.groups * plan.sizes.x * plan.sizes.y
        held = ceil_div(weights, target.tiles) * size * (1 + update.optimizer_slots)
    operands = plan.sizes.groups * plan.sizes.z * (plan.sizes.x + plan.sizes.y)
    held += ceil_div(operands, target.tiles) * size
    blocks = (piece.x1 - piece.x0) * (piece.y1 - piece.y0) * plan.sizes.groups
    pooled = ceil_div(blocks, target.tiles) * size
    needed = held + pooled + piece.plan.resident_bytes + piece.plan.temporary_bytes
    if needed > target.bytes_per_tile:
        raise ValueError(
            f"the dense gradient of {piece.x1 - piece.x0} x {piece.y1 - piece.y0} weights needs "
            f"{needed:,} bytes a tile with the layer's own, {target.name} has "
            f"{target.bytes_per_tile:,}: use smaller sizes or more tiles"
        )
