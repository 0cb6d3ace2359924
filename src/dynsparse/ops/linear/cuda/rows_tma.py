"""Forward and the gradient of the input through the copy engine (TMA) of Hopper and later chips.

As `rows.py` for blocks of 64 and 128. One instruction of one thread fetches a tile, wherever the
list says that it lies; what lies past the end of the batch comes as zeros and is not written. The
threads have fewer registers to fill with addresses.

SWAPPED: the block's outputs are the rows of the tensor core's tile and the samples its columns,
Y^T = W X^T: 256 columns to an instruction read the least shared memory for what they multiply.
"""

import triton
import triton.language as tl

from dynsparse.ops.linear.cuda.rows import locate, place

__all__ = ["rows_tma_kernel"]


@triton.jit
def rows_tma_kernel(
    x,
    w,
    y,
    bias,
    ptr,
    blocks,
    slots,
    order,
    batch,
    rows,
    group,
    B: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    SWAPPED: tl.constexpr,
    BY_SLOT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Descriptors of x [batch, any] and y [batch, rows * B], and of w as [nnz * B, B], in boxes of
    [BM, BK], [BM, B], and [B, BK] if TRANSPOSED, else [BK, B]."""
    tile, row = place(batch, rows, order, group, BM)
    start = tl.load(ptr + row)
    end = tl.load(ptr + row + 1)
    m = tile * BM
    PARTS: tl.constexpr = B // BK
    last = tl.maximum(end - 1, start)
    acc = tl.zeros((B, BM) if SWAPPED else (BM, B), dtype=tl.float32)
    block, slot = locate(blocks, slots, start, start < end, BY_SLOT)
    for step in range(start * PARTS, end * PARTS):
        k = step % PARTS * BK
        a = x.load([m, block * B + k])
        # [BK, B]: wgmma reads tiles of 16-bit numbers from shared memory either way.
        if TRANSPOSED:
            b = w.load([slot * B, k]).T
        else:
            b = w.load([slot * B + k, 0])
        if SWAPPED:
            acc = tl.dot(b.T, a.T, acc, input_precision=PRECISION)
        else:
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
        following = tl.minimum((step + 1) // PARTS, last)
        block, slot = locate(blocks, slots, following, True, BY_SLOT)
    if HAS_BIAS:
        own = tl.load(bias + row * B + tl.arange(0, B)).to(tl.float32)
        acc += own[:, None] if SWAPPED else own[None, :]
    result = acc.to(y.dtype)
    y.store([m, row * B], result.T if SWAPPED else result)
