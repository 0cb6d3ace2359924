"""The Triton kernels of sparse linear products. Imports Triton; `launch` calls them.

Forward and the gradient of the input are one product: every block row of Y gathers the input blocks
of its list. Forward walks the pattern by rows and takes each block transposed, Y_r += X_c W_s^T;
the gradient of the input walks it by columns, dX_c += dY_r W_s. A program computes one block row
for one tile of samples. Samples are the rows (M) of the tensor core's tile and the block's outputs
its columns (N), since Hopper needs M of at least 64; the sum (K) runs over the row's blocks, of
which a step takes several if they are 16 or 32 wide.

Launches depend on the pattern only by the number of its block rows, so a captured graph stays valid
when the index is overwritten in place. No two programs write to one entry.
"""

import triton
import triton.language as tl

RECORD = tl.constexpr(8)
"""Numbers of a record of `rows_by_length`: 32 bytes, one memory access."""


@triton.jit
def load_record(records, batch, rows, group, BM: tl.constexpr):
    """Return this program's tile of samples, and its block row: the row, the start and end of its
    list, and the input block and slot of its first entry.

    `group` tiles of samples take all block rows before the next tiles, so that these tiles and the
    weights stay in the L2 cache. `records` begin with the longest rows, so that none is left over
    at the end.
    """
    program = tl.program_id(0)
    first = program // (group * rows) * group
    inside = program % (group * rows)
    size = tl.minimum(tl.cdiv(batch, BM) - first, group)
    # One record holds all of it: each number looked up by another would be one more memory access
    # before the first product.
    at = records + inside // size * RECORD
    return (
        first + inside % size,
        tl.load(at),
        tl.load(at + 1),
        tl.load(at + 2),
        tl.load(at + 3),
        tl.load(at + 4),
    )


