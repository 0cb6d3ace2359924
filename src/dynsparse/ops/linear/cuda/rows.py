"""Forward and the gradient of the input, through pointers: any strides, any capability.

Both passes are one product: every block row of Y gathers the input blocks that its list names.
Forward walks the pattern by rows and takes each block transposed, Y_r += X_c W_s^T; the gradient of
the input walks it by columns, dX_c += dY_r W_s.

A program computes one block row for one tile of samples. Samples are the rows (M) of the tensor
core's tile and the block's outputs its columns (N), since Hopper wants M of 64 at least; the sum
(K) runs over the row's blocks, those of 16 and 32 joined several to a step.

Nothing in a launch depends on the pattern but the number of its block rows, so a captured graph
stays valid when the index is overwritten in place.
"""

import triton
import triton.language as tl

RECORD = tl.constexpr(8)
"""Numbers that `plan.rows_in_turn` holds for each program's row: 32 bytes, one access of memory."""


@triton.jit
def place(turns, batch, rows, group, BM: tl.constexpr):
    """The tile of samples of this program, and of its block row: its number, where its list starts
    and ends, and the input block and the slot of the first entry.

    `group` tiles of samples meet all block rows before the next tiles come, so that these tiles
    and the weights stay in the L2 cache. `turns` names the longest rows first: none is left over
    for the end.
    """
    program = tl.program_id(0)
    first = program // (group * rows) * group
    inside = program % (group * rows)
    size = tl.minimum(tl.cdiv(batch, BM) - first, group)
    # One record holds all of it: each number that had to be looked up by another would be a trip to
    # memory before the first product.
    at = turns + inside // size * RECORD
    return (
        first + inside % size,
        tl.load(at),
        tl.load(at + 1),
        tl.load(at + 2),
        tl.load(at + 3),
        tl.load(at + 4),
    )


@triton.jit
def locate(blocks, slots, number, there, BY_SLOT: tl.constexpr):
    """The input block and the slot of the values that an entry of the list names."""
    block = tl.load(blocks + number, mask=there, other=0)
    slot = number
    if BY_SLOT:
        slot = tl.load(slots + number, mask=there, other=0)
    return block, slot


@triton.jit
def sum_blocks(
    acc,
    x_rows,
    w,
    blocks,
    slots,
    start,
    end,
    block,
    slot,
    here,
    x_feature,
    B: tl.constexpr,
    BK: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BY_SLOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`acc` and the products of the entries from `start` to `end` of one list.

    `block` and `slot`: of the first, where a step takes no more than one block.
    """
    n = tl.arange(0, B)
    # Where a block lies is read a step ahead. Read in its own step it would be a second level of
    # loads, among which the stages of the pipeline would be divided.
    if BK <= B:
        PARTS: tl.constexpr = B // BK
        last = tl.maximum(end - 1, start)
        for step in range(start * PARTS, end * PARTS):
            k = step % PARTS * BK + tl.arange(0, BK)
            x_at = x_rows + (block * B + k).to(tl.int64)[None, :] * x_feature
            w_block = w + slot.to(tl.int64) * (B * B)
            if TRANSPOSED:
                w_at = w_block + k[:, None] + n[None, :] * B
            else:
                w_at = w_block + k[:, None] * B + n[None, :]
            a = tl.load(x_at, mask=here, other=0.0)
            b = tl.load(w_at)
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
            following = tl.minimum((step + 1) // PARTS, last)
            block, slot = locate(blocks, slots, following, True, BY_SLOT)
    else:
        JOINED: tl.constexpr = BK // B
        number = start + tl.arange(0, BK) // B
        k = tl.arange(0, BK) % B
        block, slot = locate(blocks, slots, number, number < end, BY_SLOT)
        for _ in range(start, end, JOINED):
            live = number < end
            x_at = x_rows + (block * B + k).to(tl.int64)[None, :] * x_feature
            w_block = w + slot.to(tl.int64) * (B * B)
            if TRANSPOSED:
                w_at = (w_block + k)[:, None] + n[None, :] * B
            else:
                w_at = (w_block + k * B)[:, None] + n[None, :]
            # Both are masked where the row has no block left: zero times infinity is not zero.
            a = tl.load(x_at, mask=live[None, :] & here, other=0.0)
            b = tl.load(w_at, mask=live[:, None], other=0.0)
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
            number += JOINED
            block, slot = locate(blocks, slots, number, number < end, BY_SLOT)
    return acc


@triton.jit(do_not_specialize=["rows", "group"])
def rows_kernel(
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
    x_sample,
    x_feature,
    B: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BY_SLOT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    TERMS: tl.constexpr,
):
    """y [batch, rows * B], contiguous, of x [batch, any] with strides (x_sample, x_feature).

    w: the values [nnz, B, B] in the dtype of x; TRANSPOSED as forward takes them.
    blocks: the lists of all rows; slots: where their values are, if not in that order.
    BM samples, BK inputs at a step. TERMS: how many the tensor cores add up at a time, or 0.
    """
    tile, row, start, end, block, slot = place(turns, batch, rows, group, BM)
    m = tile * BM + tl.arange(0, BM)
    # A mask, not clamped places: of these the compiler would not see that they are contiguous.
    here = (m < batch)[:, None]
    x_rows = x + m.to(tl.int64)[:, None] * x_sample
    out = row * B + tl.arange(0, B)
    acc = tl.zeros((BM, B), dtype=tl.float32)
    if HAS_BIAS:
        acc += tl.load(bias + out).to(tl.float32)[None, :]
    if TERMS == 0:
        acc = sum_blocks(
            acc, x_rows, w, blocks, slots, start, end, block, slot, here, x_feature,
            B, BK, TRANSPOSED, BY_SLOT, PRECISION,
        )  # fmt: skip
    else:
        for first in range(start, end, TERMS // B):
            until = tl.minimum(first + TERMS // B, end)
            block, slot = locate(blocks, slots, first, True, BY_SLOT)
            acc += sum_blocks(
                tl.zeros((BM, B), dtype=tl.float32), x_rows, w, blocks, slots, first, until,
                block, slot, here, x_feature, B, BK, TRANSPOSED, BY_SLOT, PRECISION,
            )  # fmt: skip
    y_at = y + m.to(tl.int64)[:, None] * (rows * B) + out[None, :]
    tl.store(y_at, acc.to(y.dtype.element_ty), mask=here)
