"""Sparse linear products on the CPU, through the compiled kernels (csrc/linear/linear.cpp).

Forward and backward take two-dimensional float32 tensors of any strides; nothing is copied to
make them contiguous. `naive.py` is the same in plain torch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dynsparse import native
from dynsparse.ops.eager import empty_on_cpu
from dynsparse.ops.linear.kernels.panels import by_columns, by_rows, for_once
from dynsparse.ops.linear.layer_index import LayerIndex

_FLOAT32 = torch.float32
_threads = torch.get_num_threads


def _check(status: int) -> None:
    if status:
        raise MemoryError("no memory for the packed activations of a sparse product")


def forward(x: Tensor, values: Tensor, p: LayerIndex, bias: Tensor | None) -> Tensor:
    """y [B, out] = x W^T + bias.

    Args:
        x: [B, in] float32, any strides.
        values: [nnz] or [nnz, b, b] float32, contiguous.
        p: the layer's index.
        bias: [out] float32, contiguous, or None.

    Raises:
        MemoryError: no scratch memory.
    """
    library = native.load()
    assert library is not None
    batch, out = x.shape[0], p.out_features
    y = empty_on_cpu((batch, out), (out, 1), _FLOAT32)
    panels = by_rows(p, batch)
    status = library.dynsparse_linear_forward(
        x.data_ptr(),
        *x.stride(),
        values.data_ptr(),
        p.row_ptr.data_ptr(),
        p.cols.data_ptr(),
        p.slots.data_ptr() or None,
        None if panels is None else panels.data_ptr(),
        None if bias is None else bias.data_ptr(),
        y.data_ptr(),
        batch,
        out,
        p.in_features,
        p.block_size,
        _threads(),
    )
    if status:
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
    """(dx [B, in], dvalues like values): dy W, and dy^T x at the pattern's blocks only.

    One call for all packs dy once. What is not needed is None.

    Args:
        dy: [B, out] float32, any strides.
        x: [B, in] float32, any strides.
        values, p: as for `forward`.
        dbias: float32 [out], contiguous, takes dy summed over the samples.

    Raises:
        MemoryError: no scratch memory.
    """
    if not (need_input or need_values or dbias is not None):
        return None, None
    library = native.load()
    assert library is not None
    batch = dy.shape[0]
    width = p.in_features
    dx = empty_on_cpu((batch, width), (width, 1), _FLOAT32) if need_input else None
    dvalues = empty_on_cpu(*p.values_layout, _FLOAT32) if need_values else None
    row_panels = by_rows(p, batch) if need_values else None
    order = p.order or (p.by_columns() if need_input else (p.cols, p.cols))  # else not read
    col_panels = by_columns(p, batch, order) if need_input else None
    csc_rows, csc_perm = order
    status = library.dynsparse_linear_backward(
        dy.data_ptr(),
        *dy.stride(),
        x.data_ptr(),
        *x.stride(),
        values.data_ptr(),
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
        batch,
        p.out_features,
        p.in_features,
        p.block_size,
        _threads(),
    )
    if status:
        _check(status)
    return dx, dvalues


def dot_products(dy: Tensor, x: Tensor, row_ptr: Tensor, cols: Tensor) -> Tensor:
    """dy^T x at single positions: float32 [nnz].

    Args:
        dy: [B, out] float32, any strides.
        x: [B, in] float32, any strides.
        row_ptr, cols: the positions as a CSR index: int32 [out + 1] and [nnz].

    Raises:
        MemoryError: no scratch memory.
    """
    library = native.load()
    assert library is not None
    products = x.new_empty(len(cols))
    panels = for_once(row_ptr, cols, x.shape[1], len(x))
    status = library.dynsparse_linear_backward(
        dy.data_ptr(),
        *dy.stride(),
        x.data_ptr(),
        *x.stride(),
        None,
        row_ptr.data_ptr(),
        cols.data_ptr(),
        None,
        None,
        None,
        None,
        None if panels is None else panels.data_ptr(),
        None,
        None,
        products.data_ptr(),
        None,
        dy.shape[0],
        dy.shape[1],
        x.shape[1],
        1,
        _threads(),
    )
    _check(status)
    return products