@triton.jit
def locate(blocks, slots, number, mask, BY_SLOT: tl.constexpr):
    """Return the input block and the slot of an entry of the list."""
    block = tl.load(blocks + number, mask=mask, other=0)
    slot = number
    if BY_SLOT:
        slot = tl.load(slots + number, mask=mask, other=0)
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
    in_batch,
    x_feature,
    B: tl.constexpr,
    BK: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BY_SLOT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add the products of the entries [start, end) of one list to `acc`.

    `block` and `slot` are those of the first entry, for steps of at most one block.
    """
    n = tl.arange(0, B)
    # The position of a block is read one step ahead. Read in its own step it would be a second
    # level of loads, which would share the stages of the pipeline.
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
            a = tl.load(x_at, mask=in_batch, other=0.0)
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
            # Both are masked past the end of the list: zero times infinity is not zero.
            a = tl.load(x_at, mask=live[None, :] & in_batch, other=0.0)
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
    records,
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
):
    """Write y [batch, rows * B], contiguous, of x [batch, any] with strides (x_sample, x_feature).

    w: the values [nnz, B, B] in the dtype of x; TRANSPOSED for forward.
    blocks: the lists of all rows; slots: the slots of their values, BY_SLOT if in another order.
    BM samples, BK inputs at a step.
    """
    tile, row, start, end, block, slot = load_record(records, batch, rows, group, BM)
    m = tile * BM + tl.arange(0, BM)
    # A mask, not clamped positions, which the compiler would not know to be contiguous.
    in_batch = (m < batch)[:, None]
    x_rows = x + m.to(tl.int64)[:, None] * x_sample
    out = row * B + tl.arange(0, B)
    acc = tl.zeros((BM, B), dtype=tl.float32)
    if HAS_BIAS:
        acc += tl.load(bias + out).to(tl.float32)[None, :]
    acc = sum_blocks(
        acc, x_rows, w, blocks, slots, start, end, block, slot, in_batch, x_feature,
        B, BK, TRANSPOSED, BY_SLOT, PRECISION,
    )  # fmt: skip
    y_at = y + m.to(tl.int64)[:, None] * (rows * B) + out[None, :]
    tl.store(y_at, acc.to(y.dtype.element_ty), mask=in_batch)


@triton.jit(do_not_specialize=["batch", "rows", "group"])
def rows_tma_kernel(
    x,
    w,
    y,
    bias,
    records,
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
    """Compute `rows_kernel` through the copy engine (TMA): one instruction loads a tile.

    For 16 bits and BK <= B.

    x [batch, any], w [nnz * B, B] and y [batch, rows * B] are descriptors. Samples past the end
    load as zeros and are not stored.
    """
    tile, row, start, end, block, slot = load_record(records, batch, rows, group, BM)
    PARTS: tl.constexpr = B // BK
    last = tl.maximum(end - 1, start)
    acc = tl.zeros((BM, B), dtype=tl.float32)
    if HAS_BIAS:
        acc += tl.load(bias + row * B + tl.arange(0, B)).to(tl.float32)[None, :]
    for step in range(start * PARTS, end * PARTS):
        k = step % PARTS * BK
        a = x.load([tile * BM, block * B + k])
        if TRANSPOSED:
            b = w.load([slot * B, k]).T
        else:
            b = w.load([slot * B + k, 0])
        acc = tl.dot(a, b, acc)
        following = tl.minimum((step + 1) // PARTS, last)
        block, slot = locate(blocks, slots, following, True, BY_SLOT)
    y.store([tile * BM, row * B], acc.to(y.dtype))


# ---- the gradient of the values ----


@triton.jit
def sum_samples(
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
    """Compute the product [M, B] of columns of x and of dy over samples, and the sums of dy's
    columns, [SUMS, B] with equal rows.

    The sums are a product with ones, which reads dy's tile from shared memory like the other. If it
    were also loaded to registers, the pipeline would lose a buffer (Triton 3.7): the next copy
    would overwrite it while Hopper's tensor cores still read.
    """
    acc = tl.zeros((M, B), dtype=tl.float32)
    sums = tl.zeros((SUMS, B), dtype=tl.float32)
    ones = tl.full((SUMS, BT), 1.0, dtype=tl.float32).to(dy_columns.dtype.element_ty)
    for t in range(first, last, BT):
        sample = (t + tl.arange(0, BT)).to(tl.int64)
        in_range = sample < last
        a = tl.load(x_columns + sample[None, :] * x_sample, mask=in_range[None, :], other=0.0)
        b = tl.load(dy_columns + sample[:, None] * dy_sample, mask=in_range[:, None], other=0.0)
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
    slots,
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
    BY_SLOT: tl.constexpr,
    SUMS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write dw [parts, nnz, B, B], by slots, each part the sum over `steps` times BT samples.

    A program computes up to J blocks of one block row: the J gathered columns of X are the rows (M)
    of the tensor core's tile, the block row of dY its columns (N), and samples the sum (K), so that
    dY is read once for J blocks. The number of programs depends on the sizes alone
    (`configurations.chunks`).

    SUMS: the rows of a tile of the tensor cores; the first program of each block row then also sums
    its columns of dy to db [parts, height]. 1: db is not written.
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
    # Visible multiples of BT, so that the compiler copies 16 bytes at a time along the samples.
    first = part * steps * BT
    last = tl.minimum(batch, first + steps * BT)
    M: tl.constexpr = J * B
    if SUMS > 1:
        if start == tl.load(ptr + row):
            acc, sums = sum_samples(
                x_columns, dy_columns, first, last, x_sample, dy_sample, M, B, BT, SUMS, PRECISION
            )
            tl.store(db + part.to(tl.int64) * height + row * B + n, tl.sum(sums, 0) / SUMS)
        else:
            acc, _ = sum_samples(
                x_columns, dy_columns, first, last, x_sample, dy_sample, M, B, BT, 1, PRECISION
            )
    else:
        acc, _ = sum_samples(
            x_columns, dy_columns, first, last, x_sample, dy_sample, M, B, BT, 1, PRECISION
        )
    if BY_SLOT:  # read here, so that it takes no registers before
        slot = tl.load(slots + slot, mask=live, other=0)
    at = (part.to(tl.int64) * nnz + slot)[:, None] * (B * B) + n[None, :] * B + (m % B)[:, None]
    tl.store(dw + at, acc.to(dw.dtype.element_ty), mask=live[:, None])


@triton.jit
def sum_samples_tma(
    dy,
    x,
    first,
    last,
    row,
    block,
    other,
    B: tl.constexpr,
    J: tl.constexpr,
    BT: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Compute the products [B, B] of columns of dy and of one or two blocks of columns of x over
    samples, and the sums of dy's columns, [B, 16] with equal columns.

    dy's tile is the left operand, so that its sums take a product of 16 columns.
    """
    acc = tl.zeros((B, B), dtype=tl.float32)
    acc_other = tl.zeros((B, B), dtype=tl.float32)
    sums = tl.zeros((B, 16), dtype=tl.float32)
    ones = tl.full((BT, 16), 1.0, dtype=tl.float32).to(dy.dtype)
    for t in range(first, last, BT):
        a = dy.load([t, row * B]).T
        acc = tl.dot(a, x.load([t, block * B]), acc)
        if J == 2:
            acc_other = tl.dot(a, x.load([t, other * B]), acc_other)
        if SUMS:
            sums = tl.dot(a, ones, sums)
    return acc, acc_other, sums


