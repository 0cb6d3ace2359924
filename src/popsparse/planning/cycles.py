"""The planner's cycle estimates of vertices, tiles and exchanges, sparse and dense.

All functions are vectorised: sizes may be integers or NumPy integer arrays, and the result has
their common shape. A result is cycles of a tile: the slowest worker's instructions times the
number of workers, which take turns, plus the supervisor's own.

Shared parameters of sparse vertices: `x` rows (for blocks, block rows) of one worker, `z` its
elements of the batch, `y` non-zeros (for blocks, blocks) of each row, `workers` of a tile,
`buckets` searched, in each of which one sub-group is this tile's.
Of dense vertices: `field` elements streamed, `in_groups` and `out_groups` of channels on a tile.

Sources, all in docs/popsparse-formulas.md: sparse vertices, sections 3.1 to 3.3; the vertices
around them, 3.4; the exchange, 3.5; dense vertices (poplibs' planner), 7.1, 7.2 and 7.4. The
execution model (`timing`) says what the kernels really take.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from popsparse.machine.dtypes import DType
from popsparse.machine.intervals import offsets_of, ranks
from popsparse.planning.params import ceil_div

CONTROL_INSTRUCTIONS = 20
"""Worker instructions of a vertex that reads, computes and writes one number. 10 to 40."""

LOOP_STEPS = 4
"""Supersteps of one turn that exchange anything: the loop's condition and two choices, each sent to
all tiles, and the buckets passed on. All other work of a turn is local to a tile and needs no
synchronisation. The original's loop has one choice more."""

LOOP_CONTROL = 5 * CONTROL_INSTRUCTIONS
"""Worker instructions of a turn's control: five such vertices."""


Ints = Any
_SCALE = 16  # The original works in sixteenths of a byte a cycle.


