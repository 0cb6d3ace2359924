"""The compiled kernels (csrc/conv): float32 on the CPU, over the non-zeros."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dynsparse import native
from dynsparse.ops.conv.geometry import Geometry
from dynsparse.ops.linear.layer_index import LayerIndex


def _sizes(x: Sequence[int], y: Sequence[int], p: LayerIndex, g: Geometry) -> np.ndarray:
    """The shapes of x and y and the geometry, in the order of csrc/api.h."""
    numbers = (*x, *y[1:], *g.kernel, *g.stride, *g.padding[:2], *g.dilation, g.groups)
    return np.array([*numbers, p.block_size], np.int64)


def _strides(tensor: Tensor | None) -> np.ndarray:
    return np.array((0, 0, 0, 0) if tensor is None else tensor.stride(), np.int64)


def forward(
    x: Tensor,
    values: Tensor,
    p: LayerIndex,
    bias: Tensor | None,
    g: Geometry,
    layout: torch.memory_format,
) -> Tensor:
    size = g.output_size(x.shape[2], x.shape[3])
    y = torch.empty(x.shape[0], p.out_features, *size, memory_format=layout)
    values, bias = p.by_rows(values).contiguous(), None if bias is None else bias.contiguous()
    status = native.call(
        "dynsparse_conv_forward",
        *(x, _strides(x), values, p.row_ptr, p.cols, bias, y, _strides(y)),
        *(_sizes(x.shape, y.shape, p, g), torch.get_num_threads()),
    )
    if status:
        raise MemoryError("no memory for a sparse convolution")
    return y


def backward(
    dy: Tensor,
    x: Tensor | None,
    values: Tensor,
    p: LayerIndex,
    g: Geometry,
    size: Sequence[int],
    need_input: bool,
    layout: torch.memory_format,
) -> tuple[Tensor | None, Tensor | None]:
    shape = (dy.shape[0], p.in_features // g.taps * g.groups, *size)
    dx = torch.empty(shape, memory_format=layout) if need_input else None
    dw = None if x is None else torch.empty(p.values_shape)
    values = values.contiguous()
    status = native.call(
        "dynsparse_conv_backward",
        *(dy, _strides(dy), x, _strides(x), values, p.col_ptr, *p.by_columns(), dx, _strides(dx)),
        *(dw, _sizes(shape, dy.shape, p, g), torch.get_num_threads()),
    )
    if status:
        raise MemoryError("no memory for the gradients of a sparse convolution")
    return dx, dw
