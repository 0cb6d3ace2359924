"""The operator for `torch.func`: grad, vjp, jvp, vmap and whatever is composed of them.

Y = X W^T is linear in X and in W, and so are its two gradients; each of the three products is the
derivative of another. With V for values at the pattern of W:

    product(X, V)       = X W^T
    grad_input(dY, V)   = dY W
    grad_weight(dY, X)  = dY^T X at the pattern

So three functions that name each other as derivatives have derivatives of every order, forward and
reverse. Under vmap samples join the batch where the weights are those of all, and are computed one
after another where each has its own: per-sample gradients cost what the samples cost alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from dynsparse.ops import capture
from dynsparse.pattern import PatternIndex

_OPS = torch.ops.dynsparse


def is_transformed() -> bool:
    """Whether a transform of `torch.func`, or forward-mode differentiation, is under way."""
    return (
        torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
    )


def linear(x: Tensor, values: Tensor, index: PatternIndex, bias: Tensor | None) -> Tensor:
    """As `ops.linear.linear`, for `torch.func`. Growth sees none of its gradients."""
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.is_floating_point() and x.dtype != torch.float64:
        x = x.to(torch.get_autocast_dtype(device))
    y = _Product.apply(x, values, *index)
    return y if bias is None else y + bias.to(y.dtype)


class _Function(torch.autograd.Function):
    """What the three have in common: two operands in whose first or both a sample may differ."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        first, second, *rest = inputs
        ctx.rest = [thing for thing in rest if not isinstance(thing, Tensor)]
        index = [thing for thing in rest if isinstance(thing, Tensor)]
        ctx.save_for_backward(first, second, *index)
        ctx.save_for_forward(first, second, *index)


def _each(function: Any, info: Any, in_dims: Any, first: Tensor, second: Tensor, rest: Any) -> Any:
    """The function of every sample in turn, and where the samples are in the result."""
    parts = [
        function.apply(_sample(first, in_dims[0], i), _sample(second, in_dims[1], i), *rest)
        for i in range(info.batch_size)
    ]
    return torch.stack(parts), 0


def _sample(tensor: Tensor, dim: int | None, i: int) -> Tensor:
    return tensor if dim is None else tensor.select(dim, i)


def _over_samples(
    function: Any, info: Any, in_dims: Any, first: Tensor, values: Tensor, *rest: Any
):
    """The vmap rule of a product of activations with values."""
    if in_dims[1] is not None or first.dim() == 0:
        return _each(function, info, in_dims, first, values, rest)
    return function.apply(first.movedim(in_dims[0], 0), values, *rest), 0


def _tangent(function: Any, ctx: Any, to_first: Tensor | None, to_second: Tensor | None) -> Any:
    """Of a function that is linear in each operand."""
    first, second, *index = ctx.saved_tensors
    a = None if to_first is None else function.apply(to_first, second, *index, *ctx.rest)
    b = None if to_second is None else function.apply(first, to_second, *index, *ctx.rest)
    return b if a is None else a if b is None else a + b


class _Product(_Function):
    @staticmethod
    def forward(x: Tensor, values: Tensor, *index: Tensor) -> Tensor:
        return _OPS.linear(x, values, *index, None)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        x, values, *index = ctx.saved_tensors
        need_input, need_values, *_ = ctx.needs_input_grad
        return (
            _GradInput.apply(dy, values, *index) if need_input else None,
            _grad_weight(dy, x, values, index) if need_values else None,
            *[None] * 6,
        )

    @staticmethod
    def jvp(ctx: Any, dx: Any, dvalues: Any, *_: Any) -> Any:
        return _tangent(_Product, ctx, dx, dvalues)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *operands: Any) -> Any:
        return _over_samples(_Product, info, in_dims, *operands)


class _GradInput(_Function):
    @staticmethod
    def forward(dy: Tensor, values: Tensor, *index: Tensor) -> Tensor:
        return _OPS.linear_backward(dy, None, values, *index, True)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        dy, values, *index = ctx.saved_tensors
        need_dy, need_values, *_ = ctx.needs_input_grad
        return (
            _Product.apply(grad, values, *index) if need_dy else None,
            _grad_weight(dy, grad, values, index) if need_values else None,
            *[None] * 6,
        )

    @staticmethod
    def jvp(ctx: Any, ddy: Any, dvalues: Any, *_: Any) -> Any:
        return _tangent(_GradInput, ctx, ddy, dvalues)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *operands: Any) -> Any:
        return _over_samples(_GradInput, info, in_dims, *operands)


def _grad_weight(dy: Tensor, x: Tensor, values: Tensor, index: list[Tensor]) -> Any:
    return _GradWeight.apply(dy, x, *index, tuple(values.shape), values.dtype)


class _GradWeight(_Function):
    @staticmethod
    def forward(dy: Tensor, x: Tensor, *rest: Any) -> Tensor:
        row_ptr, *index, shape, dtype = rest
        if capture.is_open(row_ptr):
            # Growth would know it by its row pointers, and not all of these are gradients.
            row_ptr = row_ptr.clone()
        like = torch.empty(shape, dtype=dtype, device=dy.device)  # its entries are not read
        return _OPS.linear_backward(dy, x, like, row_ptr, *index, False)[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        dy, x, *index = ctx.saved_tensors
        need_dy, need_input, *_ = ctx.needs_input_grad
        return (
            _Product.apply(x, grad, *index) if need_dy else None,
            _GradInput.apply(dy, grad, *index) if need_input else None,
            *[None] * 8,
        )

    @staticmethod
    def jvp(ctx: Any, ddy: Any, dx: Any, *_: Any) -> Any:
        return _tangent(_GradWeight, ctx, ddy, dx)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *operands: Any) -> Any:
        first, second, *rest = operands
        return _each(_GradWeight, info, in_dims, first, second, rest)
