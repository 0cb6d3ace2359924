"""The passes for any floating point type and device: checks, conversion, what computes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dynsparse.ops import capture
from dynsparse.ops.conv import dense, kernels
from dynsparse.ops.conv.choice import route
from dynsparse.ops.conv.geometry import Geometry
from dynsparse.ops.conv.patches import patches_of
from dynsparse.ops.linear.layer_index import LayerIndex
from dynsparse.ops.linear.products import check_kind


def check_forward(
    x: Tensor, values: Tensor, p: tuple[int, int], bias: Tensor | None, g: Geometry
) -> tuple[int, int]:
    """Raises RuntimeError where the operands do not fit; the size of the output.

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
    check_kind(x, values, "x")
    if bias is not None and (bias.shape != (out,) or bias.device != values.device):
        raise RuntimeError(
            f"bias must be [{out}] on {values.device}, got the shape {list(bias.shape)} "
            f"on {bias.device}"
        )
    return g.output_size(x.shape[2], x.shape[3])


def check_backward(
    dy: Tensor,
    x: Tensor | None,
    values: Tensor,
    p: tuple[int, int],
    g: Geometry,
    size: Sequence[int],
) -> None:
    """Raises RuntimeError where the operands of the gradients do not fit.

    Args:
        size: of the input.
    """
    expected = [p[0], *g.output_size(*size)]
    if dy.dim() != 4 or list(dy.shape[1:]) != expected:
        raise RuntimeError(
            f"dy must be [batch, {', '.join(map(str, expected))}], got the shape {list(dy.shape)}"
        )
    check_kind(dy, values, "dy")
    if x is None:
        return
    check_forward(x, values, p, None, g)
    if list(x.shape[2:]) != list(size) or x.shape[0] != dy.shape[0]:
        raise RuntimeError(
            f"x must be [{dy.shape[0]}, {x.shape[1]}, {', '.join(map(str, size))}] as dy has it, "
            f"got the shape {list(x.shape)}"
        )


def _compute_dtype(x: Tensor) -> torch.dtype:
    """On the CPU 16-bit types are computed in float32; elsewhere every type as it is."""
    low = x.dtype in (torch.bfloat16, torch.float16)
    return torch.float32 if low and x.is_cpu else x.dtype


def layout_of(x: Tensor) -> torch.memory_format:
    """What the output is laid out like: as torch's convolutions do it."""
    last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return torch.channels_last if last else torch.contiguous_format


def forward(x: Tensor, values: Tensor, p: LayerIndex, bias: Tensor | None, g: Geometry) -> Tensor:
    """[batch, in, height, width] -> [batch, out, ...], the dtype and the layout of x."""
    dtype = _compute_dtype(x)
    b = None if bias is None else bias.to(dtype)
    w, size, layout = values.to(dtype), g.output_size(x.shape[2], x.shape[3]), layout_of(x)
    if route(p, g, x.shape[0], size, False, x.dtype) == "sparse":
        y = kernels.forward(x.to(dtype), w, p, b, g, layout)
    else:
        y = dense.forward(x.to(dtype), w, p, b, g)
    return y.to(x.dtype).contiguous(memory_format=layout)


def backward(
    dy: Tensor,
    x: Tensor | None,
    values: Tensor,
    p: LayerIndex,
    g: Geometry,
    size: Sequence[int],
    need_input: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """dX [batch, in, *size] where needed, laid out as dy, and dW like the values where x is
    given."""
    dtype = _compute_dtype(dy)
    given = None if x is None else x.to(dtype)
    other, w, layout = dy.to(dtype), values.to(dtype), layout_of(dy)
    if route(p, g, dy.shape[0], (dy.shape[2], dy.shape[3]), True, dy.dtype) == "sparse":
        dx, dw = kernels.backward(other, given, w, p, g, size, need_input, layout)
    else:
        dx, dw = dense.backward(other, given, w, p, g, size, need_input)
    if dx is not None:
        dx = dx.to(dy.dtype).contiguous(memory_format=layout)
    return dx, None if dw is None else dw.to(values.dtype)


def record(row_ptr: Tensor, x: Tensor, dy: Tensor, g: Geometry) -> None:
    """Hand x and dY to the capture of this layer, as the patches that growth reads."""
    dtype = _compute_dtype(dy)
    capture.record(row_ptr, *patches_of(x.detach().to(dtype), dy.detach().to(dtype), g))
