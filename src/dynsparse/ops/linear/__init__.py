"""The sparse fully connected operator, Y = X W^T + bias.

Calls with ordinary tensors bypass torch's dispatcher; everything that must see them (compilers,
modes, transforms, tracers, tensor subclasses) sees the operator of `autograd.py`. Both compute
through `products.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_compiling

from dynsparse._core.checks import check_kind
from dynsparse.ops import capture
from dynsparse.ops.linear import products
from dynsparse.ops.linear.autograd import (
    LinearFunction,
    apply_eagerly,
    prepare,
    register_flop_formulas,
)
from dynsparse.ops.linear.choice import use_kernel
from dynsparse.ops.linear.layer_index import LayerIndex, Read
from dynsparse.ops.torch_internals import has_modes, is_autocast, is_plain_eager, is_transformed
from dynsparse.pattern import PatternIndex, SparsePattern

__all__ = ["LayerIndex", "grad_input", "grad_weight", "layer_linear", "linear", "use_kernel"]

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
        pattern: the pattern, or its index tensors on the device of `values`, whose entries are
            checked once. With a `LayerIndex` calls skip the checks.
        bias: [out] or None.

    Returns:
        [..., out], the dtype of x, contiguous.

    Raises:
        RuntimeError: shapes, dtypes or devices that do not fit, index tensors that point outside.
    """
    if not is_plain_eager(x):
        return _dispatch(x, values, _index_of(pattern), bias)
    _check_operands(values=values, bias=bias)
    if type(pattern) is not LayerIndex:
        index = _index_of(pattern)
        if pattern is index:
            p = prepare(values, index)
        else:
            p = LayerIndex(index, values)
    else:
        p = pattern
    return _compute(x, values, bias, Read(p, values, False))


def _compute(x: Tensor, values: Tensor, bias: Tensor | None, read: Read) -> Tensor:
    if _is_grad_enabled() and (
        values.requires_grad or x.requires_grad or (bias is not None and bias.requires_grad)
    ):
        return apply_eagerly(x, values, bias, read)
    p, memory, plain = read
    return products.forward(x, memory, p, bias, None, plain)


def layer_linear(x: Tensor, values: Tensor, bias: Tensor | None, read: Read) -> Tensor:
    """`linear` for layers, whose values another thread may replace at any time.

    Args:
        values: the Parameter. read: the index, and the values that belong to it.
    """
    if is_plain_eager(x):
        try:
            return _compute(x, values, bias, read)
        except (AttributeError, TypeError, ValueError):  # checks cost too much for every call
            _check_operands(values=values, bias=bias)
            check_kind("read", read, Read, "what forward reads")
            raise
    p, memory, _ = read
    if not p.on_cpu and is_plain_eager(x, autocast=True):
        return _autocast(x, values, bias, read)
    return _dispatch(x, values if torch.is_grad_enabled() else memory, p.index, bias)


def _autocast(x: Tensor, values: Tensor, bias: Tensor | None, read: Read) -> Tensor:
    """The operator under autocast, without the dispatcher."""
    with torch.autocast(x.device.type, enabled=False):
        return _compute(_lower(x), values, bias, read)


def _lower(x: Tensor) -> Tensor:
    """x in the dtype of autocast."""
    if not x.is_floating_point() or x.dtype is torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


def _dispatch(x: Tensor, values: Tensor, index: PatternIndex, bias: Tensor | None) -> Tensor:
    if not is_compiling():
        _check_operands(x=x, values=values, bias=bias)
        if is_transformed():  # torch.func calls Functions, and no operators that contain one
            x = _lower(x) if is_autocast(x) else x
            return LinearFunction.apply(x, values, *capture.hide(index), bias)
        if has_modes():
            register_flop_formulas()
    y: Tensor = torch.ops.dynsparse.linear(x, values, *index, bias)
    return y


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
