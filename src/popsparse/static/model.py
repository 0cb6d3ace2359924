"""How long a static plan takes on its pattern.

The planner reckons with a random pattern of the same density; here the blocks, rows and columns of
every tile are counted. Steps are those of the device program. No constant is fitted.
"""

from __future__ import annotations

import math

import numpy as np

from popsparse.planning.parts import ceil_div
from popsparse.static import cycles as static_cycles
from popsparse.static.layout import Pieces, StaticPlan
from popsparse.timing.model import PassTime, Step


def predict(plan: StaticPlan) -> PassTime:
    """The time of the product on the plan's target.

    A superstep is a synchronisation, an exchange and the vertices after it. Of what a tile has
    already, only the launch of its copy is counted.
    """
    target, sums = plan.target, plan.sums
    rate = target.exchange_bytes_per_cycle
    launch = target.local_copy_cycles
    steps = []
    if plan.pattern.nnz:
        moved = max(float(_gather(plan, part).max()) for part in range(plan.n_split))
        # A tile sends its share of the operand once, however many want it.
        moved = max(moved, _share_bytes(plan) / rate)
        steps.append(Step("gather operands", launch, math.ceil(moved), 1))
        compute = max(float(compute_cycles(plan, part).max()) for part in range(plan.n_split))
        steps.append(Step("multiply", compute, 0.0, 0))
        busiest = max(sums.received_bytes(plan).max(), _most_sent(plan))
        steps.append(Step("exchange partials", launch, math.ceil(busiest / rate), 1))
    reduced = float(reduce_cycles(plan).max())
    if reduced:
        steps.append(Step("reduce", reduced, 0.0, 0))
    if len(sums.spread):
        moved = float(sums.moved_bytes(plan).max())
        steps.append(Step("move sums", launch, math.ceil(moved / rate), 1))
    syncs = sum(step.syncs for step in steps) * target.sync_cycles
    return PassTime(tuple(steps), syncs, 0, target.clock_hz, plan.products)


def _gather(plan: StaticPlan, part: int) -> np.ndarray:
    """Exchange cycles of each piece for what it receives: the dense columns it needs, and with n
    split its values."""
    pieces, target, size = plan.pieces(part), plan.target, plan.dtype.size
    block = plan.pattern.block_size
    bytes_ = plan.n_parts[part].size * block * size
    common = _common_columns(plan, part, pieces) * bytes_
    fragments = column_fragments(plan, pieces)
    received = pieces.columns * bytes_
    if plan.n_split > 1:
        received = received + pieces.blocks * block * block * size
        fragments = fragments + 1
    payload = (received - common / 2) / target.exchange_bytes_per_cycle
    return np.maximum(payload, fragments * target.exchange_fragment_cycles)


def column_fragments(plan: StaticPlan, pieces: Pieces) -> np.ndarray:
    """In how many stretches the columns of each piece lie: with n whole, neighbours are one."""
    if plan.n_split > 1:
        return pieces.columns
    column = plan.column_order[pieces.column]
    new = np.append(True, (np.diff(column) != 1) | (np.diff(pieces.column_piece) != 0))
    return np.bincount(pieces.column_piece, new, len(pieces))


def _common_columns(plan: StaticPlan, part: int, pieces: Pieces) -> np.ndarray:
    """Columns that a piece's neighbour on the same bus receives too."""
    bus = plan.target.exchange_bus_tiles
    tile = plan.tile_parts[part].begin + pieces.tile[pieces.column_piece]
    keys = tile // bus * plan.pattern.grid[1] + pieces.column
    _, place, times = np.unique(keys, return_inverse=True, return_counts=True)
    return np.bincount(pieces.column_piece, times[place] > 1, len(pieces))


def compute_cycles(plan: StaticPlan, part: int) -> np.ndarray:
    """Cycles of the product's vertex on each tile of a part of n: [pieces]."""
    pieces, n = plan.pieces(part), plan.n_parts[part].size
    block, workers = plan.pattern.block_size, plan.target.workers
    if block > 1:
        clear = static_cycles.zero(pieces.rows, n, block, plan.dtype, workers)
        return clear + static_cycles.block_product(
            pieces.rows, pieces.blocks, n, block, plan.dtype, workers
        )
    slowest = np.zeros(len(pieces))
    # Few rows: two workers share one, each with half of the columns.
    for halves in (1, 2):
        few = (pieces.rows <= workers // 2) if n % 8 == 0 else np.zeros(len(pieces), bool)
        chosen = few if halves == 2 else ~few
        if not chosen.any():
            continue
        rows, nz = _busiest(pieces, workers // halves, single=halves == 1)
        vector = plan.dtype.vector_width
        columns = ceil_div(n // vector, halves) * vector
        cycles = static_cycles.element_product(rows, nz, columns, plan.dtype).max(axis=1)
        slowest[chosen] = workers * cycles[chosen]
    return slowest


def _busiest(pieces: Pieces, workers: int, *, single: bool) -> tuple[np.ndarray, np.ndarray]:
    """Rows and elements of every worker, [pieces, workers]: rows in order, cut where a worker has
    its even share; a row each where there are no more rows than workers."""
    count = len(pieces)
    length = np.bincount(pieces.block_row, minlength=len(pieces.row))
    first = np.cumsum(pieces.rows) - pieces.rows
    rows = np.zeros((count, workers), np.int64)
    nz = np.zeros((count, workers), np.int64)
    at, end = first.copy(), first + pieces.rows
    before = np.append(0, np.cumsum(length))
    total = before[end] - before[first]
    # A worker goes on until it has its share, so it ends with the row in which it gets it.
    goal = -(-total // workers)
    for worker in range(workers):
        stop = np.searchsorted(before, before[at] + goal)
        stop = np.where(at < end, np.minimum(np.maximum(stop, at + 1), end), at)
        if single:
            stop = np.where(pieces.rows <= workers, np.minimum(at + 1, end), stop)
        rows[:, worker] = stop - at
        nz[:, worker] = before[stop] - before[at]
        at = stop
    return rows, nz


def _share_bytes(plan: StaticPlan) -> int:
    """Bytes of a tile's share of the dense operand, and of the values where parts of n share
    them."""
    sent = plan.params.k * plan.n_padded
    if plan.n_split > 1:
        sent += plan.pattern.nnz * plan.pattern.block_size**2
    return ceil_div(sent, plan.target.tiles) * plan.dtype.size


def _most_sent(plan: StaticPlan) -> int:
    """Bytes of partial sums that leave the tile with most of them."""
    size = plan.pattern.block_size * plan.dtype.size
    return max(
        int(plan.pieces(part).rows.max(initial=0)) * n.size * size
        for part, n in enumerate(plan.n_parts)
    )


def reduce_cycles(plan: StaticPlan) -> np.ndarray:
    """Cycles of adding up on every tile: [tiles]. An output with one partial sum needs none."""
    sums = plan.sums
    return sums.cycles(plan, sums.at_home) + sums.cycles(plan, ~sums.at_home)
