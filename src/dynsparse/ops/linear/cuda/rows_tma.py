"""Forward and the gradient of the input through the copy engine (TMA) of Hopper and later chips.

As `rows.py`, for 16-bit blocks of 64 and 128. One instruction of one thread fetches a tile,
wherever the list says that it lies; what lies past the end of the batch comes as zeros and is not
written. The threads have fewer registers to fill with addresses.
"""

import triton
import triton.language as tl

from dynsparse.ops.linear.cuda.rows import locate, place


@triton.jit(do_not_specialize=["batch", "rows", "group"])
def rows_tma_kernel(
    x,
    w,
    y,
    bias,
    turns,
    blocks,
    slots,
    batch,
    rows,
    group,
    B: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BY_SLOT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Descriptors of x [batch, any] and y [batch, rows * B], and of w as [nnz * B, B], in boxes of
    [BM, BK], [BM, B], and [B, BK] if TRANSPOSED, else [BK, B]."""
    tile, row, start, end, block, slot = place(turns, batch, rows, group, BM)
    m = tile * BM
    PARTS: tl.constexpr = B // BK
    last = tl.maximum(end - 1, start)
    acc = tl.zeros((BM, B), dtype=tl.float32)
    if HAS_BIAS:
        acc += tl.load(bias + row * B + tl.arange(0, B)).to(tl.float32)[None, :]
    for step in range(start * PARTS, end * PARTS):
        k = step % PARTS * BK
        a = x.load([m, block * B + k])
        # [BK, B]: wgmma reads tiles of 16-bit numbers from shared memory either way.
        if TRANSPOSED:
            b = w.load([slot * B, k]).T
        else:
            b = w.load([slot * B + k, 0])
        acc = tl.dot(a, b, acc)
        following = tl.minimum((step + 1) // PARTS, last)
        block, slot = locate(blocks, slots, following, True, BY_SLOT)
    y.store([m, row * B], acc.to(y.dtype))