@triton.jit(do_not_specialize=["batch", "steps", "nnz", "height"])
def gradient_tma_kernel(
    dy,
    x,
    dw,
    db,
    chunks,
    ptr,
    blocks,
    slots,
    batch,
    steps,
    nnz,
    height,
    B: tl.constexpr,
    J: tl.constexpr,
    BT: tl.constexpr,
    BY_SLOT: tl.constexpr,
    SUMS: tl.constexpr,
):
    """Compute `gradient_kernel` through the copy engine (TMA), for 16 bits and J of 1 or 2.

    dy [batch, height] and x [batch, any] are descriptors. Samples past the end load as zeros.
    """
    chunk = tl.program_id(0)
    row = tl.load(chunks + chunk)
    if row < 0:
        return
    part = tl.program_id(1)
    start = tl.load(chunks + tl.num_programs(0) + chunk)
    end = tl.load(ptr + row + 1)
    # A second block that is not there is computed from block 0, and not stored.
    block, slot = locate(blocks, slots, start, start < end, BY_SLOT)
    other, other_slot = locate(blocks, slots, start + 1, start + 1 < end, BY_SLOT)
    first = part * steps * BT
    last = tl.minimum(batch, first + steps * BT)
    m = tl.arange(0, B)
    if SUMS:
        if start == tl.load(ptr + row):
            acc, acc_other, sums = sum_samples_tma(
                dy, x, first, last, row, block, other, B, J, BT, True
            )
            tl.store(db + part.to(tl.int64) * height + row * B + m, tl.sum(sums, 1) / 16)
        else:
            acc, acc_other, _ = sum_samples_tma(
                dy, x, first, last, row, block, other, B, J, BT, False
            )
    else:
        acc, acc_other, _ = sum_samples_tma(dy, x, first, last, row, block, other, B, J, BT, False)
    part_dw = dw + part.to(tl.int64) * nnz * (B * B) + m[:, None] * B + m[None, :]
    dtype = dw.dtype.element_ty
    if start < end:
        tl.store(part_dw + slot.to(tl.int64) * (B * B), acc.to(dtype))
    if J == 2 and start + 1 < end:
        tl.store(part_dw + other_slot.to(tl.int64) * (B * B), acc_other.to(dtype))


# ---- values to and from a dense matrix ----


@triton.jit(do_not_specialize=["first"])
def move_kernel(
    values,
    matrix,
    row_ptr,
    cols,
    slots,
    first,
    width,
    B: tl.constexpr,
    N: tl.constexpr,
    BY_SLOT: tl.constexpr,
    COLLECT: tl.constexpr,
):
    """Fill the matrix [any, width], whose rows are those from block row `first` on, with the values
    [nnz, B, B] and zeros; or COLLECT the values from it. Both convert to the dtype of what they
    write.

    A program moves one row of the matrix, N entries at a step, so programs that run at the same
    time read and write adjacent memory, whatever the size of the blocks.
    """
    row = tl.program_id(0)
    block_row, inside = first + row // B, row % B
    line = matrix + row.to(tl.int64) * width
    start = tl.load(row_ptr + block_row)
    count = (tl.load(row_ptr + block_row + 1) - start) * B
    if not COLLECT:
        for at in range(0, width, N):
            place = at + tl.arange(0, N)
            zeros = tl.zeros((N,), dtype=matrix.dtype.element_ty)
            tl.store(line + place, zeros, mask=place < width)
        tl.debug_barrier()  # other threads of the program write values over the zeros
    for at in range(0, count, N):
        entry = at + tl.arange(0, N)
        mask = entry < count
        col, slot = locate(cols, slots, start + entry // B, mask, BY_SLOT)
        place = line + col * B + entry % B
        value = values + slot.to(tl.int64) * (B * B) + inside * B + entry % B
        if COLLECT:
            tl.store(value, tl.load(place, mask=mask).to(values.dtype.element_ty), mask=mask)
        else:
            tl.store(place, tl.load(value, mask=mask).to(matrix.dtype.element_ty), mask=mask)
