"""The operators of convolutions for torch's dispatcher: shapes, autograd, autocast, FLOPs."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from dynsparse.ops import capture
from dynsparse.ops.conv import products
from dynsparse.ops.conv.geometry import Geometry
from dynsparse.ops.linear.autograd import (
    INDEX,
    explain_error,
    features,
    flop_formulas,
    layer_index_of,
    register_autocast,
)
from dynsparse.ops.torch_internals import is_gradient_needed, refuse_onnx_export

_library = torch.library.Library("dynsparse", "FRAGMENT")
_library.define(f"conv(Tensor x, Tensor values, {INDEX}, Tensor? bias, int[] geometry) -> Tensor")
_library.define(
    f"conv_backward(Tensor dy, Tensor? x, Tensor values, {INDEX}, int[] geometry, "
    "SymInt[] size, bool need_input) -> (Tensor, Tensor)"
)


def _forward(x: Tensor, values: Tensor, *rest: Any) -> Tensor:
    *_, bias, geometry = rest
    p, g = layer_index_of(values, rest), Geometry.from_list(geometry)
    products.check_forward(x, values, (p.out_features, p.in_features), bias, g)
    capture.check_program(p.row_ptr, values)
    return products.forward(x, values, p, bias, g)


def _backward(dy: Tensor, x: Tensor | None, values: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    *_, geometry, size, need_input = rest
    p, g = layer_index_of(values, rest), Geometry.from_list(geometry)
    products.check_backward(dy, x, values, (p.out_features, p.in_features), g, size)
    capture.check_backward(p.row_ptr, values)
    if x is not None and capture.is_open(p.row_ptr):
        # Copies, since compiled code may reuse both buffers.
        products.record(p.row_ptr, x.clone(), dy.clone(), g)
    dx, dw = products.backward(dy, x, values, p, g, size, need_input)
    # Operators return tensors: an empty one stands for a gradient that is not needed.
    return dy.new_empty(0) if dx is None else dx, values.new_empty(0) if dw is None else dw


_library.impl("conv", refuse_onnx_export(_forward), "CompositeExplicitAutograd")
_library.impl("conv_backward", _backward, "CompositeExplicitAutograd")


def _forward_shapes(x: Tensor, values: Tensor, *rest: Any) -> Tensor:
    *_, bias, geometry = rest
    shape = features(values, rest)
    size = products.check_forward(x, values, shape, bias, Geometry.from_list(geometry))
    y = x.new_empty(x.shape[0], shape[0], *size)
    return y.contiguous(memory_format=products.layout_of(x))


def _backward_shapes(
    dy: Tensor, x: Tensor | None, values: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    *_, geometry, size, need_input = rest
    g = Geometry.from_list(geometry)
    dx = dy.new_empty(0)
    if need_input:
        channels = features(values, rest)[1] // g.taps * g.groups
        dx = dy.new_empty(dy.shape[0], channels, *size)
        dx = dx.contiguous(memory_format=products.layout_of(dy))
    return dx, values.new_empty(0) if x is None else torch.empty_like(values)


_library.impl("conv", refuse_onnx_export(_forward_shapes), "Meta")
_library.impl("conv_backward", _backward_shapes, "Meta")


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    x, values, *index, bias, geometry = inputs
    # x only for a gradient of the values, so that it is not kept alive otherwise.
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, values, *index)
    ctx.geometry, ctx.size = geometry, x.shape[2:]
    ctx.bias_dtype = None if bias is None else bias.dtype


def _autograd(ctx: Any, dy: Tensor) -> Any:
    # Read once: activation checkpointing returns each saved tensor a single time.
    try:
        x, values, *index = ctx.saved_tensors
    except RuntimeError as error:
        raise explain_error(error) from None
    capture.check_backward(index[0], values, ctx.next_functions[1][0])
    need_input, need_values, *others = ctx.needs_input_grad
    if x is not None and not is_gradient_needed(ctx.next_functions[1][0]):
        x, need_values = None, False
    dx = dw = db = None
    if need_input or need_values:
        dx, dw = torch.ops.dynsparse.conv_backward(
            dy, x, values, *index, ctx.geometry, ctx.size, need_input
        )
    if others[6]:
        db = dy.sum((0, 2, 3), dtype=ctx.bias_dtype)
    return dx if need_input else None, dw if need_values else None, *[None] * 6, db, None


def _setup_double(ctx: Any, inputs: Any, output: Any) -> None:
    dy, x, values, *index, ctx.geometry, ctx.size, ctx.need_input = inputs
    ctx.save_for_backward(dy, x, values, *index)
    ctx.set_materialize_grads(False)


def _double(ctx: Any, grad_dx: Tensor | None, grad_dw: Tensor | None) -> Any:
    """The gradients of both are passes of the same kinds, as each is linear in its operands."""
    dy, x, values, *index = ctx.saved_tensors
    ops, needs, g, size = torch.ops.dynsparse, ctx.needs_input_grad, ctx.geometry, ctx.size
    to_dy = to_x = to_values = None
    if grad_dx is not None and ctx.need_input:
        if needs[0]:
            to_dy = ops.conv(grad_dx, values, *index, None, g)
        if needs[2] and is_gradient_needed(ctx.next_functions[1 if x is None else 2][0]):
            to_values = ops.conv_backward(dy, grad_dx, values, *index, g, size, False)[1]
    if grad_dw is not None and x is not None:
        if needs[0]:
            more = ops.conv(x, grad_dw, *index, None, g)
            to_dy = more if to_dy is None else to_dy + more
        if needs[1]:
            to_x = ops.conv_backward(dy, None, grad_dw, *index, g, size, True)[0]
    return to_dy, to_x, to_values, *[None] * 9


torch.library.register_autograd(
    "dynsparse::conv", _autograd, setup_context=_setup_context, lib=_library
)
torch.library.register_autograd(
    "dynsparse::conv_backward", _double, setup_context=_setup_double, lib=_library
)


register_autocast(_library, "conv")


def _flops(x: Any, values: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return 2 * out_shape[0] * prod(out_shape[2:]) * prod(values)


def _backward_flops(dy: Any, x: Any, values: Any, *rest: Any, **_: Any) -> int:
    passes = (x is not None) + bool(rest[-1])
    return passes * 2 * dy[0] * prod(dy[2:]) * prod(values)


flop_formulas |= {"conv": _flops, "conv_backward": _backward_flops}
