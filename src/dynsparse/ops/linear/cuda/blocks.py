"""Sparse linear products over blocks on CUDA devices, by Triton kernels.

`forward` and `backward` have the interface of `cpu.Kernels`. Tiles are multiplied in the
activations' own type, sums are float32 and rounded once; float32 is multiplied as three products of
tf32, or as one (`chip.precision_of`). No sum depends on the order in which programs run: the same
operands give the same bits.

Source: blocks as tiles of a dense product follow Gale et al. 2022, "MegaBlocks: Efficient Sparse
Training with Mixture-of-Experts", section 5; the lists by rows and by columns are those of the
kernels for CPUs.
"""

from __future__ import annotations

import functools
from types import ModuleType

import torch
from torch import Tensor

from dynsparse.ops.linear.cuda.chip import chip_of, runs_triton
from dynsparse.ops.linear.cuda.configurations import (
    BLOCKS,
    chunks,
    columns_by_length,
    rows_by_length,
    table_of,
)
from dynsparse.ops.linear.layer_index import LayerIndex

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def supports(p: LayerIndex, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels compute this layer for activations of `dtype` on `device`.

    They compute blocks of 16, 32, 64 or 128, and no float64. Warns once if a CUDA device lacks
    something that they need.
    """
    return p.block_size in BLOCKS and dtype in DTYPES and runs_triton(device)


def derive(p: LayerIndex) -> None:
    """Make what the kernels read besides the index, if they compute this layer."""
    device = p.cols.device
    if p.block_size in BLOCKS and runs_triton(device):
        rows_by_length(p)
        columns_by_length(p)
        for dtype in (torch.bfloat16, torch.float32):
            chunks(p, table_of(dtype, chip_of(device)).gradient[p.block_size].blocks)


@functools.cache
def _launch() -> ModuleType:
    """Import the kernels, and with them Triton, when they are first needed."""
    from dynsparse.ops.linear.cuda import launch

    return launch


def ensure_aligned(x: Tensor) -> Tensor:
    """Return `x` [any, any], or a contiguous copy if it cannot be read 16 bytes at a time.

    It cannot for expanded gradients, such as those of `sum`, and slices with unaligned addresses or
    strides. The copy takes a tenth of the time of reading number by number.
    """
    if x.is_contiguous():
        return _align(x)
    unit = 16 // x.element_size()
    steps = [step for step, size in zip(x.stride(), x.shape, strict=True) if size > 1]
    contiguous = steps.count(1) == 1 and all(s == 1 or (s > 0 and s % unit == 0) for s in steps)
    return _align(x if contiguous or not steps else x.contiguous())


def _align(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format) if x.data_ptr() % 16 else x


def forward(
    x: Tensor,
    values: Tensor,
    p: LayerIndex,
    bias: Tensor | None,
    keep: list[Tensor] | None = None,
) -> Tensor:
    """Compute y [B, out] = x W^T + bias, in the dtype of x, contiguous.

    Args:
        x: [B, in] float32, bfloat16 or float16; any strides.
        values: [nnz, b, b], the dtype of x, or float32, which is rounded to it first.
        p: the layer's index.
        bias: [out], any floating point type and stride, or None.
        keep: the rounded values are appended to it, for `backward`.
    """
    rounded = _align(values.to(x.dtype).contiguous())
    if keep is not None and rounded.dtype is not values.dtype:
        keep.append(rounded)
    bias = None if bias is None else bias.contiguous()
    return _launch().forward(ensure_aligned(x), rounded, p, bias)


def backward(
    dy: Tensor,
    x: Tensor,
    values: Tensor,
    p: LayerIndex,
    need_input: bool,
    need_values: bool,
    rounded: Tensor | None = None,
    sums: list[Tensor] | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Compute (dx [B, in] in the dtype of dy, dvalues like values); None if not needed.

    Args:
        dy: [B, out] float32, bfloat16 or float16; any strides.
        x: [B, in], the dtype of dy; any strides.
        values, p: as for `forward`. Where `values` are float32 their gradient is not rounded.
        rounded: the values that `forward` appended to `keep`.
        sums: the gradient of the bias, float32 [out], is appended to it if the kernel computes it,
            for 16-bit activations: dY is read anyway.
    """
    dx = dw = None
    dy = ensure_aligned(dy)
    if need_input:
        if rounded is None or rounded.dtype is not dy.dtype:
            rounded = _align(values.to(dy.dtype).contiguous())
        dx = _launch().grad_input(dy, rounded, p)
    if need_values:
        dw = _launch().grad_weight(dy, ensure_aligned(x), p, values.dtype, sums=sums)
    return dx, dw
