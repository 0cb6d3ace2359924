"""Cycles of the vertices of a dense product: matrix units, multiply-accumulate, reduction.

Vectorised over tile sizes: `field` elements streamed (`ft`), `in_groups` and `out_groups` of
channels on a tile. The formulas of poplibs' planner: sections 7.1, 7.2 and 7.4 of
docs/popsparse-formulas.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from popsparse.planning import cycles as tile_cycles
from popsparse.planning.params import DataType, ceil_div

Ints = Any


@dataclass(frozen=True)
class AMP:
    """The matrix units: `units` of them, channels grouped `in_channels` x `out_channels`."""

    units: int
    in_channels: int
    out_channels: int

    def label(self) -> str:
        return f"amp {self.units} units {self.in_channels}x{self.out_channels}"


@dataclass(frozen=True)
class HMAC:
    """Vector multiply-accumulate; any number of in-channels a group."""

    in_channels: int
    out_channels: int

    def label(self) -> str:
        return f"hmac {self.in_channels}x{self.out_channels}"


def _amp_call(
    elements: Ints, kind: AMP, dtype: DataType, partials: DataType, *, first: bool
) -> Ints:
    """One worker's share of one coefficient block; `first`: partials are written, not added to."""
    e = np.asarray(elements)
    long = np.maximum(e - 3, 0)
    z = int(first)
    if dtype.size == 2 and (kind.units == 16 or partials.size == 4):
        # State stays in the worker between blocks: 7 cycles less than a fresh start.
        by_e = (33 - z - 7, 42 - z - 7, 38 - z - 7 + 4 * long)
    elif dtype.size == 2:
        by_e = (39 + z * 4, 40 + z * 6, 41 + z * (2 + 2 * e) + 4 * long)
    else:
        clear = 8 if kind.units == 16 else 4
        by_e = (
            47 + z * (2 + clear),
            46 + z * (2 + 2 * clear),
            46 + z * (2 + clear * e) + 8 * long,
        )
    return np.select([e == 0, e == 1, e == 2], [0, by_e[0], by_e[1]], by_e[2])


def amp(
    field: Ints,
    in_groups: Ints,
    out_groups: Ints,
    kind: AMP,
    dtype: DataType,
    partials: DataType,
    workers: int,
    load_bytes: int,
) -> Ints:
    """The 1x1 vertex: for each pair of groups a coefficient load, then all workers stream."""

    def inner(*, first: bool) -> Ints:
        more = _amp_call(ceil_div(field, workers), kind, dtype, partials, first=first)
        less = _amp_call(np.asarray(field) // workers, kind, dtype, partials, first=first)
        # Two elements take longer than three: the loop is set up for at least three.
        slow, quick = np.maximum(more, less), np.minimum(more, less)
        return np.maximum(workers * slow, workers * quick + 14)

    load = kind.units * 32 // load_bytes
    passes = -(-kind.out_channels // kind.units)
    retained = dtype.size == 2 and (kind.units == 16 or partials.size == 4)
    c = int(retained or partials.size == 4)
    kept = 7 + 3 * (in_groups - 1) if retained else 0
    later = 16 - c + out_groups * (19 + passes * (6 + load + inner(first=False)))
    once = 11 + out_groups * (19 - c + passes * (7 + load + inner(first=True)))
    return 50 + workers * kept + 12 + c + (in_groups - 1) * later + once


def hmac(
    field: Ints,
    in_groups: Ints,
    out_groups: Ints,
    kind: HMAC,
    dtype: DataType,
    partials: DataType,
    workers: int,
    *,
    zeroing: bool = True,
) -> Ints:
    """A dot product over the in-channels of a group for each field element and out-channel."""
    width = dtype.vector_width
    half = dtype.size == partials.size == 2
    single = dtype.size == 2 and partials.size == 4
    dot = (7 if half else 3) + 4 + -(-kind.in_channels // width) - (dtype.size == 2)
    e = ceil_div(field, workers)
    saved = 15 if single else 6 if half else 0
    if single and kind.out_channels == 1:
        work = 16 - 15 + 13 + 1 + e * (2 + dot)
    else:
        work = 16 - saved + (13 if single else 19) + e * (7 + dot)
    work = workers * (work + 16)
    start = (65 if dtype.size == 2 else 58) - (10 if single else 0)
    start += workers * (10 if half else 9) + workers * saved + 23
    total = start + in_groups * (15 + out_groups * (10 + work))
    if not zeroing:
        return total
    clear = workers * out_groups * (ceil_div(ceil_div(field * kind.out_channels, workers), 2) + 5)
    return total + np.where(single & (np.asarray(in_groups) == 1), 0, clear)


@lru_cache(maxsize=4096)
def _best_depth(depth: int, stages: int) -> tuple[float, tuple[int, ...]]:
    if stages == 1:
        return float(depth), ()
    low = int(depth ** ((stages - 1) / stages))
    options = []
    for middle in (low + 1, low):
        cost, rest = _best_depth(middle, stages - 1)
        options.append((depth / middle + cost, (middle, *rest)))
    return options[0] if options[0][0] <= options[1][0] else options[1]


def reduction_depths(depth: int) -> tuple[int, ...]:
    """Depths left after each stage but the last of a reduction over `depth` partials."""
    stages = 1 if depth < 16 else 2 if depth < 125 else 3
    return _best_depth(depth, stages)[1]


def reduce_stage(
    outputs: Ints,
    depth: Ints,
    partials: DataType,
    result: DataType,
    workers: int,
    tile_bytes: int,
) -> Ints:
    """One stage: `depth` partials into each of `outputs`."""
    outputs, depth = np.asarray(outputs), np.asarray(depth)
    width = 2 * partials.vector_width
    received = (depth - 1) * outputs * partials.size
    fits = ceil_div(received, 16384) * 16384 < tile_bytes // 16
    store = {(4, 4): 8, (4, 2): 7, (2, 4): 10, (2, 2): 9}[partials.size, result.size]
    joined = 33 + workers * (20 + (2 * (depth - 1) + store) * ceil_div(outputs // width, workers))
    split = tile_cycles.reduce(outputs, depth, partials, result, workers)
    return np.where((outputs % width == 0) & fits, joined, split)


def dynamic_slice(elements: Ints, dtype: DataType, workers: int) -> Ints:
    """Taking or writing back a slice of so many elements on each tile."""
    return 25 + workers * (63 + 2 * (ceil_div(elements, workers) // dtype.vector_width))


def add_in_place(elements: Ints, dtype: DataType, workers: int) -> Ints:
    """Adding so many elements to what earlier steps made."""
    return 11 + workers * (58 + 3 * ceil_div(ceil_div(elements, workers), dtype.vector_width))


def rearrange(held: Ints, dtype: DataType, copy_bytes: int, *, odd: bool) -> Ints:
    """Bringing the `held` bytes on a tile into groups of channels, one element at a time; `odd`:
    the channels are no whole vectors."""
    return ceil_div(5 * held, (3 if odd else 4) * min(copy_bytes, dtype.size))


def regroup(held: Ints, kind: AMP | HMAC, dtype: DataType, copy_bytes: int) -> Ints:
    """Bringing `held` bytes from the vertex's groups of out-channels into those of the result."""
    return ceil_div(5 * held, 4 * min(copy_bytes, kind.out_channels * dtype.size))
