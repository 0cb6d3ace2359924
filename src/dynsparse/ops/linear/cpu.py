"""Sparse linear products on the CPU, through the compiled kernels (csrc/linear.cpp).

Forward and backward take two-dimensional float32 tensors of any strides; nothing is copied to
make them contiguous. `naive.py` is the same in plain torch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dynsparse.ops import native
from dynsparse.pattern import PatternIndex

__all__ = ["available", "backward", "forward"]


def available(x: Tensor, values: Tensor) -> bool:
    """Whether the kernels serve these tensors: on the CPU, float32 values, a library loaded."""
    return (
        x.device.type == "cpu"
        and values.device.type == "cpu"
        and values.dtype is torch.float32
        and native.load() is not None
    )


def _sizes(values: Tensor, index: PatternIndex) -> tuple[int, int, int]:
    """(out, in, block size)."""
    block = 1 if values.dim() == 1 else values.shape[-1]
    return (len(index.row_ptr) - 1) * block, (len(index.col_ptr) - 1) * block, block


def _check(status: int) -> None:
    if status:
        raise MemoryError("no memory for the packed activations of a sparse product")


def forward(x: Tensor, values: Tensor, index: PatternIndex, bias: Tensor | None) -> Tensor:
    """y [B, out] = x W^T + bias.

    Args:
        x: [B, in] float32, any strides.
        values: [nnz] or [nnz, b, b] float32.
        index: the pattern's index tensors, int32.
        bias: [out] float32, or None.

    Raises:
        MemoryError: no scratch memory.
    """
    library = native.load()
    assert library is not None
    out, in_features, block = _sizes(values, index)
    values = values.contiguous()
    if bias is not None:
        bias = bias.contiguous()
    y = x.new_empty((len(x), out))
    status = library.dynsparse_linear_forward(
        x.data_ptr(),
        *x.stride(),
        values.data_ptr(),
        index.row_ptr.data_ptr(),
        index.cols.data_ptr(),
        None if bias is None else bias.data_ptr(),
        y.data_ptr(),
        len(x),
        out,
        in_features,
        block,
        torch.get_num_threads(),
    )
    _check(status)
    return y


def backward(
    dy: Tensor,
    x: Tensor,
    values: Tensor,
    index: PatternIndex,
    need_input: bool,
    need_values: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """(dx [B, in], dvalues like values): dy W, and dy^T x at the pattern's blocks only.

    One call for both packs dy once. What is not needed is None.

    Args:
        dy: [B, out] float32, any strides.
        x: [B, in] float32, any strides.
        values, index: as for `forward`.

    Raises:
        MemoryError: no scratch memory.
    """
    if not (need_input or need_values):
        return None, None
    library = native.load()
    assert library is not None
    out, in_features, block = _sizes(values, index)
    values = values.contiguous()
    dx = dy.new_empty((len(dy), in_features)) if need_input else None
    dvalues = torch.empty_like(values) if need_values else None
    status = library.dynsparse_linear_backward(
        dy.data_ptr(),
        *dy.stride(),
        x.data_ptr(),
        *x.stride(),
        values.data_ptr(),
        index.row_ptr.data_ptr(),
        index.cols.data_ptr(),
        index.col_ptr.data_ptr(),
        index.csc_rows.data_ptr(),
        index.csc_perm.data_ptr(),
        None if dx is None else dx.data_ptr(),
        None if dvalues is None else dvalues.data_ptr(),
        len(dy),
        out,
        in_features,
        block,
        torch.get_num_threads(),
    )
    _check(status)
    return dx, dvalues
