"""Cycles of the sparse vertices as PopSparse's planner estimates them.

All functions are vectorised: sizes may be integers or NumPy integer arrays, and the result has
their common shape. A result is cycles of a tile: the slowest worker's instructions times the
number of workers, which take turns, plus the supervisor's own.

Shared parameters: `x` rows (blocks: block rows) of one worker, `z` its elements of the batch, `y`
non-zeros (blocks: blocks) of each row, `workers` of a tile, `buckets` looked through, `matched`
those that hold a sub-group of this tile, `sub_groups` on average in a bucket.

The formulas are sections 3.1 to 3.3 of docs/popsparse-formulas.md. The
execution model (`timing.kernels`) says what the kernels really take.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from popsparse.planning.data_types import DataType

Ints = Any  # an int or an integer array


@dataclass(frozen=True)
class Search:
    """What a vertex looks through before it finds its work. The planner assumes (z, z, 1)."""

    buckets: Ints = 1
    matched: Ints = 1
    sub_groups: int = 1

    @property
    def position(self) -> float:
        """Average place of the first match among the sub-groups of a bucket."""
        return (self.sub_groups - 1) / 2 + 1

    def cycles(self, miss: int, per_position: int, per_match: int) -> Ints:
        unmatched = (self.buckets - self.matched) * self.sub_groups
        return miss * unmatched + int(per_position * self.position + per_match) * self.matched


ONE = Search()


def _by_z(z: Ints, exact: dict[int, tuple[Ints, ...]], general: tuple[Ints, ...]) -> list[Ints]:
    """Choose, place by place, the constants of the specialised kernels for some values of z."""
    z = np.asarray(z)
    conditions = [z == key for key in exact]
    return [
        np.select(conditions, [exact[key][i] for key in exact], general[i])
        for i in range(len(general))
    ]


def _rows(x: Ints, y: Ints, z: Ints, dtype: DataType, constants: dict[str, Any]) -> Ints:
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
    start, per_row, per_z = _by_z(
        z,
        {wide: (*single[0], 3 * y), narrow: (*single[1], 2 * y)},
        (*single[2], inner),
    )
    return start + x * (per_row + per_z)


_FORWARD = {
    4: {"z": ((25, 13), (27, 11), (30, 13)), "first": 12, "last": 0},
    2: {"z": ((28, 15), (30, 11), (33, 12)), "first": 16, "last": 11},
}
_GRAD_INPUT = {
    4: {"z": ((23, 13), (25, 11), (33, 13)), "first": 10, "last": 0},
    2: {"z": ((26, 15), (28, 11), (32, 11)), "first": 14, "last": 10},
}


def element_forward(
    x: Ints, y: Ints, z: Ints, dtype: DataType, workers: int, search: Search = ONE
) -> Ints:
    """Forward of unstructured sparsity: vectors of the batch, one non-zero after another."""
    work = _rows(x, y, z, dtype, _FORWARD[dtype.size])
    return workers * work + 30 + search.cycles(32, 47, 46)


def element_grad_input(
    x: Ints, y: Ints, z: Ints, dtype: DataType, workers: int, search: Search = ONE
) -> Ints:
    """grad_input from buckets of its own."""
    work = _rows(x, y, z, dtype, _GRAD_INPUT[dtype.size])
    return workers * work + 30 + search.cycles(32, 46, 46)


def element_transposed(
    x: Ints, y: Ints, z: Ints, dtype: DataType, workers: int, search: Search = ONE
) -> Ints:
    """grad_input from the forward buckets. The non-zeros of a row are shared among the workers."""
    share = -(-np.asarray(y) // workers)
    if dtype.size == 4:
        start, per_row = 23, 24
        per_z = 8 + np.where(z >= 2, (2 + 3 * (z // 2)) * share, 0) + (z & 1) * 4 * share
    else:
        general = (
            8
            + np.where(z >= 4, (2 + 5 * (z // 4)) * share, 0)
            + np.where(z & 3, (5 + 3 * (z & 3)) * share, 0)
        )
        start, per_row, per_z = _by_z(
            z, {8: (20, 18, 10 * share), 4: (20, 21, 7 * share)}, (26, 22, general)
        )
    return workers * (start + x * (per_row + per_z)) + 30 + search.cycles(32, 44, 68)


def element_grad_weight(
    x: Ints, y: Ints, z: Ints, dtype: DataType, workers: int, search: Search = ONE
) -> Ints:
    """grad_weight: a dot product over the batch for each non-zero."""
    if dtype.size == 4:
        start, per_row, per_y = _by_z(
            z, {4: (30, 9, 5), 2: (32, 7, 4)}, (34, 9, 9 + z // 2 + (z & 1))
        )
    else:
        general = 11 + z // 4 + np.where(z & 2, 3, 0) + np.where(z & 1, 4, 0)
        start, per_row, per_y = _by_z(z, {8: (30, 11, 5), 4: (32, 10, 4)}, (35, 8, general))
    return workers * (start + x * (per_row + per_y * y)) + 75 + search.cycles(0, 26, 0)


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


def kernel_edge(block: tuple[int, int], dtype: DataType) -> int:
    """Edge of the smallest square kernel that holds the block (the largest one if none does).

    The kernels take square blocks of 4 and 8, for float16 also of 16. Other blocks have none, yet
    embeddings use them and are planned by these formulas all the same.
    """
    edges = (4, 8) if dtype.size == 4 else (4, 8, 16)
    return next((edge for edge in edges if edge >= max(block)), edges[-1])


def block_forward(
    x: Ints,
    y: Ints,
    z: Ints,
    block: tuple[int, int],
    dtype: DataType,
    partials: DataType,
    conv_units: int,
    workers: int,
    search: Search = ONE,
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
    supervisor = 40 + search.cycles(33, 46, 56) + (y * (load + 3 + 12 * loads) + held) * x + 2
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
    dtype: DataType,
    partials: DataType,
    workers: int,
    search: Search = ONE,
) -> Ints:
    """grad_weight of blocks without the matrix units; any batch."""
    kind = _KINDS[dtype.size, partials.size]
    start, per_row, per_block, per_z = _BLOCK_GRAD_WEIGHT[kernel_edge(block, dtype), kind]
    work = start + x * (per_row + y * (per_block + z * per_z))
    return workers * work + 75 + search.cycles(0, 26, 0)


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
    dtype: DataType,
    partials: DataType,
    workers: int,
    search: Search = ONE,
) -> Ints:
    """grad_weight of blocks in the matrix units: all workers on each block, 16 or 8 of the batch
    at a time."""
    kind = _KINDS[dtype.size, partials.size]
    load, run, start, per_block, saved = _AMP[kernel_edge(block, dtype), kind]
    steps = -(-np.asarray(z) // (32 // dtype.size))
    supervisor = (
        75
        + search.cycles(0, 26, 0)
        + 8 * (x - 1)
        + 23
        + x * (32 + 10 * (y - 1) + y * (15 + 4 * (steps - 1) + steps * (run + load)))
    )
    return workers * (start + x * y * (per_block * steps - saved * (steps - 1))) + supervisor


def zero_partials(elements: Ints, workers: int) -> Ints:
    """Zeroing as the planner prices it: one element a cycle (the machine does 64 bits a cycle)."""
    return -(-np.asarray(elements) // workers) * workers
