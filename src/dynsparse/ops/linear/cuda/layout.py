"""Values to their places in a dense weight, and the gradient's entries back from there.

A program goes through one block row, so that where it lies follows from `row_ptr` and `cols` alone:
no list of positions exists, which for single elements would take as much memory as a state of the
optimizer. No two entries share a place.
"""

import triton
import triton.language as tl


@triton.jit
def entries(row_ptr, cols, row, part, parts, step, width, B: tl.constexpr, N: tl.constexpr):
    """The entries of a block row that a program meets at a step: where each is among the values,
    and in the row's lines [B, width]; and whether there is one."""
    start = tl.load(row_ptr + row)
    count = (tl.load(row_ptr + row + 1) - start).to(tl.int64) * (B * B)
    entry = (step * parts + part).to(tl.int64) * N + tl.arange(0, N)
    there = entry < count
    slot = start + entry // (B * B)
    col = tl.load(cols + slot, mask=there, other=0)
    inside = entry % (B * B)
    place = (inside // B) * width + col.to(tl.int64) * B + inside % B
    return start.to(tl.int64) * (B * B) + entry, place, there


@triton.jit
def steps_of(row_ptr, row, parts, B: tl.constexpr, N: tl.constexpr):
    """How many steps the longest part of a block row takes."""
    count = (tl.load(row_ptr + row + 1) - tl.load(row_ptr + row)).to(tl.int64) * (B * B)
    return tl.cdiv(count, N * parts).to(tl.int32)


@triton.jit
def lay_out_kernel(values, weight, row_ptr, cols, width, B: tl.constexpr, N: tl.constexpr):
    """weight [out, width], zeros, takes the values [nnz, B, B] in its own type.

    Programs: block rows, and parts that each of them is divided into; N entries at a step.
    """
    row, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    lines = weight + row.to(tl.int64) * B * width
    for step in range(steps_of(row_ptr, row, parts, B, N)):
        entry, place, there = entries(row_ptr, cols, row, part, parts, step, width, B, N)
        value = tl.load(values + entry, mask=there)
        tl.store(lines + place, value.to(weight.dtype.element_ty), mask=there)


@triton.jit
def collect_kernel(
    gradient, collected, row_ptr, cols, first, width, B: tl.constexpr, N: tl.constexpr
):
    """collected [nnz, B, B] takes its entries of the block rows from `first` on, whose gradient
    [any, width] is. Programs as above, of these rows alone."""
    row, part, parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    lines = gradient + row.to(tl.int64) * B * width
    for step in range(steps_of(row_ptr, first + row, parts, B, N)):
        entry, place, there = entries(row_ptr, cols, first + row, part, parts, step, width, B, N)
        value = tl.load(lines + place, mask=there)
        tl.store(collected + entry, value.to(collected.dtype.element_ty), mask=there)
