"""The gradient of the values, dY^T X at the pattern's blocks only.

A program computes up to J blocks of one block row: the J gathered columns of X are the rows (M) of
the tensor core's tile, the block row of dY its columns (N), samples are the sum (K), so that dY is
read once for J blocks. The list of what each program takes has a length that depends on the sizes
alone (`plan.chunks`).
"""

import triton
import triton.language as tl


@triton.jit
def meet(
    x_columns,
    dy_columns,
    first,
    last,
    x_sample,
    dy_sample,
    M: tl.constexpr,
    B: tl.constexpr,
    BT: tl.constexpr,
    SUMS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The product [M, B] of columns of x and of dy over samples; and the sums of dy's columns, each
    [SUMS, B] times.

    The sums are a product with ones, which reads dy's tile where the other does. Read into
    registers, too, it would lose a buffer of the pipeline (Triton 3.7): the next copy would
    overwrite it while Hopper's tensor cores still read.
    """
    acc = tl.zeros((M, B), dtype=tl.float32)
    sums = tl.zeros((SUMS, B), dtype=tl.float32)
    ones = tl.full((SUMS, BT), 1.0, dtype=tl.float32).to(dy_columns.dtype.element_ty)
    for t in range(first, last, BT):
        sample = (t + tl.arange(0, BT)).to(tl.int64)
        here = sample < last
        a = tl.load(x_columns + sample[None, :] * x_sample, mask=here[None, :], other=0.0)
        b = tl.load(dy_columns + sample[:, None] * dy_sample, mask=here[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
        if SUMS > 1:
            sums = tl.dot(ones, b, sums, input_precision=PRECISION)
    return acc, sums


@triton.jit(do_not_specialize=["steps", "nnz", "height"])
def gradient_kernel(
    dy,
    x,
    dw,
    db,
    chunks,
    ptr,
    blocks,
    batch,
    steps,
    nnz,
    height,
    dy_sample,
    dy_feature,
    x_sample,
    x_feature,
    B: tl.constexpr,
    J: tl.constexpr,
    BT: tl.constexpr,
    SUMS: tl.constexpr,
    PRECISION: tl.constexpr,
    TERMS: tl.constexpr,
):
    """dw [parts, nnz, B, B], each part the sum over `steps` times BT samples.

    SUMS: the rows of a tile of the tensor cores, or 1: db [parts, height] stays as it is. Otherwise
    the first program of each block row adds up its columns of dy, too. TERMS: how many samples the
    tensor cores add up at a time, or 0.
    """
    chunk = tl.program_id(0)
    row = tl.load(chunks + chunk)
    if row < 0:
        return
    part = tl.program_id(1)
    start = tl.load(chunks + tl.num_programs(0) + chunk)
    end = tl.load(ptr + row + 1)
    m = tl.arange(0, J * B)
    n = tl.arange(0, B)
    slot = start + m // B
    live = slot < end
    block = tl.load(blocks + slot, mask=live, other=0)
    x_columns = x + (block * B + m % B).to(tl.int64)[:, None] * x_feature
    dy_columns = dy + (row * B + n).to(tl.int64)[None, :] * dy_feature
    # Multiples of BT, as the compiler sees: what lies along the samples is copied by 16 bytes.
    first = part * steps * BT
    last = tl.minimum(batch, first + steps * BT)
    M: tl.constexpr = J * B
    if SUMS > 1:
        if start == tl.load(ptr + row):
            acc, sums = meet(
                x_columns, dy_columns, first, last, x_sample, dy_sample, M, B, BT, SUMS, PRECISION
            )
            tl.store(db + part.to(tl.int64) * height + row * B + n, tl.sum(sums, 0) / SUMS)
        else:
            acc, _ = meet(
                x_columns, dy_columns, first, last, x_sample, dy_sample, M, B, BT, 1, PRECISION
            )
    elif TERMS == 0:
        acc, _ = meet(
            x_columns, dy_columns, first, last, x_sample, dy_sample, M, B, BT, 1, PRECISION
        )
    else:
        acc = tl.zeros((M, B), dtype=tl.float32)
        for t in range(first, last, TERMS):
            until = tl.minimum(t + TERMS, last)
            some, _ = meet(
                x_columns, dy_columns, t, until, x_sample, dy_sample, M, B, BT, 1, PRECISION
            )
            acc += some
    at = (part.to(tl.int64) * nnz + slot)[:, None] * (B * B) + n[None, :] * B + (m % B)[:, None]
    tl.store(dw + at, acc.to(dw.dtype.element_ty), mask=live[:, None])
