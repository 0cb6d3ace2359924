"""The passes of a convolution for any floating point dtype and device.

There are two kinds. `sparse` are the compiled kernels (csrc/conv): float32 on the CPU, over the
non-zeros. `dense` is torch's convolution with the weight laid out for the time of a pass: the only
kind on an accelerator, on the CPU for densities above the break-even and for other dtypes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dynsparse._core import native
from dynsparse.ops import capture
from dynsparse.ops.conv.choice import route
from dynsparse.ops.conv.geometry import Geometry, to_matrix, to_weight
from dynsparse.ops.conv.patches import patches_of
from dynsparse.ops.linear.cuda.dense import expand, gather
from dynsparse.ops.linear.layer_index import LayerIndex
from dynsparse.ops.linear.products import check_bias, check_dtype, compute_dtype_of


class Kernels(NamedTuple):
    """The passes of a kind.

    Attributes:
        forward: (x, values, p, bias, g) -> y [batch, out, ...].
        backward: (dy, x, values, p, g, size, need_input) -> (dX [batch, in, *size] if
            needed, dW like the values if x is given).
    """

    forward: Callable[..., Tensor]
    backward: Callable[..., tuple[Tensor | None, Tensor | None]]


def _sizes(x: Sequence[int], y: Sequence[int], p: LayerIndex, g: Geometry) -> np.ndarray:
    """Return the shapes of x and y and the geometry, in the order of csrc/api.h."""
    numbers = (*x, *y[1:], *g.kernel, *g.stride, *g.padding[:2], *g.dilation, g.groups)
    return np.array([*numbers, p.block_size], np.int64)


def _strides(tensor: Tensor | None) -> np.ndarray:
    return np.array((0, 0, 0, 0) if tensor is None else tensor.stride(), np.int64)


def _sparse_forward(
    x: Tensor,
    values: Tensor,
    p: LayerIndex,
    bias: Tensor | None,
    g: Geometry,
) -> Tensor:
    size = g.output_size(x.shape[2], x.shape[3])
    y = torch.empty(x.shape[0], p.out_features, *size, memory_format=layout_of(x), device="cpu")
    values, bias = p.by_rows(values).contiguous(), None if bias is None else bias.contiguous()
    status = native.call(
        "dynsparse_conv_forward",
        *(x, _strides(x), values, p.row_ptr, p.cols, bias, y, _strides(y)),
        *(_sizes(x.shape, y.shape, p, g), torch.get_num_threads()),
    )
    if status:
        raise MemoryError("no memory for a sparse convolution")
    return y


def _sparse_backward(
    dy: Tensor,
    x: Tensor | None,
    values: Tensor,
    p: LayerIndex,
    g: Geometry,
    size: Sequence[int],
    need_input: bool,
) -> tuple[Tensor | None, Tensor | None]:
    shape = (dy.shape[0], p.in_features // g.taps * g.groups, *size)
    dx = torch.empty(shape, memory_format=layout_of(dy), device="cpu") if need_input else None
    dw = None if x is None else torch.empty(p.values_shape, device="cpu")
    values = values.contiguous()
    status = native.call(
        "dynsparse_conv_backward",
        *(dy, _strides(dy), x, _strides(x), values, p.col_ptr, *p.column_order(), dx, _strides(dx)),
        *(dw, _sizes(shape, dy.shape, p, g), torch.get_num_threads()),
    )
    if status:
        raise MemoryError("no memory for the gradients of a sparse convolution")
    return dx, dw


def _to_dense(values: Tensor, p: LayerIndex, g: Geometry) -> Tensor:
    """Return the weight [out, in / groups, kh, kw]."""
    return to_weight(expand(values, p, values.dtype), g.kernel)


def _from_dense(weight: Tensor, p: LayerIndex) -> Tensor:
    """Return the entries of a gradient of the weight at the pattern: like the values."""
    matrix = to_matrix(weight)
    return matrix.reshape(p.values_shape) if p.is_full else gather(matrix, p)


def _pad(x: Tensor, g: Geometry) -> tuple[Tensor, tuple[int, int]]:
    """Pad the input if the padding is asymmetric; return it and the padding left to torch."""
    top, left, bottom, right = g.padding
    if (top, left) == (bottom, right):
        return x, (top, left)
    return g.pad(x), (0, 0)


def _dense_forward(
    x: Tensor,
    values: Tensor,
    p: LayerIndex,
    bias: Tensor | None,
    g: Geometry,
) -> Tensor:
    x, padding = _pad(x, g)
    return torch.conv2d(x, _to_dense(values, p, g), bias, g.stride, padding, g.dilation, g.groups)


def _dense_backward(
    dy: Tensor,
    x: Tensor | None,
    values: Tensor,
    p: LayerIndex,
    g: Geometry,
    size: Sequence[int],
    need_input: bool,
) -> tuple[Tensor | None, Tensor | None]:
    channels = p.in_features // g.taps * g.groups
    # torch reads the shape alone where it has no gradient of the weight to compute.
    source = dy.new_empty(1).expand(dy.shape[0], channels, *size) if x is None else x
    padded, padding = _pad(source, g)
    dx, dw, _ = torch.ops.aten.convolution_backward(
        dy, padded, _to_dense(values, p, g), None, g.stride, padding, g.dilation,
        False, [0, 0], g.groups, [need_input, x is not None, False],
    )  # fmt: skip
    if need_input and padded is not source:
        top, left = g.padding[:2]
        dx = dx[:, :, top : top + size[0], left : left + size[1]]
    return dx if need_input else None, None if x is None else _from_dense(dw, p)


KERNELS = {
    "sparse": Kernels(_sparse_forward, _sparse_backward),
    "dense": Kernels(_dense_forward, _dense_backward),
}


def check_forward(
    x: Tensor, values: Tensor, p: tuple[int, int], bias: Tensor | None, g: Geometry
) -> tuple[int, int]:
    """Raise RuntimeError unless the operands fit; return the size of the output.

    Args:
        p: out and in features of the matrix.
    """
    out, features = p
    channels = features // g.taps * g.groups
    if x.dim() != 4 or x.shape[1] != channels:
        raise RuntimeError(
            f"x must be [batch, {channels}, height, width] for this sparse layer, got the shape "
            f"{list(x.shape)}"
        )
    check_dtype(x, values, "x")
    check_bias(bias, values, out)
    return g.output_size(x.shape[2], x.shape[3])


def check_backward(
    dy: Tensor,
    x: Tensor | None,
    values: Tensor,
    p: tuple[int, int],
    g: Geometry,
    size: Sequence[int],
) -> None:
    """Raise RuntimeError unless the operands of the gradients fit.

    Args:
        size: (height, width) of the input.
    """
    expected = [p[0], *g.output_size(*size)]
    if dy.dim() != 4 or list(dy.shape[1:]) != expected:
        raise RuntimeError(
            f"dy must be [batch, {', '.join(map(str, expected))}], got the shape {list(dy.shape)}"
        )
    check_dtype(dy, values, "dy")
    if x is None:
        return
    check_forward(x, values, p, None, g)
    if list(x.shape[2:]) != list(size) or x.shape[0] != dy.shape[0]:
        raise RuntimeError(
            f"x must be [{dy.shape[0]}, {x.shape[1]}, {', '.join(map(str, size))}] as dy has it, "
            f"got the shape {list(x.shape)}"
        )


def layout_of(x: Tensor) -> torch.memory_format:
    """Return the memory format of the output, as torch's convolutions choose it."""
    last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return torch.channels_last if last else torch.contiguous_format


