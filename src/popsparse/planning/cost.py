"""The planner's estimate of forward and grad_input, for all partitions at once.

The terms are those of section 4.1 of docs/popsparse-formulas.md, quirks included: they
choose the plans the original chose. How long a plan really takes is the business of
`timing.model`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from popsparse.planning import bucket_sizes, tile_cycles, vertex_cycles
from popsparse.planning.exchange_cycles import ExchangeCost
from popsparse.planning.plan import Method
from popsparse.planning.propagation import expected_cycles
from popsparse.planning.space import SearchSpace
from popsparse.planning.vertex_cycles import Search
from popsparse.planning.work_split import grid_splits

Array = Any


class TermArray(NamedTuple):
    """A term of the estimate for each partition."""

    name: str
    cycles: Array
    temporary_bytes: Array


@dataclass(frozen=True)
class Buckets:
    """Bucket sizes for each partition."""

    groups: Array
    area: int
    forward_words: Array
    grad_input_words: Array
    """Of grad_input's own buckets, or the forward words again when they are shared."""

    def bytes(self, words: Array, value_size: int) -> Array:
        return self.groups * self.area * value_size + 2 * words


def bucket_arrays(space: SearchSpace) -> Buckets:
    options, ratio = space.options, space.params.nz_ratio
    oversize = options.meta_info_bucket_oversize_proportion
    rate = space.target.exchange_bytes_per_cycle
    _, nx, ny, _ = space.groups
    total = space.params.num_groups * int(bucket_sizes.ceil_fraction(nx * ny, ratio))
    area = space.grouping.x * space.grouping.y
    held = bucket_sizes.groups_per_bucket(total, space.tiles, oversize, area, space.dtype, rate)
    tx, ty, _ = space.per_tile
    common = (tx, ty, ratio, oversize, space.target.workers, rate)
    block = space.method is not Method.ELEMENT
    forward = bucket_sizes.meta_info_words(*common, block=block, grad_weight=options.do_grad_w_pass)
    shared = block or options.shared_buckets
    own = forward if shared else bucket_sizes.own_grad_input_words(*common)
    return Buckets(held, area, forward, own)


class _View(NamedTuple):
    """Forward's dimensions, or grad_input's: the same with x and y exchanged."""

    px: Array
    py: Array
    tx: Array
    ty: Array
    ny: int
    gx: int
    gy: int
    input_sharing: Array
    """Neighbouring tiles that receive the same part of the dense operand."""


def _view(space: SearchSpace, *, grad_input: bool) -> _View:
    px, py, pz = space.partitions
    tx, ty, _ = space.per_tile
    _, nx, ny, _ = space.groups
    _, gx, gy, _ = space.grouping
    if not grad_input:
        return _View(px, py, tx, ty, ny, gx, gy, px)
    return _View(py, px, ty, tx, nx, gy, gx, np.where((pz == 1) & (px == 1), py, 1))


def product_terms(
    space: SearchSpace, buckets: Buckets, *, grad_input: bool
) -> tuple[list[TermArray], Array]:
    """The terms of forward or of grad_input, and the pass's temporary bytes."""
    v = _view(space, grad_input=grad_input)
    pz, tz = space.partitions[2], space.per_tile[2]
    gz, size = space.grouping.z, space.dtype.size
    dtype, partials = space.dtype, space.options.partials_type
    workers, exchange = space.target.workers, ExchangeCost(space.target)
    words = buckets.grad_input_words if grad_input else buckets.forward_words
    bucket = buckets.bytes(words, size)
    terms = []

    turned: Array = 0
    if grad_input and v.gx > 1 and v.gy > 1:
        turned = buckets.groups * buckets.area * size
        edge = vertex_cycles.kernel_edge((v.gx, v.gy), dtype)
        turn = tile_cycles.transpose_blocks(buckets.groups, edge, edge, dtype, workers)
        terms.append(TermArray("transpose buckets", turn, turned))

    home = -(-space.params.num_groups * v.ny * space.groups.z // space.tiles) * v.gy * gz * size
    needed = v.ty * tz * v.gy * gz * size
    dense = np.where(needed > home, needed, 0)
    moved = np.where(pz > 1, pz * bucket, 0)
    bucket_sharing = np.where(space.partitions[0] == 1, pz, 1)
    cycles = exchange.broadcast(dense, v.input_sharing, space.tiles)
    cycles = cycles + exchange.broadcast(moved, bucket_sharing, space.tiles)
    gathered = dense + (pz - 1) * bucket
    terms.append(TermArray("distribution exchange", cycles, gathered + turned))

    results = v.tx * tz * v.gx * gz
    cast = dtype is not partials
    # The original asks here for partitions of z where it means those of y.
    held = np.where(cast | (pz > 1), results * partials.size, 0)
    cycles = vertex_cycles.zero_partials(results, workers)
    cycles = cycles + _multiply(space, grad_input=grad_input)
    terms.append(TermArray("distribution compute", cycles, gathered + held + turned))
    none = np.zeros_like(pz)
    spilling = none
    if space.options.price_propagation:
        kind = "grad_input" if grad_input else "forward"
        spilling = expected_cycles(space, buckets.groups, words, bucket, kind=kind)
    terms.append(TermArray("propagation", spilling, 2 * bucket + dense + held + turned))

    sent = np.where(v.py > 1, results * partials.size, 0)
    terms.append(TermArray("reduction exchange", exchange(sent), held + sent))
    outputs = -(-results // v.py)
    alone = tile_cycles.cast(outputs, partials, dtype, workers) if cast else 0
    cycles = np.where(v.py > 1, tile_cycles.reduce(outputs, v.py, partials, dtype, workers), alone)
    stored = np.where(cast | (v.py > 1), outputs * size, 0)
    terms.append(TermArray("reduction or cast", cycles, held + sent + stored))
    return terms, np.maximum.reduce([t.temporary_bytes + none for t in terms])


def _multiply(space: SearchSpace, *, grad_input: bool) -> Array:
    """The slowest worker's vertex, with every bucket of the z partitions matching once."""
    pz = space.partitions[2]
    tx, ty, tz = space.per_tile
    _, gx, gy, gz = space.grouping
    dtype, workers = space.dtype, space.target.workers
    search = Search(pz, pz)
    ratio, shared = space.params.nz_ratio, space.options.shared_buckets
    if space.method is Method.ELEMENT:
        if grad_input and shared:
            # Rows of the transposed product are counted like columns of the forward one.
            rows, columns = bucket_sizes.expected_groups(ty, tx, ratio)
            return vertex_cycles.element_transposed(columns, ty, tz * gz, dtype, workers, search)
        rows, columns = bucket_sizes.expected_groups(*((ty, tx) if grad_input else (tx, ty)), ratio)
        x, z = grid_splits(rows, tz, workers)
        formula = vertex_cycles.element_grad_input if grad_input else vertex_cycles.element_forward
        return formula(x, columns, z * gz, dtype, workers, search).max(axis=0)
    rows, columns = bucket_sizes.expected_groups(*((ty, tx) if grad_input else (tx, ty)), ratio)
    if grad_input:
        rows, columns = columns, rows
    _, z = grid_splits(np.ones_like(tz), tz, workers)
    partials = space.options.partials_type
    units = space.target.conv_units(dtype, partials)
    return vertex_cycles.block_forward(
        rows,
        columns,
        z * gz,
        (gx, gy),
        dtype,
        partials,
        units,
        workers,
        search,
        retain=not grad_input,
    ).max(axis=0)
