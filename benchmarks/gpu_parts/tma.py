"""A candidate: the kernel of forward and the gradient of the input through the copy engine (TMA).

One instruction of one thread loads a tile, which takes fewer registers and instructions than a
pointer for each 16 bytes, but the host makes three descriptors for each launch. It joins the
kernels of dynsparse if it wins.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dynsparse.ops.linear import LayerIndex
from dynsparse.ops.linear.cuda.configurations import Rows, columns_by_length, rows_by_length
from dynsparse.ops.linear.cuda.kernels import load_record, locate


@triton.jit(do_not_specialize=["batch", "rows", "group"])
def tma_kernel(
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
    """As `rows_kernel`, for 16-bit blocks of at least BK. x [batch, any], w [nnz * B, B] and
    y [batch, rows * B] are descriptors; samples past the end load as zeros and are not stored."""
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


def rows(
    x: Tensor, values: Tensor, p: LayerIndex, bias: Tensor | None, config: Rows, transposed: bool
) -> Tensor:
    """Forward of contiguous x where `transposed`, the gradient of the input of dy otherwise: 16
    bits, at least one sample and one block."""
    if transposed:
        records, blocks, slots = rows_by_length(p), p.cols, p.slots
    else:
        records, (blocks, slots) = columns_by_length(p), p.by_columns()
    (batch, b), c = (len(x), values.shape[-1]), config
    y = x.new_empty(batch, len(records) * b)
    tma_kernel[(-(-batch // c.samples) * len(records),)](
        TensorDescriptor.from_tensor(x, [c.samples, c.inputs]),
        TensorDescriptor.from_tensor(
            values.view(-1, b), [b, c.inputs] if transposed else [c.inputs, b]
        ),
        TensorDescriptor.from_tensor(y, [c.samples, b]),
        *(bias, records, blocks, slots, batch, len(records), c.group),
        B=b,
        BM=c.samples,
        BK=c.inputs,
        TRANSPOSED=transposed,
        BY_SLOT=len(slots) > 0,
        HAS_BIAS=bias is not None,
        num_warps=c.warps,
        num_stages=c.stages,
    )
    return y
