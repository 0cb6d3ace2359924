"""The Triton kernel of growth scores, which pools the dense gradient where it is computed.

Imports Triton; `on_device.block_scores` imports this file when it is needed.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from dynsparse.ops.linear.cuda.chip import Chip, chip_of, precision_of
from dynsparse.ops.linear.cuda.launch import start


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
):
    """Write scores [height / B, width / B] of |dy^T x| [height, width], BO outputs by BI inputs.

    MANY: whether the products of several pairs are added up. pairs, int64 [3, many], holds for each
    the number of samples, and the offsets of its entries from `dy` and `x`, multiples of 16.
    """
    # `group` tiles of outputs take all inputs before the next tiles, for the L2 cache.
    tiles_o = tl.cdiv(height, BO)
    tiles_i = tl.cdiv(width, BI)
    first = tl.program_id(0) // (group * tiles_i) * group
    inside = tl.program_id(0) % (group * tiles_i)
    size = tl.minimum(tiles_o - first, group)
    tile_o = first + inside % size
    tile_i = inside // size
    o = tile_o * BO + tl.arange(0, BO)
    i = tile_i * BI + tl.arange(0, BI)
    out_mask = (o < height)[:, None]
    in_mask = (i < width)[None, :]
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
        for t in range(0, samples, BT):
            sample = (t + tl.arange(0, BT)).to(tl.int64)
            live = sample < samples
            mask = live[None, :] & out_mask
            a = tl.load(dy_pair + sample[None, :] * dy_sample, mask=mask, other=0.0)
            mask = live[:, None] & in_mask
            b = tl.load(x_pair + sample[:, None] * x_sample, mask=mask, other=0.0)
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
    magnitude = tl.reshape(tl.abs(acc), (BO // B, B, BI // B, B))
    if POOLING == "max":
        pooled = tl.max(tl.max(magnitude, 1), 2)
    else:
        pooled = tl.sum(tl.sum(magnitude, 1), 2)
        if POOLING == "avg":
            pooled = pooled / (B * B)
    row = tile_o * (BO // B) + tl.arange(0, BO // B)
    col = tile_i * (BI // B) + tl.arange(0, BI // B)
    inside = (row < height // B)[:, None] & (col < width // B)[None, :]
    tl.store(scores + row[:, None] * (width // B) + col[None, :], pooled, mask=inside)


TILE = 128
"""Outputs and inputs of a program."""

# Alignment of addresses in bytes: 16 entries of float32, so that the compiler may copy 16 bytes at
# a time.
_ALIGNMENT = 64


def _equalize_strides(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors, or contiguous copies if strides differ or an address is not aligned."""
    if len({t.stride() for t in tensors}) == 1 and not any(
        t.data_ptr() % _ALIGNMENT for t in tensors
    ):
        return list(tensors)
    return [t.clone(memory_format=torch.contiguous_format) for t in tensors]


def _offsets(tensors: Sequence[Tensor]) -> list[int]:
    """Return the offset of each tensor from the first, in entries."""
    first = tensors[0]
    return [(t.data_ptr() - first.data_ptr()) // first.element_size() for t in tensors]


def group_of(samples: int, dtype: torch.dtype, chip: Chip) -> int:
    """Return how many tiles of outputs take all tiles of inputs before the next ones.

    Their tiles of dY take up to a third of the L2 cache.
    """
    return max(1, min(8, chip.cache // 3 // (TILE * samples * dtype.itemsize)))


def block_scores(dys: Sequence[Tensor], xs: Sequence[Tensor], b: int, pooling: str) -> Tensor:
    """Return the scores, float32 [out / b, in / b], of pairs dy [batch, out] and x [batch, in].

    All tensors have one dtype; see `on_device.block_scores`.
    """
    many, device = len(xs), xs[0].device
    pairs = None
    if many > 1:
        dys, xs = _equalize_strides(dys), _equalize_strides(xs)
        table = [*map(len, xs), *_offsets(dys), *_offsets(xs)]
        pairs = torch.tensor(table, dtype=torch.int64)
        if device.type == "cuda":  # pinned, so that the host does not wait
            pairs = pairs.pin_memory().to(device, non_blocking=True)
    dy, x = dys[0], xs[0]
    height, width = dy.shape[1], x.shape[1]
    pooled = torch.empty(height // b, width // b, dtype=torch.float32, device=device)
    group = group_of(max(1, max(map(len, xs))), x.dtype, chip_of(device))
    precision = precision_of(x.dtype)
    arguments = (dy, x, pooled, pairs, len(x), many, height, width, group)
    constants = {
        "B": b,
        "BO": TILE,
        "BI": TILE,
        "BT": 16 if precision == "tf32x3" else 128 // x.element_size(),
        "MANY": many > 1,
        "POOLING": pooling,
        "PRECISION": precision,
    }
    grid = (-(-height // TILE) * -(-width // TILE), 1, 1)
    start(scores_kernel, x, grid, (*arguments, *dy.stride(), *x.stride()), constants, warps=8)
    return pooled
