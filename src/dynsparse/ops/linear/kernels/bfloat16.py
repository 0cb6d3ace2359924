"""Sparse linear products of bfloat16 activations on the CPU (csrc/linear/bf16).

Sums are float32 and rounded once. Blocks of 16, 32, 64 and 128 run on the processor's matrix units
(AMX) or dot products of pairs (AVX-512-bf16) where it has them; everything else is widened to
float32 and rounded a few cache lines at a time, so that no activations exist in both types.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dynsparse import native
from dynsparse.ops.linear.kernels.panels import by_columns, by_rows
from dynsparse.ops.linear.layer_index import LayerIndex


def _check(status: int) -> None:
    if status:
        raise MemoryError("no memory for the packed values of a sparse product")


def forward(x: Tensor, values: Tensor, p: LayerIndex, bias: Tensor | None) -> Tensor:
    """y [B, out] bfloat16 = x W^T + bias.

    Args:
        x: [B, in] bfloat16, any strides.
        values: [nnz] or [nnz, b, b] bfloat16 or float32. Those units round float32 values.
        bias: [out], any floating point type, or None.

    Raises:
        MemoryError: no scratch memory.
    """
    library = native.load()
    assert library is not None
    values = values.contiguous()
    bias = None if bias is None else bias.to(torch.float32).contiguous()
    y = x.new_empty(x.shape[0], p.out_features)
    panels = by_rows(p, x.shape[0])
    status = library.dynsparse_linear_forward_bf16(
        x.data_ptr(),
        *x.stride(),
        values.data_ptr(),
        values.dtype is torch.bfloat16,
        p.row_ptr.data_ptr(),
        p.cols.data_ptr(),
        p.slots.data_ptr() or None,
        None if panels is None else panels.data_ptr(),
        None if bias is None else bias.data_ptr(),
        y.data_ptr(),
        x.shape[0],
        p.out_features,
        p.in_features,
        p.block_size,
        torch.get_num_threads(),
    )
    _check(status)
    return y


def backward(
    dy: Tensor,
    x: Tensor,
    values: Tensor,
    p: LayerIndex,
    need_input: bool,
    need_values: bool,
    dbias: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """(dx [B, in] bfloat16, dvalues like values); what is not needed is None.

    Args:
        dy: [B, out] bfloat16, any strides.
        x: [B, in] bfloat16, any strides.
        values: as for `forward`.
        dbias: as for `sparse.backward`.

    Raises:
        MemoryError: no scratch memory.
    """
    if not (need_input or need_values or dbias is not None):
        return None, None
    library = native.load()
    assert library is not None
    values = values.contiguous()
    dx = dy.new_empty(dy.shape[0], p.in_features) if need_input else None
    dvalues = torch.empty_like(values) if need_values else None
    row_panels = by_rows(p, dy.shape[0]) if need_values else None
    order = p.order or (p.by_columns() if need_input else (p.cols, p.cols))  # else not read
    col_panels = by_columns(p, dy.shape[0], order) if need_input else None
    csc_rows, csc_perm = order
    status = library.dynsparse_linear_backward_bf16(
        dy.data_ptr(),
        *dy.stride(),
        x.data_ptr(),
        *x.stride(),
        values.data_ptr(),
        values.dtype is torch.bfloat16,
        p.row_ptr.data_ptr(),
        p.cols.data_ptr(),
        p.slots.data_ptr() or None,
        p.col_ptr.data_ptr(),
        csc_rows.data_ptr(),
        csc_perm.data_ptr(),
        None if row_panels is None else row_panels.data_ptr(),
        None if col_panels is None else col_panels.data_ptr(),
        None if dx is None else dx.data_ptr(),
        None if dvalues is None else dvalues.data_ptr(),
        None if dbias is None else dbias.data_ptr(),
        dy.shape[0],
        p.out_features,
        p.in_features,
        p.block_size,
        torch.get_num_threads(),
    )
    _check(status)
    return dx, dvalues
