"""The dense product on the same machine: how it would be cut over the tiles, and what it takes.

`plan(m, k, n, dtype, target)` finds, for C[m, n] = A[m, k] B[k, n], the cut that poplibs' planner
would choose: a 1x1 convolution in the matrix units (AMP) or by vector multiply-accumulate (HMAC),
split over the tiles in the streamed field, the out-channels and the in-channels, and in time
(serial splits). See section 7 of docs/popsparse-formulas.md; no constant is fitted.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np

from dynsparse.checks import check_integer
from dynsparse.typed import typed
from popsparse.machine import Target
from popsparse.planning.data_types import DataType, data_type, number
from popsparse.planning.dense_cost import Cut, Terms, least_cycles, price, tile_bytes
from popsparse.planning.dense_cycles import AMP, HMAC
from popsparse.planning.options import Options
from popsparse.planning.params import FullyConnectedParams
from popsparse.planning.parts import all_partitions, ceil_div, even_parts

_log = logging.getLogger("dynsparse.popsparse")


@dataclass(frozen=True)
class DensePlan:
    """The best cut of a dense product.

    Attributes:
        swapped: A is the stationary operand (its rows are the out-channels), the natural case.
        vertex: what multiplies on a tile; `method` is its name, e.g. "amp 16 units 16x16".
        field, out, in_: splits over tiles of the streamed columns, the out- and the in-channels.
        serial_out, serial_in: splits in time; at most one is above 1.
        broadcast_once: the streamed operand is brought to the tiles once, before the serial loop.
        terms: cycles by name as the planner counts them; they add up to `planned_cycles`.
        phases: bulk-synchronous steps, each of which costs the target's `sync_cycles`.
        temporary_bytes, resident_bytes: of a tile; resident are A, B and C.
        cycles: planned cycles and the synchronisation.
        seconds, tflops: at the target's clock; tflops counts 2 m k n.
    """

    m: int
    k: int
    n: int
    dtype: DataType
    partials: DataType
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
    memory_bound: int | None
    target: Any = dataclass_field(compare=False, repr=False)

    @property
    def method(self) -> str:
        return self.vertex.label()

    @property
    def tiles_used(self) -> int:
        return self.field * self.out * self.in_

    @property
    def planned_cycles(self) -> int:
        return sum(self.terms.values())

    @property
    def sync_cycles(self) -> float:
        return self.phases * self.target.sync_cycles

    @property
    def cycles(self) -> float:
        return self.planned_cycles + self.sync_cycles

    @property
    def seconds(self) -> float:
        return self.cycles / self.target.clock_hz

    @property
    def tflops(self) -> float:
        return 2 * self.m * self.k * self.n / self.seconds / 1e12

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


@typed
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
    """The best cut of a dense [m, k] x [k, n] product.

    Args:
        m, k, n: sizes.
        dtype: float16 or float32.
        target: a `popsparse.machine.Target`.
        partials: type of the partial sums, by default that of the data.
        available_memory_proportion: the part of a tile temporary data may take; when no cut fits,
            it is doubled twice, then dropped.

    Raises:
        ValueError: sizes below 1, partials narrower than the data, operands the machine's memory
            cannot hold.
        TypeError: sizes that are not integers.
    """
    m, k, n = (check_integer(name, v, 1) for v, name in ((m, "m"), (k, "k"), (n, "n")))
    kind = data_type(dtype)
    sums = kind if partials is None else data_type(partials, "partials")
    if sums.size < kind.size:
        raise ValueError(f"partials must be at least as wide as the data, got {sums} for {kind}")
    share = number(available_memory_proportion, "available_memory_proportion", 0.0, 1e6)
    return _plan(m, k, n, kind, sums, target, share)


@lru_cache(maxsize=512)
def _plan(
    m: int, k: int, n: int, dtype: DataType, partials: DataType, target: Any, share: float
) -> DensePlan:
    resident = ceil_div((m * k + k * n + m * n) * dtype.size, target.tiles)
    # Before the search, which takes the longer the more is wanted.
    if resident > target.bytes_per_tile:
        raise ValueError(
            f"a dense {m}x{k} by {k}x{n} product of {dtype} needs {resident:,} bytes a tile for "
            f"its operands alone, {target.name} has {target.bytes_per_tile:,}: take smaller sizes"
        )
    found = _search(m, k, n, dtype, partials, target, share, resident)
    cut = f"{found.field} x {found.out} x {found.in_} tiles, {found.method}"
    _log.info("planned dense %dx%d by %dx%d of %s: %s", m, k, k, n, dtype, cut)
    if resident + found.temporary_bytes > target.bytes_per_tile:
        raise ValueError(
            f"a dense {m}x{k} by {k}x{n} product of {dtype} needs "
            f"{resident + found.temporary_bytes} bytes a tile, the target has "
            f"{target.bytes_per_tile}: use smaller operands or more tiles"
        )
    return found


def _amp_kinds(dtype: DataType, partials: DataType, target: Any) -> list[AMP]:
    available = target.conv_units(dtype, partials)
    if dtype.size == 4:
        return [AMP(units, 8, units) for units in (16, 8) if units <= available]
    if partials.size == 4:
        return [AMP(8, 16, 8), AMP(8, 16, 16)]
    return [AMP(units, 16, units) for units in (16, 8) if units <= available]


def _hmac_kinds(channels: int, dtype: DataType, partials: DataType) -> list[HMAC]:
    step = 4 // dtype.size  # Half channels come in pairs.
    sizes = {ceil_div(channels, size): size for size in range(channels + step, step - 1, -step)}
    return [HMAC(size, 2 if partials.size == 2 else 1) for size in sizes.values()]


def _serial_splits(groups: int) -> list[int]:
    return [s for s in range(2, groups + 1) if even_parts(groups, s) == s]


@lru_cache(maxsize=64)
def _even(size: int, tiles: int) -> np.ndarray:
    """Which numbers of parts leave no part empty, bool [tiles + 1]."""
    parts = np.arange(1, tiles + 1)
    return np.append(False, even_parts(size, parts) == parts)


def _cuts(m: int, k: int, n: int, kind: AMP | HMAC, target: Any, *, swapped: bool) -> Iterator[Cut]:
    fields, outs = (n, m) if swapped else (m, n)
    out_groups, in_groups = ceil_div(outs, kind.out_channels), ceil_div(k, kind.in_channels)
    splits = [(1, 1)]
    if isinstance(kind, AMP):
        splits += [(s, 1) for s in _serial_splits(out_groups)]
        splits += [(1, s) for s in _serial_splits(in_groups)]
    tiles = target.tiles
    partitions = all_partitions(tiles)
    partitions = partitions[:, _even(fields, tiles)[partitions[0]]]
    for serial_out, serial_in in splits:
        kept = _even(ceil_div(out_groups, serial_out), tiles)[partitions[1]]
        kept &= _even(ceil_div(in_groups, serial_in), tiles)[partitions[2]]
        for once in (False, True) if serial_out > 1 else (False,):
            splits_of = (partitions[:, kept], serial_out, serial_in, once)
            yield Cut(kind, swapped, fields, outs, k, *splits_of)


def _hmac_cuts(
    m: int, k: int, n: int, dtype: DataType, partials: DataType, target: Any
) -> Iterator[Cut]:
    for swapped in (True, False):
        for kind in _hmac_kinds(k, dtype, partials):
            yield from _cuts(m, k, n, kind, target, swapped=swapped)


def _search(
    m: int,
    k: int,
    n: int,
    dtype: DataType,
    partials: DataType,
    target: Target,
    share: float,
    resident: int,
) -> DensePlan:
    first = int(target.bytes_per_tile * share)
    # HMAC is held to its peak by the planner: it cannot beat a product faster than that.
    least = m * k * n / (dtype.vector_width * target.tiles)
    # The likeliest first: what they take spares most of the others.
    cuts = [
        cut
        for swapped in (True, False)
        for kind in _amp_kinds(dtype, partials, target)
        for cut in _cuts(m, k, n, kind, target, swapped=swapped)
    ]
    cuts.sort(key=lambda cut: (not cut.swapped, cut.serial))
    for bound in (first, 2 * first, 4 * first, None):
        best: tuple[tuple[int, int], Cut, Terms, int] | None = None
        for cut in chain(cuts, _hmac_cuts(m, k, n, dtype, partials, target)):
            fastest = math.inf if best is None else best[0][0]
            if isinstance(cut.kind, HMAC) and least > fastest:
                break
            kept = least_cycles(cut, dtype, target) <= fastest
            if bound is not None:
                kept &= tile_bytes(cut, dtype, partials) <= bound
            if not kept.any():
                continue
            cut = replace(cut, partitions=cut.partitions[:, kept])
            terms = price(cut, dtype, partials, target)
            fits = terms.allowed if bound is None else terms.allowed & (terms.bytes <= bound)
            places = np.flatnonzero(fits)
            if not places.size:
                continue
            place = places[np.lexsort((terms.bytes[places], terms.cycles[places]))[0]]
            key = (int(terms.cycles[place]), int(terms.bytes[place]))
            if best is None or key < best[0]:
                best = (key, cut, terms, int(place))
        if best is not None:
            break
    assert best is not None  # One tile alone is always allowed.
    return _as_plan((m, k, n), dtype, partials, target, resident, bound, *best[1:])


def _as_plan(
    sizes: tuple[int, int, int],
    dtype: DataType,
    partials: DataType,
    target: Target,
    resident: int,
    bound: int | None,
    cut: Cut,
    terms: Terms,
    place: int,
) -> DensePlan:
    field_, out, in_ = cut.partitions[:, place].tolist()
    return DensePlan(
        *sizes,
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
        memory_bound=bound,
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
        # The gradient that grad_weight reads lies as grad_input wants it.
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
