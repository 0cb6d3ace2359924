"""Cycles of the sparse vertices as they really run: the execution model's kernels.

The estimator's formulas (`vertex_cycles`) choose the plan; these say what the chosen plan takes.
They differ where the estimator is known to be off: the general kernels of unstructured sparsity
set up and store for every block of the batch, not once a row; every matched sub-group launches the
workers anew; zeroing runs at the full width of the data path; 16x16 blocks of float16 with float32
partials always load their coefficients in two halves.

Each formula is a count of the instructions of the kernel's loops. A worker issues one instruction
every `workers` cycles, so a tile pays `workers` times the slowest worker.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from dynsparse.popsparse import vertex_cycles as estimate
from dynsparse.popsparse.data_types import DataType

__all__ = [
    "Kernel",
    "block_product",
    "element_product",
    "element_transposed",
    "grad_weight",
    "zero",
]

Ints = Any


class Kernel(NamedTuple):
    """Worker instructions: `start` + rows * `row` + non-zeros (or blocks) * `each`.

    `supervisor` cycles are paid for each matched sub-group, `by_row` and `by_each` of them for
    each of its rows and blocks.
    """

    start: Ints
    row: Ints
    each: Ints
    supervisor: int
    by_row: int = 0
    by_each: int = 0

    def worker(self, rows: Ints, count: Ints) -> Ints:
        return self.start + rows * self.row + count * self.each


# Of one row: loads of the row's entry and pointers, the loop over the batch, and the way back.
_ROW = 13


def element_product(z: Ints, dtype: DataType, *, grad_input: bool = False) -> Kernel:
    """forward, or grad_input from buckets of its own, with `z` elements of the batch a worker.

    A vector of 8 (float16) or 4 (float32) of the batch takes 3 instructions a non-zero, and about
    17 or 12 around the loop: pointers, the first loads, the accumulators in and out.
    """
    z = np.asarray(z)
    saved = 2 if grad_input else 0  # grad_input's kernels load one pointer less.
    if dtype.size == 2:
        rest = z & 7
        tail = np.where(rest > 0, 4, 0) + np.where(rest & 4, 11, 0)
        tail = tail + np.where(rest & 3, 1 + 10 * (rest & 3), 0)
        row = _ROW + (17 - saved) * (z // 8) + tail
        each = 3 * (z // 8) + np.where(rest & 4, 2, 0) + 2 * (rest & 3)
        exact = {8: (28, 15, 3), 4: (30, 11, 2)}
        start: Ints = 33
    else:
        rest = z & 3
        tail = np.where(rest > 0, 4, 0) + np.where(rest & 2, 8, 0) + np.where(rest & 1, 8, 0)
        row = _ROW + (12 - saved) * (z // 4) + tail
        each = 3 * (z // 4) + np.where(rest & 2, 2, 0) + np.where(rest & 1, 2, 0)
        exact = {4: (25, 13, 3), 2: (27, 11, 2)}
        start = 30
    conditions = [z == key for key in exact]
    start, row, each = (
        np.select(conditions, [constants[i] for constants in exact.values()], default)
        for i, default in enumerate((start, row, each))
    )
    return Kernel(start, row, each, 46 + 46 if grad_input else 47 + 46)


def element_transposed(z: int, dtype: DataType) -> Kernel:
    """grad_input from the forward buckets. `each` counts turns of a row's loop: its non-zeros
    are shared among the workers."""
    if dtype.size == 4:
        return Kernel(23, 32 + (2 if z >= 2 else 0), 3 * (z // 2) + 4 * (z & 1), 44 + 68)
    if z == 8:
        return Kernel(20, 18, 10, 44 + 68)
    if z == 4:
        return Kernel(20, 21, 7, 44 + 68)
    each = 5 * (z // 4) + (2 if z >= 4 else 0) + (5 + 3 * (z & 3) if z & 3 else 0)
    return Kernel(26, 30, each, 44 + 68)


def block_product(
    z: int,
    block: tuple[int, int],
    dtype: DataType,
    partials: DataType,
    conv_units: int,
    *,
    retain: bool,
) -> Kernel:
    """forward of blocks, or with `retain` False grad_input; `z` elements of the batch a worker.

    Read off the estimator's formula, which is right here, but for 16x16 blocks with float32
    partials: their kernel makes two halves of a block whatever units there are.
    """
    units = min(conv_units, 8) if partials.size == 4 and dtype.size == 2 else conv_units

    def tile(x: int, y: int, workers: int) -> int:
        sizes = (block, dtype, partials, units, workers)
        return int(estimate.block_forward(x, y, z, *sizes, retain=retain))

    nothing = tile(0, 0, 0)
    by_row = tile(1, 0, 0) - nothing
    by_each = tile(1, 1, 0) - nothing - by_row
    start = tile(0, 0, 1) - nothing
    each = tile(1, 1, 1) - tile(1, 1, 0) - start
    return Kernel(start, 0, each, nothing, by_row, by_each)


def grad_weight(
    z: int, block: tuple[int, int], dtype: DataType, partials: DataType, *, amp: bool
) -> Kernel:
    """grad_weight of elements and blocks; with `amp` all workers share each block."""

    def tile(x: int, y: int, workers: int) -> int:
        if block == (1, 1):
            return int(estimate.element_grad_weight(x, y, z, dtype, workers))
        formula = estimate.block_grad_weight_amp if amp else estimate.block_grad_weight
        return int(formula(x, y, z, block, dtype, partials, workers))

    nothing = tile(0, 0, 0)
    by_row = tile(1, 0, 0) - nothing
    by_each = tile(1, 1, 0) - nothing - by_row
    start = tile(0, 0, 1) - nothing
    row = tile(1, 0, 1) - tile(1, 0, 0) - start
    each = tile(1, 1, 1) - tile(1, 1, 0) - start - row
    return Kernel(start, row, each, nothing, by_row, by_each)


def zero(bytes_: Ints, workers: int, path_bytes: int = 8) -> Ints:
    """Zeroing memory: a word of the data path an instruction, 12 around the loop."""
    words = -(-np.asarray(bytes_) // path_bytes)
    return workers * (12 + -(-words // workers))
