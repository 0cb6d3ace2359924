"""The cost terms of a dense product, for many cuts at once.

See section 7.3 of docs/popsparse-formulas.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from popsparse.planning import tile_cycles
from popsparse.planning.data_types import DataType
from popsparse.planning.dense_cycles import (
    AMP,
    HMAC,
    add_in_place,
    amp,
    dynamic_slice,
    hmac,
    rearrange,
    reduce_stage,
    reduction_depths,
    regroup,
)
from popsparse.planning.exchange_cycles import ExchangeCost
from popsparse.planning.parts import ceil_div

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


@dataclass(frozen=True)
class Terms:
    """Cycles of each term over the whole product, and what else the search compares."""

    terms: dict[str, Array]
    cycles: Array
    bytes: Array
    phases: Array
    allowed: Array


def tile_bytes(cut: Cut, dtype: DataType, partials: DataType) -> Array:
    """Operands and partials of one vertex: no partition needs less temporary memory."""
    streamed, held, results = _sizes(cut)[3:]
    return (held + streamed) * dtype.size + results * partials.size


def _sizes(cut: Cut) -> tuple[Array, ...]:
    """Of the fullest tile: field elements, in- and out-groups; elements streamed, held, made."""
    f, o, i = cut.partitions
    kind = cut.kind
    ft = -(-cut.fields // f)
    ig = -(-ceil_div(cut.channels, kind.in_channels) // (i * cut.serial_in))
    og = -(-ceil_div(cut.outs, kind.out_channels) // (o * cut.serial_out))
    streamed = ft * ig * kind.in_channels
    held = ig * kind.in_channels * og * kind.out_channels
    return ft, ig, og, streamed, held, ft * og * kind.out_channels


def least_cycles(cut: Cut, dtype: DataType, target: Any) -> Array:
    """What each partition cannot beat: the peak rate, and the rearrangement of operands."""
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


def _transform(elements: int, tiles: Array, dtype: DataType, copy_bytes: int, *, odd: bool) -> Any:
    """Bytes a tile holds of an operand to be rearranged, and the cycles of copying them."""
    held = -(-elements * dtype.size // tiles)
    return held, rearrange(held, dtype, copy_bytes, odd=odd)


def _reduction(
    parts: Array, depth: Array, partials: DataType, result: DataType, target: Any
) -> tuple[Array, Array, Array]:
    """Compute cycles, exchange cycles of the later stages and the number of stages."""
    compute, moved, stages = (np.zeros_like(parts) for _ in range(3))
    exchange = ExchangeCost(target)
    common = (target.workers, target.bytes_per_tile)
    for d in np.unique(depth).tolist():
        at = depth == d
        if d == 1:
            if partials is not result:
                compute[at] = tile_cycles.cast(parts[at], partials, result, target.workers)
            continue
        left, outputs = d, -(-parts[at] // d) * d
        middle = reduction_depths(d)
        for wanted in middle:
            step = ceil_div(left, wanted)
            outputs, left = -(-outputs // step), ceil_div(left, step)
            compute[at] += reduce_stage(outputs, step, partials, partials, *common)
            moved[at] += exchange(outputs * partials.size)
        outputs = -(-outputs // left)
        compute[at] += reduce_stage(outputs, left, partials, result, *common)
        stages[at] = len(middle) + 1
    return compute, moved, stages


def price(cut: Cut, dtype: DataType, partials: DataType, target: Any) -> Terms:
    """Price every partition of a cut. Nothing overlaps; synchronisation is not a term."""
    f, o, i = cut.partitions
    kind, serial = cut.kind, cut.serial
    size, width, workers = dtype.size, dtype.vector_width, target.workers
    exchange, copy = ExchangeCost(target), int(target.memcpy_bytes_per_cycle)
    used = f * o * i
    ft, ig, og, streamed, held, results = _sizes(cut)

    terms: dict[str, Array] = {}
    shared = np.where(o % target.exchange_bus_tiles == 0, target.exchange_bus_tiles, 1)
    arriving = (streamed - streamed // o) * size
    field_exchange = -(-arriving * 16 // (exchange.rate * shared))
    terms["coefficient exchange"] = exchange((held - held // f) * size)
    terms["partial exchange"] = exchange(results * partials.size)
    if isinstance(kind, AMP):
        compute = amp(
            ft, ig, og, kind, dtype, partials, workers, target.coefficient_load_bytes_per_cycle
        )
        allowed = np.ones(ft.shape, bool)
    else:
        compute = hmac(ft, ig, og, kind, dtype, partials, workers)
        # The planner does not believe in more than a vector of products a cycle.
        allowed = cut.fields * cut.outs * cut.channels <= width * used * compute * serial
    terms["compute"] = compute
    result = partials if cut.serial_in > 1 else dtype
    reduce_cycles, later, stages = _reduction(results, i, partials, result, target)
    terms["reduction exchange"], terms["reduction"] = later, reduce_cycles

    odd_in = bool(cut.channels % width or cut.outs % width)
    padded_in = cut.channels % kind.in_channels != 0
    padded_out = cut.outs % kind.out_channels != 0
    none = np.zeros_like(used)
    moved: list[Array] = [none, none, none]  # Of field operand, coefficients and output.
    field_transform = none
    if not cut.swapped or padded_in:
        moved[0], cycles = _transform(
            cut.fields * cut.channels, used, dtype, copy, odd=bool(cut.channels % width)
        )
        field_transform = cycles + exchange(moved[0])
    if not cut.swapped or padded_in or padded_out:
        moved[1], cycles = _transform(cut.outs * cut.channels, used, dtype, copy, odd=odd_in)
        terms["coefficient rearrangement"] = cycles + exchange(moved[1])
    if not cut.swapped or padded_out:
        moved[2], cycles = _transform(
            cut.fields * cut.outs, used, dtype, copy, odd=bool(cut.outs % width)
        )
        terms["output rearrangement"] = cycles + exchange(moved[2])
    elif kind.out_channels != 4 * width:
        moved[2] = -(-cut.fields * cut.outs * size // used)
        terms["output regrouping"] = regroup(moved[2], kind, dtype, copy)

    if serial > 1:
        slices = dynamic_slice(-(-cut.outs * cut.channels // used) // serial, dtype, workers)
        if cut.serial_in > 1:
            slices = slices + dynamic_slice(
                -(-cut.fields * cut.channels // used) // serial, dtype, workers
            )
            slices = slices + add_in_place(-(-results // i), dtype, workers)
        else:
            slices = slices + dynamic_slice(
                -(-cut.fields * cut.outs // used) // serial, dtype, workers
            )
        terms["serial slices"] = slices
    terms = {name: serial * value for name, value in terms.items()}
    repeats = 1 if cut.once else serial
    terms["field exchange"] = repeats * field_exchange
    terms["field rearrangement"] = repeats * field_transform
    if cut.serial_in > 1 and partials is not dtype:
        terms["final cast"] = tile_cycles.cast(-(-results // i), partials, dtype, workers)

    working = held * size + results * partials.size + (0 if cut.once else streamed * size)
    reduce_bytes = np.where(stages > 1, -(-results // i) * i * partials.size, 0)
    bytes_ = np.maximum.reduce([2 * np.maximum.reduce(moved), working, reduce_bytes])
    if cut.once:
        bytes_ = bytes_ + streamed * size + moved[0]
    if cut.serial_in > 1:
        bytes_ = bytes_ + -(-results // i) * partials.size
    phases = serial * (1 + stages + (2 if serial > 1 else 0)) + int(cut.once)
    return Terms(terms, sum(terms.values()), bytes_, phases, allowed)