class ExchangeCost:
    """Cycles of an exchange in which each tile receives `received` bytes."""

    def __init__(self, target: Any) -> None:
        rate = float(target.exchange_bytes_per_cycle)
        self.rate = max(1, int(np.floor(rate * _SCALE + 0.5)))
        self.bus_tiles = int(target.exchange_bus_tiles)

    def __call__(self, received: Ints) -> Ints:
        # Not `ceil_div`: inside one expression NumPy reuses the memory of large arrays.
        return -(-np.asarray(received) * _SCALE // self.rate)

    def broadcast(self, received: Ints, same: Ints, receiving: Ints) -> Ints:
        """Cycles when `same` neighbouring tiles, of `receiving` in all, receive equal data, which
        reaches tiles that share a bus at the sum of their rates."""
        share = np.where(
            np.asarray(same) == receiving, self.bus_tiles, np.gcd(same, self.bus_tiles)
        )
        return -(-np.asarray(received) * _SCALE // (self.rate * share))


def clear_memory(size: Ints, workers: int) -> Ints:
    """Cycles of zeroing `size` bytes: 64 bits an instruction, 12 instructions around the loop."""
    words = ceil_div(np.asarray(size), 8)
    return workers * (12 + ceil_div(words, workers))


def cast(elements: Ints, source: DType, result: DType, workers: int) -> Ints:
    """Cycles of converting `elements` numbers."""
    share = ceil_div(elements, workers)
    slowest = min(source.vector_width, result.vector_width)
    return workers * (26 + ceil_div(share, slowest))


def reduce(outputs: Ints, depth: Ints, partials: DType, result: DType, workers: int) -> Ints:
    """Cycles of adding `depth` partials into each of `outputs` results."""
    width = 2 * partials.vector_width
    outputs, depth = np.asarray(outputs), np.asarray(depth)
    rest = outputs % width
    # What is left after the full vectors is done in powers of two.
    odd_loops = sum((rest >> bit) & 1 for bit in range(3))
    loops = outputs // width + odd_loops
    share, more = loops // workers, loops % workers > 0
    remainder = np.where(more & (rest != 0), 2 * depth + (13 if partials.size == 4 else 11), 0)
    share = share + (more & (rest == 0))
    store = {(4, 4): 7, (4, 2): 6, (2, 4): 9, (2, 2): 8}[partials.size, result.size]
    return workers * (32 + remainder + share * (3 * depth + store))


def transpose_blocks(count: Ints, rows: int, columns: int, dtype: DType, workers: int) -> Ints:
    """Cycles of transposing `count` blocks of rows x columns."""
    grain = dtype.vector_width
    per_grain = 3 if dtype.size == 4 else 4
    row_grains, column_grains = ceil_div(rows, grain), ceil_div(columns, grain)
    share = ceil_div(count, workers)
    if row_grains == column_grains == 1:
        work = np.where(share == 1, 29, 37 + (share - 2) * per_grain)
    elif column_grains == 1:
        work = 27 + share * (35 + per_grain * (row_grains - 2))
    else:
        work = 29 + share * (18 + row_grains * (12 + per_grain * (column_grains - 2)))
    return 7 + workers * work


def rearrange_batch(blocks: Ints, edge: int, z: Ints, dtype: DType, workers: int) -> Ints:
    """Cycles of rearranging a dense operand into the order that grad_weight's matrix units read."""
    steps = np.asarray(z) // (32 // dtype.size)
    inner = 12 * edge // 2 if dtype.size == 4 else 23 * edge // 4
    return 18 + workers * (34 + ceil_div(blocks, workers) * (3 + steps * (3 + inner)))


def select_by_z(
    z: Ints, exact: dict[int, tuple[Ints, ...]], general: tuple[Ints, ...]
) -> list[Ints]:
    """Choose, element by element, the constants of the kernels specialised for some values of z."""
    z = np.asarray(z)
    conditions = [z == key for key in exact]
    return [
        np.select(conditions, [exact[key][i] for key in exact], general[i])
        for i in range(len(general))
    ]


def _element_rows(x: Ints, y: Ints, z: Ints, dtype: DType, constants: dict[str, Any]) -> Ints:
    """Worker cycles of the element kernels of forward and grad_input over all rows."""
    single, first, last = constants["z"], constants["first"], constants["last"]
    if dtype.size == 4:
        inner = (
            np.where(z >= 4, first + 3 * (z // 4) * y, 0)
            + np.where(z & 2, 8 + 2 * (z // 2) * y, 0)
            + np.where(z & 1, 8 + 2 * y, 0)
            + np.where(z & 3, 3, 1)
        )
        widths = (4, 2)
    else:
        inner = (
            np.where(z >= 8, first + 3 * (z // 8) * y, 0)
            + np.where(z & 4, 13 + 2 * y, 0)
            + np.where(z & 3, last + 2 * y * (z & 3), 0)
        )
        widths = (8, 4)
    wide, narrow = widths
    start, per_row, per_z = select_by_z(
        z,
        {wide: (*single[0], 3 * y), narrow: (*single[1], 2 * y)},
        (*single[2], inner),
    )
    return start + x * (per_row + per_z)


FORWARD_ROWS: dict[int, dict[str, Any]] = {
    4: {"z": ((25, 13), (27, 11), (30, 13)), "first": 12, "last": 0},
    2: {"z": ((28, 15), (30, 11), (33, 12)), "first": 16, "last": 11},
}
GRAD_INPUT_ROWS: dict[int, dict[str, Any]] = {
    4: {"z": ((23, 13), (25, 11), (33, 13)), "first": 10, "last": 0},
    2: {"z": ((26, 15), (28, 11), (32, 11)), "first": 14, "last": 10},
}


def element_forward(
    x: Ints, y: Ints, z: Ints, dtype: DType, workers: int, buckets: Ints = 1
) -> Ints:
    """Forward of unstructured sparsity: vectors of the batch, one non-zero after another."""
    work = _element_rows(x, y, z, dtype, FORWARD_ROWS[dtype.size])
    return workers * work + 30 + 93 * buckets


def element_grad_input(
    x: Ints, y: Ints, z: Ints, dtype: DType, workers: int, buckets: Ints = 1
) -> Ints:
    """grad_input from buckets of its own."""
    work = _element_rows(x, y, z, dtype, GRAD_INPUT_ROWS[dtype.size])
    return workers * work + 30 + 92 * buckets


def element_transposed(
    x: Ints, y: Ints, z: Ints, dtype: DType, workers: int, buckets: Ints = 1
) -> Ints:
    """grad_input from the forward buckets. The non-zeros of a row are shared among the workers."""
    share = ceil_div(np.asarray(y), workers)
    if dtype.size == 4:
        start, per_row = 23, 24
        per_z = 8 + np.where(z >= 2, (2 + 3 * (z // 2)) * share, 0) + (z & 1) * 4 * share
    else:
        general = (
            8
            + np.where(z >= 4, (2 + 5 * (z // 4)) * share, 0)
            + np.where(z & 3, (5 + 3 * (z & 3)) * share, 0)
        )
        start, per_row, per_z = select_by_z(
            z, {8: (20, 18, 10 * share), 4: (20, 21, 7 * share)}, (26, 22, general)
        )
    return workers * (start + x * (per_row + per_z)) + 30 + 112 * buckets


def element_grad_weight(x: Ints, y: Ints, z: Ints, dtype: DType, workers: int) -> Ints:
    """grad_weight: a dot product over the batch for each non-zero."""
    if dtype.size == 4:
        start, per_row, per_y = select_by_z(
            z, {4: (30, 9, 5), 2: (32, 7, 4)}, (34, 9, 9 + z // 2 + (z & 1))
        )
    else:
        general = 11 + z // 4 + np.where(z & 2, 3, 0) + np.where(z & 1, 4, 0)
        start, per_row, per_y = select_by_z(z, {8: (30, 11, 5), 4: (32, 10, 4)}, (35, 8, general))
    return workers * (start + x * (per_row + per_y * y)) + 101


_KINDS = {(4, 4): "single", (2, 4): "mixed", (2, 2): "half"}

# (edge, kind) -> cycles per element of z, start of a worker, start of a block for z = 1, 2, more.
_BLOCK = {
    (4, "single"): (4, 26, (14, 14, 14)),
    (4, "mixed"): (2, 26, (17, 18, 19)),
    (4, "half"): (2, 26, (15, 16, 17)),
    (8, "single"): (8, 23, (22, 22, 23)),
    (8, "mixed"): (4, 20, (22, 23, 23)),
    (8, "half"): (4, 23, (19, 20, 20)),
    (16, "mixed"): (4, 23, (24, 25, 24)),
    (16, "half"): (4, 22, (22, 23, 22)),
}


def kernel_edge(block: tuple[int, int], dtype: DType) -> int:
    """Edge of the smallest square kernel that holds the block (the largest one if none does).

    The kernels take square blocks of 4 and 8, for float16 also of 16. Other blocks have no kernel,
    yet embeddings use them, and these formulas plan them too.
    """
    edges = (4, 8) if dtype.size == 4 else (4, 8, 16)
    return next((edge for edge in edges if edge >= max(block)), edges[-1])


def block_forward(
    x: Ints,
    y: Ints,
    z: Ints,
    block: tuple[int, int],
    dtype: DType,
    partials: DType,
    conv_units: int,
    workers: int,
    buckets: Ints = 1,
    *,
    retain: bool = True,
) -> Ints:
    """Forward of blocks in the matrix units; with `retain` False, grad_input of the same buckets.

    Each block loads its coefficients, 64 bits a cycle, by the supervisor alone; then the workers
    stream the batch. 16x16 blocks take two loads on a machine with 8 units.
    """
    edge = kernel_edge(block, dtype)
    per_z, start, by_z = _BLOCK[edge, _KINDS[dtype.size, partials.size]]
    loads = 1
    if edge == 16 and conv_units < 16:
        loads = 2
        start, by_z = 23, (24, 25, 24)
    load = edge * edge * dtype.size // 8
    z = np.asarray(z)
    enter = np.select([z == 1, z == 2], by_z[:2], by_z[2])
    held = int(retain)
    worker = start + x * (y * loads * (enter + z * per_z - 3 * held))
    supervisor = 40 + 102 * buckets + (y * (load + 3 + 12 * loads) + held) * x + 2
    return workers * worker + supervisor


_BLOCK_GRAD_WEIGHT = {
    (4, "single"): (27, 9, 45, 12),
    (4, "mixed"): (26, 9, 33, 6),
    (4, "half"): (26, 9, 29, 6),
    (8, "single"): (24, 7, 208, 48),
    (8, "mixed"): (26, 9, 113, 24),
    (8, "half"): (26, 9, 113, 24),
    (16, "mixed"): (27, 9, 505, 96),
    (16, "half"): (27, 9, 441, 96),
}


def block_grad_weight(
    x: Ints,
    y: Ints,
    z: Ints,
    block: tuple[int, int],
    dtype: DType,
    partials: DType,
    workers: int,
) -> Ints:
    """grad_weight of blocks without the matrix units; any batch."""
    kind = _KINDS[dtype.size, partials.size]
    start, per_row, per_block, per_z = _BLOCK_GRAD_WEIGHT[kernel_edge(block, dtype), kind]
    work = start + x * (per_row + y * (per_block + z * per_z))
    return workers * work + 101


# (edge, kind) -> coefficient load, run, retained start, per z block, saved on later z blocks.
_AMP = {
    (4, "single"): (8, 8, 5, 20, 1),
    (4, "mixed"): (8, 8, 5, 17, 2),
    (4, "half"): (8, 8, 5, 15, 1),
    (8, "single"): (16, 8, 5, 33, 2),
    (8, "mixed"): (16, 8, 5, 27, 4),
    (8, "half"): (16, 8, 5, 27, 4),
    (16, "mixed"): (32, 8, 5, 32, 4),
    (16, "half"): (32, 8, 5, 32, 4),
}


def block_grad_weight_amp(
    x: Ints,
    y: Ints,
    z: Ints,
    block: tuple[int, int],
    dtype: DType,
    partials: DType,
    workers: int,
) -> Ints:
    """grad_weight of blocks in the matrix units: all workers on each block, 16 or 8 of the batch
    at a time."""
    kind = _KINDS[dtype.size, partials.size]
    load, run, start, per_block, saved = _AMP[kernel_edge(block, dtype), kind]
    steps = ceil_div(np.asarray(z), 32 // dtype.size)
    supervisor = (
        101
        + 8 * (x - 1)
        + 23
        + x * (32 + 10 * (y - 1) + y * (15 + 4 * (steps - 1) + steps * (run + load)))
    )
    return workers * (start + x * y * (per_block * steps - saved * (steps - 1))) + supervisor


def zero_partials(elements: Ints, workers: int) -> Ints:
    """The planner's cost of zeroing: one element a cycle (the machine does 64 bits a cycle)."""
    return ceil_div(np.asarray(elements), workers) * workers


class WorkPieces(NamedTuple):
    """Pieces of work in order of sub-groups: row and batch-grain ranges. int64 [pieces].

    `group` names the sub-group, `number` counts the pieces inside it, rows count inside it too.
    """

    group: np.ndarray
    number: np.ndarray
    row: np.ndarray
    rows: np.ndarray
    grain: np.ndarray
    grains: np.ndarray


@lru_cache(maxsize=1 << 16)
def grid_split(rows: int, grains: int, workers: int) -> tuple[tuple[int, int, int, int], ...]:
    """A rectangle of rows x grains cut for workers: (row, rows, grain, grains) of each piece.

    Starts with a near-square grid of pieces, then halves the largest, along rows if it has more
    rows than grains, until every worker has one; ties go to the earliest. See
    section 2.3 of docs/popsparse-formulas.md.
    """
    area = ceil_div(rows * grains, workers)
    tall = min(ceil_div(area, grains), rows)
    wide = min(ceil_div(area, tall), grains)
    xs = [*range(0, rows - tall + 1, tall)]
    zs = [*range(0, grains - wide + 1, wide)]
    heights = [b - a for a, b in zip(xs, [*xs[1:], rows], strict=True)]
    widths = [b - a for a, b in zip(zs, [*zs[1:], grains], strict=True)]
    pieces = [
        (x, height, z, width)
        for x, height in zip(xs, heights, strict=True)
        for z, width in zip(zs, widths, strict=True)
    ]
    while len(pieces) < workers:
        at = max(range(len(pieces)), key=lambda k: pieces[k][1] * pieces[k][3])
        x, height, z, width = pieces[at]
        if height > width:
            half = height // 2
            pieces[at] = (x, half, z, width)
            pieces.append((x + half, height - half, z, width))
        elif width > 1:
            half = width // 2
            pieces[at] = (x, height, z, half)
            pieces.append((x, height, z + half, width - half))
        else:
            break
    return tuple(sorted(pieces))


def grid_splits(
    rows: np.ndarray, grains: np.ndarray, workers: int
) -> tuple[np.ndarray, np.ndarray]:
    """The rows and grains of the pieces of many rectangles: two arrays [workers, len(rows)].

    Idle workers repeat the first piece.
    """
    grains = np.broadcast_to(grains, rows.shape)
    span = int(grains.max()) + 1
    keys, inverse = np.unique(rows * span + grains, return_inverse=True)
    table = np.empty((2, workers, len(keys)), np.int64)
    for i, key in enumerate(keys.tolist()):
        pieces = grid_split(key // span, key % span, workers)
        for j in range(workers):
            _, table[0, j, i], _, table[1, j, i] = pieces[j] if j < len(pieces) else pieces[0]
    return table[0][:, inverse], table[1][:, inverse]


def even_split(count: np.ndarray, workers: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Split `count` [groups] items evenly: (group, begin, size) of each non-empty piece."""
    used = np.minimum(count, workers)
    group = np.repeat(np.arange(len(count)), used)
    index = ranks(used)
    begin = index * count[group] // used[group]
    end = (index + 1) * count[group] // used[group]
    return group, begin, end - begin


def split_rows(group_rows: np.ndarray, row_nz: np.ndarray, grains: int, workers: int) -> WorkPieces:
    """Share every sub-group's rows among workers.

    If there are more than twice as many rows as workers, they are split by their non-zeros and the
    batch stays together; otherwise rows x batch grains are split as a grid.

    Args:
        group_rows: rows of each sub-group, int64 [groups], none of them 0.
        row_nz: non-zeros of each row, int64 [sum of group_rows], in order of sub-groups.
        grains: batch grains of a tile.
    """
    parts: list[np.ndarray] = []
    many = np.flatnonzero(group_rows > 2 * workers)
    first = np.cumsum(group_rows) - group_rows
    if len(many):
        before = offsets_of(row_nz)
        base = before[first[many]]
        total = before[first[many] + group_rows[many]] - base
        # Row boundaries nearest above the ideal share of each worker.
        ideal = base[:, None] + np.arange(workers + 1) * total[:, None] // workers
        cut = np.searchsorted(before, ideal) - first[many][:, None]
        sizes = np.diff(cut, axis=1)
        which, _ = np.nonzero(sizes)
        rows = sizes[sizes > 0]
        parts.append(np.stack([many[which], cut[:, :-1][sizes > 0], rows,
                               np.zeros_like(rows), np.full_like(rows, grains)]))  # fmt: skip
    for rows in np.unique(group_rows[group_rows <= 2 * workers]):
        groups = np.flatnonzero(group_rows == rows)
        pieces = np.array(grid_split(int(rows), grains, workers), np.int64).T
        tiled = np.tile(pieces, len(groups))
        parts.append(np.vstack([np.repeat(groups, pieces.shape[1])[None], tiled]))
    if not parts:
        empty = np.zeros(0, np.int64)
        return WorkPieces(empty, empty, empty, empty, empty, empty)
    table = np.concatenate(parts, axis=1)
    table = table[:, np.argsort(table[0], kind="stable")]
    counts = np.bincount(table[0], minlength=len(group_rows))
    return WorkPieces(table[0], ranks(counts), *table[1:])


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
    """Vector multiply-accumulate; any number of in-channels per group."""

    in_channels: int
    out_channels: int

    def label(self) -> str:
        return f"hmac {self.in_channels}x{self.out_channels}"


def _amp_call(elements: Ints, kind: AMP, dtype: DType, partials: DType, *, first: bool) -> Ints:
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
    dtype: DType,
    partials: DType,
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
    passes = ceil_div(kind.out_channels, kind.units)
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
    dtype: DType,
    partials: DType,
    workers: int,
    *,
    zeroing: bool = True,
) -> Ints:
    """A dot product over the in-channels of a group for each field element and out-channel."""
    width = dtype.vector_width
    half = dtype.size == partials.size == 2
    single = dtype.size == 2 and partials.size == 4
    dot = (7 if half else 3) + 4 + ceil_div(kind.in_channels, width) - (dtype.size == 2)
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
    partials: DType,
    result: DType,
    workers: int,
    tile_bytes: int,
) -> Ints:
    """Cycles of one stage of a reduction: `depth` partials into each of `outputs`."""
    outputs, depth = np.asarray(outputs), np.asarray(depth)
    width = 2 * partials.vector_width
    received = (depth - 1) * outputs * partials.size
    fits = ceil_div(received, 16384) * 16384 < tile_bytes // 16
    store = {(4, 4): 8, (4, 2): 7, (2, 4): 10, (2, 2): 9}[partials.size, result.size]
    joined = 33 + workers * (20 + (2 * (depth - 1) + store) * ceil_div(outputs // width, workers))
    split = reduce(outputs, depth, partials, result, workers)
    return np.where((outputs % width == 0) & fits, joined, split)


def dynamic_slice(elements: Ints, dtype: DType, workers: int) -> Ints:
    """Cycles of reading or writing back a slice of this many elements on each tile."""
    return 25 + workers * (63 + 2 * (ceil_div(elements, workers) // dtype.vector_width))


def add_in_place(elements: Ints, dtype: DType, workers: int) -> Ints:
    """Cycles of adding this many elements to the results of earlier steps."""
    return 11 + workers * (58 + 3 * ceil_div(ceil_div(elements, workers), dtype.vector_width))


def rearrange(held: Ints, dtype: DType, copy_bytes: int, *, odd: bool) -> Ints:
    """Cycles of rearranging the `held` bytes on a tile into groups of channels, one element at a
    time; `odd`: the channels do not fill vectors."""
    return ceil_div(5 * held, (3 if odd else 4) * min(copy_bytes, dtype.size))


def regroup(held: Ints, kind: AMP | HMAC, dtype: DType, copy_bytes: int) -> Ints:
    """Cycles of rearranging `held` bytes from the vertex's groups of channels to the result's."""
    return ceil_div(5 * held, 4 * min(copy_bytes, kind.out_channels * dtype.size))
