"""Time and memory of a static plan.

The planner assumes a random pattern of the same density; this module counts the blocks, rows and
columns of every tile. Steps are those of the device program. No constant is fitted.

Code is counted, not a flat allowance: vertices, stacks, control code and the instructions that send
and receive, most of them for sums in many small pieces. See docs/popsparse-fidelity.md.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from popsparse.machine import target as facts
from popsparse.machine.intervals import equal_runs, offsets_of
from popsparse.machine.memory import REAL_TILE
from popsparse.planning import static as static_cycles
from popsparse.planning.params import ceil_div
from popsparse.planning.plan import TileMemory
from popsparse.planning.static_layout import Pieces, StaticPlan, work_list_words
from popsparse.timing import PassTime, Step


def predict(plan: StaticPlan) -> PassTime:
    """The time of the product on the plan's target.

    A superstep is a synchronisation, an exchange and the vertices after it. For data that a tile
    already has, only the launch of the copy is counted.
    """
    target, sums = plan.target, plan.sums
    rate = target.exchange_bytes_per_cycle
    launch = target.local_copy_cycles
    steps = []
    if plan.pattern.nnz:
        moved = max(float(_gather_cycles(plan, part).max()) for part in range(plan.n_split))
        # A tile sends its share of the operand once, however many tiles receive it.
        moved = max(moved, _share_bytes(plan) / rate)
        steps.append(Step("gather operands", launch, math.ceil(moved), 1))
        compute = max(float(compute_cycles(plan, part).max()) for part in range(plan.n_split))
        steps.append(Step("multiply", compute, 0.0, 0))
        busiest = max(sums.received_bytes(plan).max(), _most_sent_bytes(plan))
        steps.append(Step("exchange partials", launch, math.ceil(busiest / rate), 1))
    reduced = float(reduce_cycles(plan).max())
    if reduced:
        steps.append(Step("reduce", reduced, 0.0, 0))
    if len(sums.spread):
        moved = float(sums.moved_bytes(plan).max())
        steps.append(Step("move sums", launch, math.ceil(moved / rate), 1))
    syncs = sum(step.syncs for step in steps) * target.sync_cycles
    return PassTime(tuple(steps), syncs, 0, target.clock_hz, plan.products)


def _gather_cycles(plan: StaticPlan, part: int) -> np.ndarray:
    """Exchange cycles of each piece to receive the dense columns it needs and, if n is split, its
    values."""
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
    """Number of contiguous stretches of each piece's columns; with n uncut, neighbours join."""
    if plan.n_split > 1:
        return pieces.columns
    column = plan.column_order[pieces.column]
    first = equal_runs(column - np.arange(len(column)), pieces.column_piece).starts
    return np.bincount(pieces.column_piece[first], minlength=len(pieces))


