"""The products on a CPU, one pair of passes per kind of `products.route`.

- `sparse` (csrc/linear/linear.cpp): over the non-zeros; the batch is the vector dimension.
- `small` (csrc/linear/few): a few samples; the features are the vector dimension. Bit masks, one
  bit per element of the matrix, say which columns of single elements are present: the work is that
  of a dense product, but only the values are read, which suits densities from about 0.1 on. Blocks
  of 4 to 128 fill vectors with the rows of a block.
- `bfloat16` (csrc/linear/bf16): over the non-zeros of bfloat16 activations. Sums are float32 and
  rounded once. Blocks of 16, 32, 64 and 128 run on the processor's matrix units (AMX) or dot
  products of pairs (AVX-512-bf16), which round float32 values; everything else is widened to
  float32 a few cache lines at a time, so that no activations exist in both dtypes.
- `dense`: `cpu_dense.py`. `torch`: `naive.py`, for other dtypes and without compiled kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dynsparse._core import native
from dynsparse.ops.linear import cpu_dense, naive
from dynsparse.ops.linear.layer_index import LayerIndex
from dynsparse.ops.linear.panels import column_panels, make_row_panels, masks_of, row_panels
from dynsparse.ops.torch_internals import empty_on_cpu
from dynsparse.pattern.index_arrays import to_slot_order

_FLOAT32, _BFLOAT16 = torch.float32, torch.bfloat16
_threads = torch.get_num_threads
_Gradients = tuple[Tensor | None, Tensor | None]


class Kernels(NamedTuple):
    """The passes of a kind.

    Attributes:
        forward: (x, values, p, bias) -> y [B, out] = x W^T + bias.
        backward: (dy, x, values, p, need_input, need_values, dbias=None) -> (dx [B, in], dvalues
            like values), of dy W, and of dy^T x at the blocks of the pattern; None if not needed.
            `dbias`, float32 [out], contiguous, takes dy summed over the samples.

    x [B, in] and dy [B, out] have any strides. They, the values [nnz] or [nnz, b, b] and the bias
    [out] are float32, values and bias contiguous; `bfloat16` takes bfloat16 activations with values
    and bias of either dtype, and `torch` takes any. `p` is the `LayerIndex`. Compiled kernels raise
    MemoryError if there is no scratch memory.
    """

    forward: Callable[..., Tensor]
    backward: Callable[..., _Gradients]


def _call_forward(
    function: Any,
    x: Tensor,
    values: tuple[int, ...],
    layout: tuple[int | None, ...],
    p: LayerIndex,
    bias: Tensor | None,
    y: Tensor,
) -> Tensor:
    """Call a compiled forward pass, which writes y.

    Args:
        values: their address, and further arguments that belong to it.
        layout: addresses of what the function reads of the index besides `row_ptr` and `cols`.
    """
    status = function(
        x.data_ptr(),
        *x.stride(),
        *values,
        p.row_ptr.data_ptr(),
        p.cols.data_ptr(),
        *layout,
        None if bias is None else bias.data_ptr(),
        y.data_ptr(),
        x.shape[0],
        p.out_features,
        p.in_features,
        p.block_size,
        _threads(),
    )
    if status:
        raise MemoryError("no scratch memory for a sparse product")
    return y


def _call_backward(
    function: Any,
    dy: Tensor,
    x: Tensor,
    values: tuple[int, ...],
    layout: tuple[int | None, ...],
    p: LayerIndex,
    dx: Tensor | None,
    dvalues: Tensor | None,
    dbias: Tensor | None,
) -> None:
    """Call a compiled backward pass, which packs dy once and writes dx, dvalues and dbias.

    Args:
        values, layout: as for `_call_forward`.
    """
    status = function(
        dy.data_ptr(),
        *dy.stride(),
        x.data_ptr(),
        *x.stride(),
        *values,
        p.row_ptr.data_ptr(),
        p.cols.data_ptr(),
        *layout,
        None if dx is None else dx.data_ptr(),
        None if dvalues is None else dvalues.data_ptr(),
        None if dbias is None else dbias.data_ptr(),
        dy.shape[0],
        p.out_features,
        p.in_features,
        p.block_size,
        _threads(),
    )
    if status:
        raise MemoryError("no scratch memory for the gradients of a sparse product")


def _sparse_forward(x: Tensor, values: Tensor, p: LayerIndex, bias: Tensor | None) -> Tensor:
    """Forward of the kinds `sparse` and `bfloat16`."""
    batch, out = x.shape[0], p.out_features
    y = empty_on_cpu((batch, out), (out, 1), x.dtype)
    panels = row_panels(p, batch)
    layout = p.slots.data_ptr(), None if panels is None else panels.data_ptr()
    library: Any = native.load()
    if x.dtype is _FLOAT32:
        function = library.dynsparse_linear_forward
        return _call_forward(function, x, (values.data_ptr(),), layout, p, bias, y)
    values = values.contiguous()
    bias = None if bias is None else bias.to(_FLOAT32).contiguous()
    function = library.dynsparse_linear_forward_bf16
    operand = values.data_ptr(), values.dtype is _BFLOAT16
    return _call_forward(function, x, operand, layout, p, bias, y)


def _sparse_backward(
    dy: Tensor,
    x: Tensor,
    values: Tensor,
    p: LayerIndex,
    need_input: bool,
    need_values: bool,
    dbias: Tensor | None = None,
) -> _Gradients:
    """Backward of the kinds `sparse` and `bfloat16`."""
    if not (need_input or need_values or dbias is not None):
        return None, None
    batch, width = dy.shape[0], p.in_features
    dx = empty_on_cpu((batch, width), (width, 1), dy.dtype) if need_input else None
    dvalues = empty_on_cpu(*p.values_layout, values.dtype) if need_values else None
    rows = row_panels(p, batch) if need_values else None
    order = p.column_order() if need_input else (p.cols, p.cols)  # not read without dx
    columns = column_panels(p, batch, order) if need_input else None
    layout = (
        p.slots.data_ptr(),
        p.col_ptr.data_ptr(),
        order[0].data_ptr(),
        order[1].data_ptr(),
        None if rows is None else rows.data_ptr(),
        None if columns is None else columns.data_ptr(),
    )
    library: Any = native.load()
    function = library.dynsparse_linear_backward
    operand: tuple[int, ...] = (values.data_ptr(),)
    if dy.dtype is _BFLOAT16:
        values = values.contiguous()
        function = library.dynsparse_linear_backward_bf16
        operand = values.data_ptr(), values.dtype is _BFLOAT16
    _call_backward(function, dy, x, operand, layout, p, dx, dvalues, dbias)
    return dx, dvalues


def _small_forward(x: Tensor, values: Tensor, p: LayerIndex, bias: Tensor | None) -> Tensor:
    out = p.out_features
    values = p.by_rows(values)
    y = empty_on_cpu((x.shape[0], out), (out, 1), _FLOAT32)
    masks = masks_of(p)
    layout = (None if masks is None else masks.data_ptr(),)
    library: Any = native.load()
    function = library.dynsparse_small_forward
    return _call_forward(function, x, (values.data_ptr(),), layout, p, bias, y)


def _small_backward(
    dy: Tensor,
    x: Tensor,
    values: Tensor,
    p: LayerIndex,
    need_input: bool,
    need_values: bool,
    dbias: Tensor | None = None,
) -> _Gradients:
    width = p.in_features
    values = p.by_rows(values)
    dx = empty_on_cpu((dy.shape[0], width), (width, 1), _FLOAT32) if need_input else None
    dvalues = empty_on_cpu(*p.values_layout, _FLOAT32) if need_values else None
    masks = masks_of(p)
    layout = (None if masks is None else masks.data_ptr(),)
    library: Any = native.load()
    function = library.dynsparse_small_backward
    _call_backward(function, dy, x, (values.data_ptr(),), layout, p, dx, dvalues, dbias)
    return dx, None if dvalues is None else to_slot_order(dvalues, p.slots)


def _torch_forward(x: Tensor, values: Tensor, p: LayerIndex, bias: Tensor | None) -> Tensor:
    return naive.forward(x, values, p.index, bias)


def _torch_backward(
    dy: Tensor,
    x: Tensor,
    values: Tensor,
    p: LayerIndex,
    need_input: bool,
    need_values: bool,
    dbias: Tensor | None = None,
) -> _Gradients:
    if dbias is not None:
        torch.sum(dy, 0, out=dbias)
    dx = naive.grad_input(dy, values, p.index) if need_input else None
    return dx, naive.grad_weight(dy, x, values, p.index) if need_values else None


KERNELS = {
    "sparse": Kernels(_sparse_forward, _sparse_backward),
    "small": Kernels(_small_forward, _small_backward),
    "dense": Kernels(cpu_dense.forward, cpu_dense.backward),
    "bfloat16": Kernels(_sparse_forward, _sparse_backward),
    "torch": Kernels(_torch_forward, _torch_backward),
}


def dot_products(dy: Tensor, x: Tensor, row_ptr: Tensor, cols: Tensor) -> Tensor:
    """Compute dy^T x at single positions: float32 [nnz].

    Args:
        dy: [B, out] float32, any strides.
        x: [B, in] float32, any strides.
        row_ptr, cols: the positions as a CSR index: int32 [out + 1] and [nnz].

    Raises:
        MemoryError: no scratch memory.
    """
    products = x.new_empty(len(cols))
    panels = make_row_panels(row_ptr, cols, x.shape[1], len(x))
    unread: list[None] = [None] * 4
    status = native.call(
        "dynsparse_linear_backward",
        *(dy, *dy.stride(), x, *x.stride(), None, row_ptr, cols),
        *(*unread, panels, None, None, products, None),
        *(dy.shape[0], dy.shape[1], x.shape[1], 1, _threads()),
    )
    if status:
        raise MemoryError("no scratch memory for a sparse product")
    return products
