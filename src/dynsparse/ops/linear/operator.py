"""The operators as torch's dispatcher sees them, and their autograd.

`torch.ops.dynsparse.linear` takes plain strided tensors, so torch.compile, autocast and fake
tensors see an ordinary operator.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dynsparse.ops import capture
from dynsparse.ops.linear import naive, products
from dynsparse.ops.linear.layer_index import LayerIndex, check_contents, find_index
from dynsparse.pattern import PatternIndex

# How the tensors of an index stand in a schema.
INDEX = (
    "Tensor row_ptr, Tensor cols, Tensor col_ptr, Tensor csc_rows, Tensor csc_perm, Tensor slots"
)

_library = torch.library.Library("dynsparse", "DEF")
_library.define(f"linear(Tensor x, Tensor values, {INDEX}, Tensor? bias) -> Tensor")
_library.define(
    f"linear_backward(Tensor dy, Tensor? x, Tensor values, {INDEX}, bool need_input)"
    " -> (Tensor, Tensor)"
)


def prepare(values: Tensor, rest: tuple[Any, ...]) -> LayerIndex:
    """The index of which `rest` begins with the tensors, checked where it is not known."""
    index = PatternIndex(*rest[:6])
    p = find_index(index)
    if p is not None and p.values_shape == values.shape and p.cols.device == values.device:
        return p
    p = LayerIndex(index, values)
    check_contents(index)
    return p


def features(values: Tensor, rest: tuple[Any, ...]) -> tuple[int, int]:
    """(out, in), of tensors that need not hold anything."""
    b = naive.block_size_of(values)
    return (rest[0].shape[0] - 1) * b, (rest[2].shape[0] - 1) * b


def _forward(x: Tensor, values: Tensor, *rest: Tensor | None) -> Tensor:
    p = prepare(values, rest)
    capture.check_program(p.row_ptr, values)
    return products.forward(x, values, p, rest[6])


def _backward(
    dy: Tensor, x: Tensor | None, values: Tensor, *rest: Tensor | bool
) -> tuple[Tensor, Tensor]:
    p = prepare(values, rest)
    products.check_backward(dy, x, values, p)
    capture.check_backward(p.row_ptr, values)
    if x is not None and capture.is_open(p.row_ptr):
        # Copies, since compiled code may reuse both buffers.
        products.record(p.row_ptr, x.clone(), dy.clone())
    dx, dw = products.backward(dy, x, values, p, bool(rest[6]))
    # Operators return tensors: an empty one stands for a gradient that is not needed.
    return dy.new_empty(0) if dx is None else dx, values.new_empty(0) if dw is None else dw


_library.impl("linear", _forward, "CompositeExplicitAutograd")
_library.impl("linear_backward", _backward, "CompositeExplicitAutograd")


def _forward_shapes(x: Tensor, values: Tensor, *rest: Tensor | None) -> Tensor:
    out_features, in_features = features(values, rest)
    products.check_input(x, values, in_features, "x")
    return x.new_empty(*x.shape[:-1], out_features)


def _backward_shapes(
    dy: Tensor, x: Tensor | None, values: Tensor, *rest: Tensor | bool
) -> tuple[Tensor, Tensor]:
    _, in_features = features(values, rest)
    return (
        dy.new_empty(*dy.shape[:-1], in_features) if rest[6] else dy.new_empty(0),
        values.new_empty(0) if x is None else torch.empty_like(values),
    )


# The way of `register_fake` looks through every module that is loaded, for who calls it.
_library.impl("linear", _forward_shapes, "Meta")
_library.impl("linear_backward", _backward_shapes, "Meta")


def save(ctx, x: Tensor, values: Tensor, bias: Tensor | None, *index: Tensor) -> None:
    """What backward needs. Without a gradient of the values x is not, so it is not kept alive."""
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, values, *index)
    ctx.bias_dtype = None if bias is None else bias.dtype


def explained(error: RuntimeError) -> RuntimeError:
    """What torch says where it no longer has what `save` has kept, in words for this layer."""
    changed = "modified by an inplace operation" in str(error)
    return RuntimeError(capture.CHANGED) if changed else error


def grad_bias(ctx, dy: Tensor) -> Tensor:
    rows = dy if dy.dim() == 2 else dy.reshape(-1, dy.shape[-1])
    # Naming the type that comes anyway costs more than the sum of a small layer.
    return rows.sum(0) if rows.dtype is ctx.bias_dtype else rows.sum(0, dtype=ctx.bias_dtype)


def gradients(ctx, dy: Tensor, need_bias: bool, index: PatternIndex | None = None):
    """Of x, values and bias; the first two by the operator. The index is the saved one if none is
    given."""
    # Read once: activation checkpointing hands each saved tensor out a single time.
    try:
        x, values, *saved = ctx.saved_tensors
    except RuntimeError as error:
        raise explained(error) from None
    index = PatternIndex(*saved) if index is None else index
    capture.check_backward(index.row_ptr, values, ctx.next_functions[1][0])
    need_input, need_values = ctx.needs_input_grad[:2]
    dx = dw = None
    if x is not None and not capture.is_asked_for(ctx.next_functions[1][0]):
        x, need_values = None, False
    if need_input or need_values:
        dx, dw = torch.ops.dynsparse.linear_backward(dy, x, values, *index, need_input)
    return (
        dx if need_input else None,
        dw if need_values else None,
        grad_bias(ctx, dy) if need_bias else None,
    )


def _setup_context(ctx, inputs, output) -> None:
    x, values, *index, bias = inputs
    save(ctx, x, values, bias, *index)


def _autograd(ctx, dy: Tensor):
    dx, dw, db = gradients(ctx, dy, ctx.needs_input_grad[8])
    return dx, dw, *[None] * 6, db


def _setup_double(ctx, inputs, output) -> None:
    dy, x, values, *index, _ = inputs
    ctx.save_for_backward(dy, x, values, *index)
    ctx.set_materialize_grads(False)


def _double(ctx, grad_dx: Tensor | None, grad_dw: Tensor | None):
    """The gradients of dX = dY W and dW = dY^T X are products of the same kinds."""
    dy, x, values, *index = ctx.saved_tensors
    ops, needs = torch.ops.dynsparse, ctx.needs_input_grad
    to_dy = to_x = to_values = None
    if grad_dx is not None:
        if needs[0]:
            to_dy = ops.linear(grad_dx, values, *index, None)
        if needs[2] and capture.is_asked_for(ctx.next_functions[1 if x is None else 2][0]):
            to_values = ops.linear_backward(dy, grad_dx, values, *index, False)[1]
    if grad_dw is not None and x is not None:
        if needs[0]:
            more = ops.linear(x, grad_dw, *index, None)
            to_dy = more if to_dy is None else to_dy + more
        if needs[1]:
            to_x = ops.linear_backward(dy, None, grad_dw, *index, True)[0]
    return to_dy, to_x, to_values, *[None] * 7


torch.library.register_autograd(
    "dynsparse::linear", _autograd, setup_context=_setup_context, lib=_library
)
torch.library.register_autograd(
    "dynsparse::linear_backward", _double, setup_context=_setup_double, lib=_library
)


def under_autocast(library: torch.library.Library, name: str) -> None:
    """Register what `name` and `name`_backward do where torch.autocast is on, on every device."""
    operator = getattr(torch.ops.dynsparse, name)
    operator_backward = getattr(torch.ops.dynsparse, f"{name}_backward")

    def register(device: str) -> None:
        def forward(x: Tensor, *rest: Any) -> Tensor:
            # Only the activations are lowered: the values are few, and stay as exact as they are.
            if x.is_floating_point() and x.dtype != torch.float64:
                x = x.to(torch.get_autocast_dtype(device))
            with torch.autocast(device, enabled=False):
                return operator(x, *rest)

        def backward(*args: Any) -> Any:
            with torch.autocast(device, enabled=False):
                return operator_backward(*args)

        library.impl(name, forward, f"Autocast{device.upper()}")
        library.impl(f"{name}_backward", backward, f"Autocast{device.upper()}")

    register("cpu")
    register("cuda")


under_autocast(_library, "linear")
