"""Cycles of the sparse vertices as they really run: the execution model's kernels.

The estimator's formulas (`planning.vertex_cycles`) choose the plan; these say what it takes.
They differ where the estimator is known to be off: the general kernels of unstructured sparsity
set up and store for every block of the batch, not once a row; every matched sub-group launches the
workers anew; zeroing runs at the full width of the data path; 16x16 blocks of float16 with float32
partials always load their coefficients in two halves.

See section 3.6 of docs/popsparse-formulas.md. Each formula is a count of the instructions of the
kernel's loops. A worker issues one instruction every `workers` cycles, so a tile pays `workers`
times the slowest worker.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from popsparse.planning import vertex_cycles as estimate
from popsparse.planning.data_types import DataType
from popsparse.planning.plan import Method, Plan

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


class _Rows(NamedTuple):
    """Instructions of a kernel's general case, by what they are paid for. A non-zero takes 3 of
    them in a whole vector and 2 in a part of one; these are the ones around those loops."""

    row: int
    vector: int
    rest: int  # Once a row when the batch is no multiple of the vector.
    half: int  # Half a vector: 4 of 8, or 2 of 4.
    single: int  # Each element left after that.
    singles: int  # Once a row when there are any.


# A row: its entry, pointers, the way round. A vector: pointers, first loads, accumulators in and
# out of memory. grad_input's kernels peel the last non-zero off the loop and so save three.
_FORWARD = {2: _Rows(13, 17, 4, 11, 10, 1), 4: _Rows(13, 12, 4, 8, 8, 0)}
_GRAD_INPUT = {2: _Rows(12, 13, 4, 9, 9, 1), 4: _Rows(12, 11, 4, 7, 7, 0)}

# Batches of a worker with a kernel of their own: start, row, each non-zero.
_EXACT = {
    (2, False): {8: (28, 15, 3), 4: (30, 11, 2)},
    (4, False): {4: (25, 13, 3), 2: (27, 11, 2)},
    (2, True): {8: (26, 15, 3), 4: (28, 11, 2)},
    (4, True): {4: (23, 13, 3), 2: (25, 11, 2)},
}


def element_product(z: Ints, dtype: DataType, *, grad_input: bool = False) -> Kernel:
    """forward, or grad_input from buckets of its own, with `z` elements of the batch a worker."""
    z = np.asarray(z)
    counts = (_GRAD_INPUT if grad_input else _FORWARD)[dtype.size]
    vector = 16 // dtype.size
    half, singles = z & (vector // 2), z & (vector // 2 - 1)
    row = (
        counts.row
        + counts.vector * (z // vector)
        + np.where(z % vector > 0, counts.rest, 0)
        + np.where(half > 0, counts.half, 0)
        + counts.single * singles
        + np.where(singles > 0, counts.singles, 0)
    )
    each = 3 * (z // vector) + np.where(half > 0, 2, 0) + 2 * singles
    start: Ints = {(2, False): 33, (4, False): 30, (2, True): 32, (4, True): 33}[
        dtype.size, grad_input
    ]
    exact = _EXACT[dtype.size, grad_input]
    conditions = [z == key for key in exact]
    start, row, each = (
        np.select(conditions, [constants[i] for constants in exact.values()], default)
        for i, default in enumerate((start, row, each))
    )
    return Kernel(start, row, each, 46 + 46 if grad_input else 47 + 46)


def element_transposed(z: int, dtype: DataType) -> Kernel:
    """grad_input from the forward buckets. `each` counts turns of a row's loop: its non-zeros
    are shared among the workers. A turn sets up its pointers anew."""
    half = dtype.size == 2
    if half and z in (4, 8):
        return Kernel(20, *((18, 10) if z == 8 else (21, 7)), 44 + 68)
    width = dtype.vector_width
    vectors, rest = z // width, z % width
    if half:
        each = 9 + (2 + 5 * vectors) * (vectors > 0) + (2 + 3 * rest) * (rest > 0)
        return Kernel(26, 22, each, 44 + 68)
    each = 8 + (2 + 3 * vectors) * (vectors > 0) + 4 * rest
    return Kernel(23, 24, each, 44 + 68)


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


def product_kernel(plan: Plan, z: Ints, *, grad_input: bool) -> Kernel:
    """The kernel of the plan's forward or grad_input when a worker has `z` elements of the batch
    (with shared element buckets, grad_input's workers each have the whole batch of the tile).

    Codelets and the execution model both take their cycles from here.
    """
    if plan.method is Method.ELEMENT:
        if grad_input and plan.shared_buckets:
            return element_transposed(int(z), plan.dtype)
        return element_product(z, plan.dtype, grad_input=grad_input)
    partials = plan.options.partials_type
    units = plan.target.conv_units(plan.dtype, partials)
    sizes = (plan.block_dimensions, plan.dtype, partials, units)
    return block_product(int(z), *sizes, retain=not grad_input)


def grad_weight_kernel(plan: Plan, z: int) -> Kernel:
    """The kernel of the plan's grad_weight for `z` elements of the batch."""
    amp = plan.method is Method.BLOCK_AMP
    return grad_weight(z, plan.block_dimensions, plan.dtype, plan.options.partials_type, amp=amp)


def zero(bytes_: Ints, workers: int, path_bytes: int = 8) -> Ints:
    """Zeroing memory: a word of the data path an instruction, 12 around the loop."""
    words = -(-np.asarray(bytes_) // path_bytes)
    return workers * (12 + -(-words // workers))
