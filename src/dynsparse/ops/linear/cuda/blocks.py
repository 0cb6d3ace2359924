"""Sparse linear products over blocks on CUDA devices: the door to the Triton kernels.

`forward` and `backward` are called like those of `kernels/`. Tiles go to the tensor cores in the
activations' own type, sums are float32 and are rounded once; float32 operands meet as three
products of tf32, or as one (`precision.py`). No sum depends on the order in which programs run:
the same operands give the same bits.

Source: blocks as tiles of a dense product follow Gale et al. 2022, "MegaBlocks: Efficient Sparse
Training with Mixture-of-Experts", section 5; the lists by rows and by columns are those of the
kernels for CPUs.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from dynsparse.ops.linear.cuda.chip import runs_triton
from dynsparse.ops.linear.cuda.configurations import BLOCKS
from dynsparse.ops.linear.layer_index import LayerIndex

__all__ = ["DTYPES", "backward", "forward", "serves"]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def serves(p: LayerIndex, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels compute this layer for activations of `dtype` on `device`: blocks of 16,
    32, 64 or 128, and no float64. Says once, by a warning, what a CUDA device lacks for them."""
    return p.block_size in BLOCKS and dtype in DTYPES and runs_triton(device)


def _launch() -> ModuleType:
    """The kernels; Triton is imported when they are first needed."""
    from dynsparse.ops.linear.cuda import launch

    return launch


def forward(
    x: Tensor,
    values: Tensor,
    p: LayerIndex,
    bias: Tensor | None,
    keep: list[Tensor] | None = None,
) -> Tensor:
    """y [B, out] = x W^T + bias, the dtype of x, contiguous.

    Args:
        x: [B, in] float32, bfloat16 or float16; any strides.
        values: [nnz, b, b], the dtype of x, or float32, which is rounded to it first.
        p: the layer's index.
        bias: [out], any floating point type, or None.
        keep: takes the values as they were rounded for `backward`, if that is to have them.
    """
    rounded = values.to(x.dtype).contiguous()
    if keep is not None and rounded.dtype is not values.dtype:
        keep.append(rounded)
    return _launch().forward(x, rounded, p, bias)


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
    """(dx [B, in] of the dtype of dy, dvalues like values); what is not needed is None.

    Args:
        dy: [B, out] float32, bfloat16 or float16; any strides.
        x: [B, in], the dtype of dy; any strides.
        values, p: as for `forward`. Where `values` are float32 their gradient is not rounded.
        rounded: what `forward` has kept.
        sums: takes the gradient of the bias, float32 [out], where the kernel has made it beside
            that of 16-bit values: dY is read for it anyway.
    """
    dx = dw = None
    if need_input:
        if rounded is None or rounded.dtype is not dy.dtype:
            rounded = values.to(dy.dtype).contiguous()
        dx = _launch().grad_input(dy, rounded, p)
    if need_values:
        dw = _launch().grad_weight(dy, x, p, values.dtype, sums=sums)
    return dx, dw
