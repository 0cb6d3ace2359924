"""Sparse linear products of a few samples on the CPU (csrc/linear/few).

The other kernels make the batch the vector dimension; here it is the features. For single elements
bit masks, made once per pattern, say which columns are present: one bit per element of the matrix.
The cost is that of a dense product, but only the values are read, which suits densities from about
0.1 on. Blocks of 4 to 128 fill vectors with rows of a block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dynsparse import native
from dynsparse.encoding import by_slots
from dynsparse.ops.eager import empty_on_cpu
from dynsparse.ops.linear.kernels.masks import masks_of
from dynsparse.ops.linear.layer_index import LayerIndex

_FLOAT32 = torch.float32
_threads = torch.get_num_threads


def forward(x: Tensor, values: Tensor, p: LayerIndex, bias: Tensor | None) -> Tensor:
    """y [B, out] = x W^T + bias: see `sparse.forward`."""
    library = native.load()
    assert library is not None
    masks, batch, out = masks_of(p), x.shape[0], p.out_features
    values = p.by_rows(values)
    y = empty_on_cpu((batch, out), (out, 1), _FLOAT32)
    status = library.dynsparse_small_forward(
        x.data_ptr(),
        *x.stride(),
        values.data_ptr(),
        p.row_ptr.data_ptr(),
        p.cols.data_ptr(),
        None if masks is None else masks.data_ptr(),
        None if bias is None else bias.data_ptr(),
        y.data_ptr(),
        batch,
        out,
        p.in_features,
        p.block_size,
        _threads(),
    )
    if status:
        raise MemoryError("no memory for the packed activations of a sparse product")
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
    """(dx [B, in], dvalues like values): see `sparse.backward`."""
    library = native.load()
    assert library is not None
    masks, batch = masks_of(p), dy.shape[0]
    values = p.by_rows(values)
    width = p.in_features
    dx = empty_on_cpu((batch, width), (width, 1), _FLOAT32) if need_input else None
    dvalues = empty_on_cpu(*p.values_layout, _FLOAT32) if need_values else None
    status = library.dynsparse_small_backward(
        dy.data_ptr(),
        *dy.stride(),
        x.data_ptr(),
        *x.stride(),
        values.data_ptr(),
        p.row_ptr.data_ptr(),
        p.cols.data_ptr(),
        None if masks is None else masks.data_ptr(),
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
        raise MemoryError("no memory for the packed activations of a sparse product")
    return dx, None if dvalues is None else by_slots(dvalues, p.slots)