def forward(x: Tensor, values: Tensor, p: LayerIndex, bias: Tensor | None, g: Geometry) -> Tensor:
    """Return y [batch, out, ...] of x [batch, in, height, width], in its dtype and layout."""
    dtype = compute_dtype_of(x)
    b = None if bias is None else bias.to(dtype)
    w, size = values.to(dtype), g.output_size(x.shape[2], x.shape[3])
    kind = route(p, g, x.shape[0], size, False, x.dtype)
    y = KERNELS[kind].forward(x.to(dtype), w, p, b, g)
    return y.to(x.dtype).contiguous(memory_format=layout_of(x))


def backward(
    dy: Tensor,
    x: Tensor | None,
    values: Tensor,
    p: LayerIndex,
    g: Geometry,
    size: Sequence[int],
    need_input: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Return dX [batch, in, *size], in the layout of dy, if needed, and dW, like values, if x is
    given."""
    dtype = compute_dtype_of(dy)
    w = values.to(dtype)
    kind = route(p, g, dy.shape[0], (dy.shape[2], dy.shape[3]), True, dy.dtype)
    dx, dw = KERNELS[kind].backward(
        dy.to(dtype), None if x is None else x.to(dtype), w, p, g, size, need_input
    )
    if dx is not None:
        dx = dx.to(dy.dtype).contiguous(memory_format=layout_of(dy))
    return dx, None if dw is None else dw.to(values.dtype)


def record(row_ptr: Tensor, x: Tensor, dy: Tensor, g: Geometry) -> None:
    """Pass x and dY to the capture of this layer, as the patches that growth reads."""
    dtype = compute_dtype_of(dy)
    capture.record(row_ptr, *patches_of(x.detach().to(dtype), dy.detach().to(dtype), g))