def _common_columns(plan: StaticPlan, part: int, pieces: Pieces) -> np.ndarray:
    """Columns that a piece's neighbour on the same bus receives too."""
    bus = plan.target.exchange_bus_tiles
    tile = plan.tile_parts[part].begin + pieces.tile[pieces.column_piece]
    keys = tile // bus * plan.pattern.grid[1] + pieces.column
    _, inverse, times = np.unique(keys, return_inverse=True, return_counts=True)
    return np.bincount(pieces.column_piece, times[inverse] > 1, len(pieces))


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
        rows, nz = _worker_loads(pieces, workers // halves, single=halves == 1)
        vector = plan.dtype.vector_width
        columns = ceil_div(n // vector, halves) * vector
        cycles = static_cycles.element_product(rows, nz, columns, plan.dtype).max(axis=1)
        slowest[chosen] = workers * cycles[chosen]
    return slowest


def _worker_loads(pieces: Pieces, workers: int, *, single: bool) -> tuple[np.ndarray, np.ndarray]:
    """Rows and elements of every worker, [pieces, workers]: rows in order, cut where a worker has
    its even share; one row each if there are no more rows than workers."""
    count = len(pieces)
    length = np.bincount(pieces.block_row, minlength=len(pieces.row))
    first = np.cumsum(pieces.rows) - pieces.rows
    rows = np.zeros((count, workers), np.int64)
    nz = np.zeros((count, workers), np.int64)
    at, end = first.copy(), first + pieces.rows
    before = offsets_of(length)
    total = before[end] - before[first]
    # A worker takes rows until it has its share, so its last row is the one that completes it.
    goal = ceil_div(total, workers)
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
    """Bytes of a tile's share of the dense operand, and of the values if parts of n share them."""
    size = plan.params.k * plan.n_padded
    if plan.n_split > 1:
        size += plan.pattern.nnz * plan.pattern.block_size**2
    return ceil_div(size, plan.target.tiles) * plan.dtype.size


def _most_sent_bytes(plan: StaticPlan) -> int:
    """Bytes of partial sums that leave the tile with most of them."""
    size = plan.pattern.block_size * plan.dtype.size
    return max(
        int(plan.pieces(part).rows.max(initial=0)) * n.size * size
        for part, n in enumerate(plan.n_parts)
    )


def reduce_cycles(plan: StaticPlan) -> np.ndarray:
    """Reduction cycles of every tile: [tiles]. An output with one partial sum needs none."""
    sums = plan.sums
    return sums.cycles(plan, sums.at_home) + sums.cycles(plan, ~sums.at_home)


def tile_memory(plan: StaticPlan) -> TileMemory:
    """The memory of the fullest tile: work list and values (`buckets`), its share of the dense
    operand and the result (`operands`), gathered columns and partial sums (`temporary`), code."""
    size, block = plan.dtype.size, plan.pattern.block_size
    tiles, area = plan.target.tiles, block * block
    lists = temporary = partials = 0
    for part, n in enumerate(plan.n_parts):
        pieces = plan.pieces(part)
        if not len(pieces):
            continue
        words = work_list_words(pieces.rows, pieces.blocks, block, plan.target.workers)
        lists = max(lists, int((2 * words + pieces.blocks * area * size).max()))
        held = (pieces.rows + pieces.columns) * n.size * block * size
        temporary = max(temporary, int(held.max()))
        partials = max(partials, int(pieces.rows.max()) * n.size * block * size)
    if plan.n_split > 1:
        lists += ceil_div(plan.pattern.nnz * area * size, tiles)  # At home, besides.
    sums = plan.sums
    summed = np.bincount(sums.tile, sums.length * (sums.depth + ~sums.at_home), tiles)
    received = int(summed.max()) * size
    operands = ceil_div((plan.params.k + plan.params.m) * plan.n_padded * size, tiles)
    return TileMemory(
        buckets=lists,
        operands=operands,
        temporary=max(temporary, partials + received),
        code=sum(code_bytes(plan).values()),
        available=int(plan.target.bytes_per_tile),
    )


def code_bytes(plan: StaticPlan, which: str = "typical") -> dict[str, int]:
    """Bytes of code on the fullest tile, by kind.

    Args:
        which: "low", "typical" or "high": which value of the facts' ranges to use.
    """

    def fact(name: str) -> float:
        return float(getattr(getattr(facts, name), which))

    sizes: dict[str, Any] = {
        "vertex code": fact("KERNEL_CODE") + fact("SUM_CODE") * bool(reduce_cycles(plan).any()),
        "vertices of sums": plan.sums.state_bytes(plan).max(),
        "exchange code": exchange_code(plan, which).max(),
    }
    if plan.target.bytes_per_tile >= REAL_TILE:
        steps = len(predict(plan).steps)
        sizes["control code"] = fact("CONTROL_CODE") * steps + fact("HOST_EXCHANGE")
        sizes["stacks"] = fact("STACKS")
    return {name: int(size) for name, size in sizes.items()}


def exchange_code(plan: StaticPlan, which: str = "typical") -> np.ndarray:
    """Bytes of the instructions that send and receive, all exchanges together: [tiles].

    With "high" every receive sets its pointer, since exchanges are not scheduled in the order of
    addresses.
    """
    tiles, size, block = plan.target.tiles, plan.dtype.size, plan.pattern.block_size
    sums, outputs = plan.sums, plan.outputs
    ops = plan.depths.shape
    # Stretches of each row and part of n that its partial sums are sent in.
    cut = np.zeros(ops, np.int64)
    np.add.at(cut, (sums.row, sums.part), sums.depth > 0)
    np.add.at(cut, (outputs.row[sums.ones], outputs.part[sums.ones]), 1)
    # np.bincount of an empty array returns integers, whatever its weights.
    receives = np.bincount(sums.tile, sums.depth, tiles).astype(float)
    receives += np.bincount(outputs.tile[sums.ones], minlength=tiles)
    sends, long = np.zeros(tiles), np.zeros(tiles)
    for part, n in enumerate(plan.n_parts):
        pieces = plan.pieces(part)
        if not len(pieces):
            continue
        at = plan.tile_parts[part].begin + pieces.tile
        columns = column_fragments(plan, pieces) + (plan.n_split > 1)
        receives += np.bincount(at, columns, tiles)
        sends += np.bincount(at[pieces.row_piece], cut[pieces.row, part], tiles)
        # Each tile sends its share of the operand, column by column, and of the values.
        row = n.size * block
        share = ceil_div(plan.params.k * n.size, tiles)
        sends += ceil_div(share, row) + 2 * (plan.n_split > 1)
        long += ceil_div(share, row) * (row * size > 4 * facts.SHORT_WORDS)
    away = ~sums.at_home
    sends += np.bincount(sums.tile[away], minlength=tiles)
    receives += _count_fragments(plan)
    pointers = receives if which == "high" else 3.0
    code = getattr(facts.RECEIVE, which) * receives + getattr(facts.SEND, which) * sends
    code = code + getattr(facts.LONG_SEND, which) * long
    code = code + getattr(facts.RECEIVE_POINTER, which) * pointers
    return np.asarray(code + 3 * getattr(facts.EXCHANGE_ENTRY, which))


def _count_fragments(plan: StaticPlan) -> np.ndarray:
    """Fragments in which each tile of the result receives sums made on other tiles: [tiles]."""
    outputs, sums = plan.outputs, plan.sums
    begins = np.concatenate([sums.begin[~sums.at_home], outputs.begin[sums.spread]])
    tile = np.searchsorted(outputs.begin, np.unique(begins), "right") - 1
    return np.bincount(outputs.tile[tile], minlength=plan.target.tiles)
