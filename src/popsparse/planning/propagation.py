"""What propagation is expected to cost, before any pattern is known.

The original prices it at nothing, and with few blocks a bucket its plans are a lottery: capacity
is a rounded number of blocks, and whether the fullest of all rectangles exceeds it decides between
no propagation and dozens of steps. Here the non-zeros of a rectangle are a binomial variable; the
tail beyond the capacity of its buckets, over all rectangles, gives the chance that anything
spills, and the excess of the fullest rectangle over its neighbours' room how far it has to travel
(section 4.3 of docs/popsparse-formulas.md).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.special import bdtrc

from popsparse.planning import bucket_sizes, vertex_cycles
from popsparse.planning.control_cycles import LOOP_CONTROL, LOOP_STEPS
from popsparse.planning.exchange_cycles import ExchangeCost
from popsparse.planning.plan import Method
from popsparse.planning.space import SearchSpace
from popsparse.planning.words import ROW_ENTRY, header_words

Array = Any


def _capacity(space: SearchSpace, groups: Array, words: Array) -> Array:
    """Elements or blocks that fit a bucket, by values and by meta-info."""
    tx, ty, _ = space.per_tile
    workers, grad_weight = space.target.workers, space.options.do_grad_w_pass
    element = space.method is Method.ELEMENT
    fixed = header_words(workers, workers if grad_weight else None, element=element)
    _, columns = bucket_sizes.expected_groups(tx, ty, space.params.nz_ratio)
    columns = np.maximum(columns, 1)
    # A row costs its entry besides a word for each non-zero; a piece may cut two rows short.
    by_words = (words - 1 - fixed - 2 * ROW_ENTRY) * columns // (columns + ROW_ENTRY)
    return np.maximum(0, np.minimum(groups, by_words))


def expected_steps(space: SearchSpace, groups: Array, words: Array) -> tuple[Array, Array]:
    """Expected propagation steps for each partition, and the excess of the fullest rectangle.

    Args:
        groups: elements or blocks a bucket has room for.
        words: meta-info words of a bucket.
    """
    px, py, pz = space.partitions
    tx, ty, _ = space.per_tile
    ratio = space.params.nz_ratio
    rectangles = px * py * space.params.num_groups
    # Blocks that the plan cuts up come and go together.
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


def expected_cycles(
    space: SearchSpace, groups: Array, words: Array, bucket_bytes: Array, *, kind: str
) -> Array:
    """Expected cycles of the propagation phase of "forward", "grad_input" or "grad_weight"."""
    steps, excess = expected_steps(space, groups, words)
    tx, ty, tz = space.per_tile
    gx, gy, gz = space.grouping[1:]
    dtype, partials = space.dtype, space.options.partials_type
    workers = space.target.workers
    _, columns = bucket_sizes.expected_groups(tx, ty, space.params.nz_ratio)
    # Whole rows move, as far as a bucket has room.
    count = np.clip(np.ceil(excess), np.maximum(columns, 1), np.maximum(groups, 1)).astype(np.int64)
    if kind == "grad_weight":
        z = tz * gz
        if space.method is Method.ELEMENT:
            compute = vertex_cycles.element_grad_weight(1, count, z, dtype, workers)
        else:
            compute = vertex_cycles.block_grad_weight(
                1, count, z, (gx, gy), dtype, partials, workers
            )
        compute = compute // workers
    elif space.method is Method.ELEMENT:
        compute = vertex_cycles.element_forward(1, count, -(-tz // workers) * gz, dtype, workers)
    else:
        units = space.target.conv_units(dtype, partials)
        z = -(-tz // workers) * gz
        compute = vertex_cycles.block_forward(
            1, count, z, (gx, gy), dtype, partials, units, workers
        )
    turn = compute + ExchangeCost(space.target)(bucket_bytes)
    turn = turn + LOOP_STEPS * space.target.sync_cycles + LOOP_CONTROL * workers
    return np.ceil(steps * turn).astype(np.int64)
