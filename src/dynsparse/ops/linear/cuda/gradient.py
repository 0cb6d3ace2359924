"""The gradient of the values, dY^T X at the pattern's blocks only.

A program computes up to J blocks of one block row: the J gathered columns of X are the rows (M) of
the tensor core's tile, the block row of dY its columns (N), samples are the sum (K), so that dY is
read once for J blocks. The list of what each program takes has a length that depends on the sizes
alone (`plan.chunks`).
"""

import triton
import triton.language as tl

__all__ = ["gradient_kernel"]


@triton.jit
def gradient_kernel(
    dy,
    x,
    dw,
    chunks,
    ptr,
    blocks,
    batch,
    span,
    nnz,
    dy_sample,
    dy_feature,
    x_sample,
    x_feature,
    B: tl.constexpr,
    J: tl.constexpr,
    BT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dw [parts, nnz, B, B], each part the sum over `span` samples.

    The gradient of a bias is not summed here beside the products. A tile that is read into
    registers, too, loses a buffer of the pipeline (Triton 3.7): the next copy would overwrite it
    while Hopper's tensor cores still read.
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
    first = part * span
    last = tl.minimum(batch, first + span)
    acc = tl.zeros((J * B, B), dtype=tl.float32)
    for t in range(first, last, BT):
        sample = (t + tl.arange(0, BT)).to(tl.int64)
        here = sample < last
        a = tl.load(x_columns + sample[None, :] * x_sample, mask=here[None, :], other=0.0)
        b = tl.load(dy_columns + sample[:, None] * dy_sample, mask=here[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    at = (part.to(tl.int64) * nnz + slot)[:, None] * (B * B) + n[None, :] * B + (m % B)[:, None]
    tl.store(dw + at, acc.to(dw.dtype.element_ty), mask=live[:, None])
