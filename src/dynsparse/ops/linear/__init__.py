"""The sparse fully connected operator, Y = X W^T + bias.

Two ways lead to the same products (`products.py`). torch's dispatcher (`operator.py`) serves
whoever watches it: compilers, modes, transforms, autocast, tracers, tensor subclasses. Eager calls
with ordinary tensors take a shorter way: the dispatcher's way through Python costs tens of
microseconds, more than the products of a small layer.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_compiling

from dynsparse.checks import check_kind
from dynsparse.ops import capture
from dynsparse.ops.eager import is_autocast, is_plain_eager
from dynsparse.ops.linear import operator, products, transforms
from dynsparse.ops.linear.choice import use_kernel
from dynsparse.ops.linear.flops import tell_counters
from dynsparse.ops.linear.layer_index import LayerIndex, Read
from dynsparse.pattern import PatternIndex, SparsePattern

__all__ = ["LayerIndex", "grad_input", "grad_weight", "layer_linear", "linear", "use_kernel"]


class SparseLinearFunction(torch.autograd.Function):
    """The operator and its autograd without the dispatcher. Profilers show its name."""

    @staticmethod
    def forward(ctx, x, values, bias, read):
        p, memory, plain = read  # as one: autograd looks at every tensor among the arguments
        ctx.layer_index = p
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(x if values.requires_grad else None, values)  # as `operator.save`
        return products.forward(x, memory, p, bias, None, plain)

    @staticmethod
    def backward(ctx, dy):
        """The gradients of x, values and bias, and None."""
        p = ctx.layer_index
        if _is_grad_enabled() or is_autocast(dy):
            # The operator has a second derivative (create_graph), and keeps autocast out.
            if p.is_overwritten:
                raise RuntimeError(capture.CHANGED)
            return *operator.gradients(ctx, dy, ctx.needs_input_grad[2], p.index), None
        try:
            x, values, *laid_out = ctx.saved_tensors
        except RuntimeError as error:
            raise operator.explained(error) from None
        need_input, need_values, need_bias, _ = ctx.needs_input_grad
        dx = dw = None
        sums: list[Tensor] | None = [] if need_bias else None
        if need_input or need_values:
            if values.shape != p.values_shape:
                if p.is_overwritten:
                    raise RuntimeError(capture.CHANGED)
                raise RuntimeError(
                    f"the values had the shape {list(p.values_shape)} in forward and have "
                    f"{list(values.shape)} in backward: call backward before the layer is resized"
                )
            capture.check_backward(p.row_ptr, values, ctx.next_functions[1][0])
            if capture.concerns(p.row_ptr):
                need_input = need_input and capture.is_asked_for(ctx.next_functions[0][0])
                if x is not None and not capture.is_asked_for(ctx.next_functions[1][0]):
                    x = None
                if x is not None:
                    products.record(p.row_ptr, x, dy)
            if need_input or x is not None:
                dx, dw = products.backward(dy, x, values, p, need_input, *laid_out, sums=sums)
        if sums:
            db = sums[0]
            return dx, dw, db if db.dtype is ctx.bias_dtype else db.to(ctx.bias_dtype), None
        return dx, dw, operator.grad_bias(ctx, dy) if need_bias else None, None


class SparseLinearKeepingFunction(SparseLinearFunction):
    """The same off the CPU, where backward may use what the dense way has laid out for forward."""

    @staticmethod
    def forward(ctx, x, values, bias, read):
        p, memory, _ = read
        ctx.layer_index = p
        laid_out: list[Tensor] = []
        keep = laid_out if ctx.needs_input_grad[0] else None
        y = products.forward(x, memory, p, bias, keep)
        operator.save(ctx, x, values, bias, *laid_out)
        return y


# What Function.apply comes to without functorch's wrappers, which `is_plain_eager` excludes: its
# own way there costs as much as the products of a small layer.
_apply = super(torch.autograd.Function, SparseLinearFunction).apply
_apply_keeping = super(torch.autograd.Function, SparseLinearKeepingFunction).apply

# What autograd calls in backward, without looking for other kinds of derivatives first.
for _function in (SparseLinearFunction, SparseLinearKeepingFunction):
    vars(_function)["_backward_cls"].apply = _function.backward

_is_grad_enabled = torch.is_grad_enabled


def _index_of(pattern: SparsePattern | PatternIndex | LayerIndex) -> PatternIndex:
    if isinstance(pattern, PatternIndex):
        return pattern
    kinds = (SparsePattern, LayerIndex)
    return check_kind("pattern", pattern, kinds, "a SparsePattern or its index").index


def _check_operands(**operands: Tensor | None) -> None:
    for name, tensor in operands.items():
        if tensor is not None or name != "bias":
            check_kind(name, tensor, Tensor, "a tensor")


def linear(
    x: Tensor,
    values: Tensor,
    pattern: SparsePattern | PatternIndex | LayerIndex,
    bias: Tensor | None = None,
) -> Tensor:
    """Y = X W^T + bias for a sparse W. Differentiable in x, values and bias.

    Args:
        x: [..., in]; any strides; float32, float64, bfloat16 or float16.
        values: [nnz] or [nnz, b, b], the dtype of x; float32 values also take bfloat16 and float16
            activations and then accumulate in float32.
        pattern: the pattern, or its index tensors on the device of `values`, which are looked
            through once. A `LayerIndex` spares every call its checks.
        bias: [out] or None.

    Returns:
        [..., out], the dtype of x, contiguous.

    Raises:
        RuntimeError: shapes, dtypes or devices that do not fit, index tensors that point outside.
    """
    if not is_plain_eager(x):
        return _dispatched(x, values, _index_of(pattern), bias)
    _check_operands(values=values, bias=bias)
    if type(pattern) is not LayerIndex:
        index = _index_of(pattern)
        if pattern is index:
            p = operator.prepare(values, index)
        else:
            p = LayerIndex(index, values)
    else:
        p = pattern
    return _compute(x, values, bias, Read(p, values, False))


def _compute(x: Tensor, values: Tensor, bias: Tensor | None, read: Read):
    p = read.layer_index
    if _is_grad_enabled() and (
        values.requires_grad or x.requires_grad or (bias is not None and bias.requires_grad)
    ):
        return (_apply if p.on_cpu else _apply_keeping)(x, values, bias, read)
    return products.forward(x, read.memory, p, bias, None, read.plain)


def layer_linear(x: Tensor, values: Tensor, bias: Tensor | None, read: Read) -> Tensor:
    """`linear` for layers, whose values may be replaced by another thread at any time."""
    if is_plain_eager(x):
        try:
            return _compute(x, values, bias, read)
        except AttributeError:  # what is wrong is looked for only where something is
            _check_operands(values=values, bias=bias)
            check_kind("read", read, Read, "what forward reads")
            raise
    p, memory, _ = read
    if not p.on_cpu and is_plain_eager(x, autocast=True):
        return _autocast(x, values, bias, read)
    return _dispatched(x, values if torch.is_grad_enabled() else memory, p.index, bias)


def _autocast(x: Tensor, values: Tensor, bias: Tensor | None, read: Read) -> Tensor:
    """What the operator does where autocast is on, without the dispatcher."""
    device = x.device.type
    if x.is_floating_point() and x.dtype is not torch.float64:
        x = x.to(torch.get_autocast_dtype(device))
    with torch.autocast(device, enabled=False):
        return _compute(x, values, bias, read)


def _dispatched(x: Tensor, values: Tensor, index: PatternIndex, bias: Tensor | None) -> Tensor:
    if not is_compiling():
        _check_operands(x=x, values=values, bias=bias)
        if transforms.is_transformed():
            return transforms.linear(x, values, index, bias)
        if torch._C._len_torch_dispatch_stack():
            tell_counters()
    return torch.ops.dynsparse.linear(x, values, *index, bias)


def grad_input(dy: Tensor, values: Tensor, pattern: SparsePattern | PatternIndex) -> Tensor:
    """dX = dY W: [..., out] -> [..., in]."""
    _check_operands(dy=dy, values=values)
    index = _index_of(pattern)
    return torch.ops.dynsparse.linear_backward(dy, None, values, *index, True)[0]


def grad_weight(
    dy: Tensor, x: Tensor, values: Tensor, pattern: SparsePattern | PatternIndex
) -> Tensor:
    """dW = (dY^T X) at the pattern's positions only: the shape of `values`, which is not read."""
    _check_operands(dy=dy, x=x, values=values)
    index = _index_of(pattern)
    return torch.ops.dynsparse.linear_backward(dy, x, values, *index, False)[1]
