"""The planner's estimate of grad_weight, for all partitions at once.

Terms of section 4.2 of docs/popsparse-formulas.md, quirks included (see `cost`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from popsparse.planning import bucket_sizes, tile_cycles, vertex_cycles
from popsparse.planning.cost import Buckets, TermArray
from popsparse.planning.exchange_cycles import ExchangeCost
from popsparse.planning.plan import Method
from popsparse.planning.propagation import expected_cycles
from popsparse.planning.space import SearchSpace

Array = Any


def grad_weight_terms(
    space: SearchSpace, buckets: Buckets, *, exchange_buckets: bool
) -> tuple[list[TermArray], Array]:
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
        -(-groups * n * nz // space.tiles) * g * gz * dtype.size for n, g in ((nx, gx), (ny, gy))
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

    cycles = vertex_cycles.zero_partials(values, workers) + pz * _multiply(space)
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


def _multiply(space: SearchSpace) -> Array:
    """The slowest worker's vertex for the part of the pattern met at one step over z."""
    _, _, pz = space.partitions
    tx, ty, tz = space.per_tile
    _, gx, gy, gz = space.grouping
    dtype, partials = space.dtype, space.options.partials_type
    workers, z = space.target.workers, tz * gz
    rows, columns = bucket_sizes.expected_groups(-(-tx // pz), ty, space.params.nz_ratio)
    if space.method is Method.BLOCK_AMP:
        return vertex_cycles.block_grad_weight_amp(
            rows, columns, z, (gx, gy), dtype, partials, workers
        )
    columns = np.maximum(columns, 1)
    total = rows * columns
    share = -(-total // workers)
    worst = np.zeros_like(total)
    for worker in range(workers):
        begin = worker * share
        end = np.minimum(total, begin + share)
        count = np.maximum(end - begin, 0)
        touched = -(-end // columns) - begin // columns
        if space.method is Method.ELEMENT:
            cycles = vertex_cycles.element_grad_weight(touched, count, z, dtype, workers)
        else:
            cycles = vertex_cycles.block_grad_weight(
                touched, count, z, (gx, gy), dtype, partials, workers
            )
        # An average over the rows, which the original takes for the rectangle's rows.
        averaged = -(-cycles // np.maximum(1, -(-count // columns)))
        worst = np.maximum(worst, np.where(count > 0, averaged, 0))
    return worst
