"""The dense gradient, pooled where it is computed and never written."""

import triton
import triton.language as tl


@triton.jit
def meet(
    acc,
    dy_columns,
    x_columns,
    first,
    last,
    dy_sample,
    x_sample,
    out_there,
    in_there,
    BT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`acc` and the product of columns of dy and of x over samples."""
    for t in range(first, last, BT):
        sample = (t + tl.arange(0, BT)).to(tl.int64)
        here = sample < last
        mask = here[None, :] & out_there
        a = tl.load(dy_columns + sample[None, :] * dy_sample, mask=mask, other=0.0)
        mask = here[:, None] & in_there
        b = tl.load(x_columns + sample[:, None] * x_sample, mask=mask, other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=["group"])
def scores_kernel(
    dy,
    x,
    scores,
    pairs,
    batch,
    many,
    height,
    width,
    group,
    dy_sample,
    dy_feature,
    x_sample,
    x_feature,
    B: tl.constexpr,
    BO: tl.constexpr,
    BI: tl.constexpr,
    BT: tl.constexpr,
    MANY: tl.constexpr,
    POOLING: tl.constexpr,
    PRECISION: tl.constexpr,
    TERMS: tl.constexpr,
):
    """scores [height / B, width / B] of |dy^T x| [height, width], BO outputs by BI inputs.

    MANY: the products of several pairs are added up. pairs, int64 [3, many], holds the number of
    samples of each, and how many entries behind `dy` and `x` its own lie, multiples of 16.
    TERMS: how many samples the tensor cores add up at a time, or 0.
    """
    # `group` tiles of outputs meet all of the inputs, for the L2 cache as in `rows.py`.
    tiles_o = tl.cdiv(height, BO)
    tiles_i = tl.cdiv(width, BI)
    first = tl.program_id(0) // (group * tiles_i) * group
    inside = tl.program_id(0) % (group * tiles_i)
    size = tl.minimum(tiles_o - first, group)
    tile_o = first + inside % size
    tile_i = inside // size
    o = tile_o * BO + tl.arange(0, BO)
    i = tile_i * BI + tl.arange(0, BI)
    out_there = (o < height)[:, None]
    in_there = (i < width)[None, :]
    dy_columns = dy + o.to(tl.int64)[:, None] * dy_feature
    x_columns = x + i.to(tl.int64)[None, :] * x_feature
    acc = tl.zeros((BO, BI), dtype=tl.float32)
    for pair in range(many):
        samples = batch
        dy_pair = dy_columns
        x_pair = x_columns
        if MANY:
            samples = tl.load(pairs + pair).to(tl.int32)
            dy_pair += tl.multiple_of(tl.load(pairs + many + pair), 16)
            x_pair += tl.multiple_of(tl.load(pairs + 2 * many + pair), 16)
        if TERMS == 0:
            acc = meet(
                acc, dy_pair, x_pair, 0, samples, dy_sample, x_sample, out_there, in_there, BT,
                PRECISION,
            )  # fmt: skip
        else:
            for t in range(0, samples, TERMS):
                acc += meet(
                    tl.zeros((BO, BI), dtype=tl.float32), dy_pair, x_pair, t,
                    tl.minimum(t + TERMS, samples), dy_sample, x_sample, out_there, in_there, BT,
                    PRECISION,
                )  # fmt: skip
    magnitude = tl.reshape(tl.abs(acc), (BO // B, B, BI // B, B))
    if POOLING == "max":
        pooled = tl.max(tl.max(magnitude, 1), 2)
    else:
        pooled = tl.sum(tl.sum(magnitude, 1), 2)
        if POOLING == "avg":
            pooled = pooled / (B * B)
    row = tile_o * (BO // B) + tl.arange(0, BO // B)
    col = tile_i * (BI // B) + tl.arange(0, BI // B)
    there = (row < height // B)[:, None] & (col < width // B)[None, :]
    tl.store(scores + row[:, None] * (width // B) + col[None, :], pooled, mask=there)
