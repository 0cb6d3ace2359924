"""The operator Y = X W^T + bias: the functions, shapes, derivatives, batching, autocast, FLOPs.

`torch.ops.dynsparse.linear` takes plain strided tensors, so compilers, modes and fake tensors see
an ordinary operator. Eager calls with ordinary tensors bypass torch's dispatcher: they take
`SparseLinearFunction` instead, whose backward is the same function `gradients`. Both compute
through `products.py`.

Y is linear in X and in W, and so are its gradients dX = dY W and dW = dY^T X at the pattern. The
derivatives of each are products of the same kinds: `LinearFunction` and `LinearBackwardFunction`
name each other and so have derivatives of every order, in forward and reverse mode, which
`torch.library.register_autograd` does not offer. Under vmap samples join the batch if they share
the weights, and are computed one after another if each has its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.compiler import is_compiling

from dynsparse._core.checks import check_kind
from dynsparse.ops import capture
from dynsparse.ops.linear import naive, products
from dynsparse.ops.linear.layer_index import LayerIndex, Read, check_contents, find_index
from dynsparse.ops.torch_internals import (
    dispatch_modes,
    fast_apply,
    has_modes,
    is_autocast,
    is_batched,
    is_gradient_needed,
    is_plain_eager,
    is_recording,
    is_transformed,
    raw_apply,
    refuse_onnx_export,
    skip_autograd,
)
from dynsparse.pattern import PatternIndex, SparsePattern

# The tensors of an index in a schema.
INDEX = (
    "Tensor row_ptr, Tensor cols, Tensor col_ptr, Tensor csc_rows, Tensor csc_perm, Tensor slots"
)

_library = torch.library.Library("dynsparse", "DEF")
_library.define(f"linear(Tensor x, Tensor values, {INDEX}, Tensor? bias) -> Tensor")
_library.define(
    f"linear_backward(Tensor dy, Tensor? x, Tensor values, {INDEX}, bool need_input)"
    " -> (Tensor, Tensor)"
)
_OPS = torch.ops.dynsparse
_is_grad_enabled = torch.is_grad_enabled


# The operators without derivatives.


def layer_index_of(values: Tensor, rest: tuple[Any, ...]) -> LayerIndex:
    """Return the layer index of the first tensors of `rest`, which are checked if unknown."""
    index = PatternIndex(*rest[:6])
    p = find_index(index)
    if p is not None and p.values_shape == values.shape and p.cols.device == values.device:
        return p
    p = LayerIndex(index, values)
    check_contents(index)
    return p


def features(values: Tensor, rest: tuple[Any, ...]) -> tuple[int, int]:
    """Return (out, in), from shapes alone."""
    b = naive.block_size_of(values)
    return (rest[0].shape[0] - 1) * b, (rest[2].shape[0] - 1) * b


def _forward(x: Tensor, values: Tensor, *rest: Tensor | None) -> Tensor:
    p = layer_index_of(values, rest)
    capture.check_program(p.row_ptr, values)
    return products.forward(x, values, p, rest[6])


def _backward(
    dy: Tensor, x: Tensor | None, values: Tensor, *rest: Tensor | bool
) -> tuple[Tensor, Tensor]:
    p = layer_index_of(values, rest)
    products.check_backward(dy, x, values, p)
    capture.check_backward(p.row_ptr, values)
    if x is not None and capture.is_open(p.row_ptr):
        # Copies, since compiled code may reuse both buffers.
        products.record(p.row_ptr, x.clone(), dy.clone())
    dx, dw = products.backward(dy, x, values, p, bool(rest[6]))
    # Operators return tensors: an empty one stands for a gradient that is not needed.
    return dy.new_empty(0) if dx is None else dx, values.new_empty(0) if dw is None else dw


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


_library.impl("linear", refuse_onnx_export(_forward), "CompositeExplicitAutograd")
_library.impl("linear_backward", _backward, "CompositeExplicitAutograd")
# `register_fake` inspects every loaded module to find its caller.
_library.impl("linear", refuse_onnx_export(_forward_shapes), "Meta")
_library.impl("linear_backward", _backward_shapes, "Meta")


# The derivatives of `linear`.


def _save(ctx: Any, x: Tensor, values: Tensor, bias: Tensor | None, *more: Tensor) -> None:
    """Save what `gradients` needs; x only if the values need a gradient, to free it otherwise."""
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, values, *more)
    ctx.bias_dtype = None if bias is None or not bias.requires_grad else bias.dtype


def explain_error(error: RuntimeError) -> RuntimeError:
    """Return the error to raise: autograd's for modified tensors, reworded for a sparse layer."""
    changed = "modified by an inplace operation" in str(error)
    return RuntimeError(capture.CHANGED) if changed else error


def gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute the gradients of x, values and bias.

    For the operator, and for `SparseLinearFunction`, which has set `ctx.layer_index`.
    """
    p: LayerIndex | None = ctx.layer_index
    # Read once: activation checkpointing returns each saved tensor a single time.
    try:
        x, values, *saved = ctx.saved_tensors
    except RuntimeError as error:
        raise explain_error(error) from None
    need_input = ctx.needs_input_grad[0]
    if p is None:
        index = PatternIndex(*saved)
        checked = True
        if not ctx.is_transformed:
            capture.check_backward(index.row_ptr, values, ctx.next_functions[1][0])
    else:
        if values.shape != p.values_shape:
            if p.is_overwritten:
                raise RuntimeError(capture.CHANGED)
            raise RuntimeError(
                f"the values had the shape {list(p.values_shape)} in forward and have "
                f"{list(values.shape)} in backward: call backward before the layer is resized"
            )
        if capture.replaced:  # first: reading `next_functions` takes half a microsecond
            capture.check_backward(p.row_ptr, values, ctx.next_functions[1][0])
        checked = capture.needs_check(p.row_ptr)
    if checked:
        need_input = need_input and is_gradient_needed(ctx.next_functions[0][0])
        if x is not None and not is_gradient_needed(ctx.next_functions[1][0]):
            x = None
    dx = dw = None
    sums: list[Tensor] = []
    if need_input or x is not None:
        if not (p is None or _is_grad_enabled() or is_autocast(dy) or is_batched(dy)):
            if checked and x is not None:
                products.record(p.row_ptr, x, dy)
            bias_sums = None if ctx.bias_dtype is None else sums
            dx, dw = products.backward(dy, x, values, p, need_input, *saved, sums=bias_sums)
            if dw is not None and dw._version:
                dw = dw.data  # of version 0: `capture` looks for later writes
        else:  # the operator has a second derivative, and disables autocast
            if p is not None:
                index = p.index
            dx, dw = LinearBackwardFunction.apply(dy, x, values, *index, need_input)
            dx, dw = dx if need_input else None, dw if x is not None else None
    if ctx.bias_dtype is None:
        return dx, dw, None
    if sums:
        return dx, dw, sums[0] if sums[0].dtype is ctx.bias_dtype else sums[0].to(ctx.bias_dtype)
    rows = dy if dy.dim() == 2 else dy.reshape(-1, dy.shape[-1])
    # Passing the dtype that results anyway costs more than the sum of a small layer.
    db = rows.sum(0) if rows.dtype is ctx.bias_dtype else rows.sum(0, dtype=ctx.bias_dtype)
    return dx, dw, db


class SparseLinearFunction(Function):
    """The operator for eager calls, without the dispatcher. Profilers show its name."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor, bias: Tensor | None, read: Read) -> Tensor:
        # One object: autograd inspects every tensor among the arguments.
        p, memory, plain = read
        ctx.layer_index = p
        if p.on_cpu:  # as `_save` does, without the cost of a call
            ctx.save_for_backward(x if values.requires_grad else None, values)
            ctx.bias_dtype = None if bias is None or not bias.requires_grad else bias.dtype
            return products.forward(x, memory, p, bias, None, plain)
        reusable: list[Tensor] = []
        y = products.forward(x, memory, p, bias, reusable if ctx.needs_input_grad[0] else None)
        _save(ctx, x, values, bias, *reusable)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return *gradients(ctx, dy), None


apply_eagerly = fast_apply(SparseLinearFunction)
"""Function of (x, values, bias, read) that returns y, for calls that are plain eager."""


class LinearFunction(Function):
    """The operator `linear` with its derivatives, for the dispatcher and for `torch.func`."""

    @staticmethod
    def forward(*operands: Any) -> Tensor:
        with skip_autograd():
            y: Tensor = _OPS.linear(*operands)
        return y

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        x, values, *index, bias = inputs
        _save(ctx, x, values, bias, *index)
        ctx.save_for_forward(x, values, *index)
        ctx.layer_index, ctx.is_transformed = None, is_transformed()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        dx, dw, db = gradients(ctx, dy)
        return dx, dw, *[None] * 6, db

    @staticmethod
    def jvp(ctx: Any, tx: Tensor | None, tvalues: Tensor | None, *tangents: Any) -> Any:
        x, values, *index = ctx.saved_tensors
        from_x = None if tx is None else LinearFunction.apply(tx, values, *index, None)
        from_values = None if tvalues is None else LinearFunction.apply(x, tvalues, *index, None)
        y = _sum(from_x, from_values)
        if y is None:
            y = x.new_zeros(*x.shape[:-1], tangents[6].shape[-1])
        return _sum(y, tangents[6])

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], *operands: Any) -> tuple[Tensor, int]:
        x, values, *index, bias = operands
        if bias is not None and dims[8] is not None:
            y, _ = LinearFunction.vmap(info, (*dims[:8], None), x, values, *index, None)
            biases = bias.movedim(dims[8], 0)
            return y + biases.view(len(biases), *[1] * (y.dim() - 2), -1), 0
        if dims[1] is None and dims[0] is not None and x.dim() > 1:
            return LinearFunction.apply(x.movedim(dims[0], 0), values, *index, bias), 0
        samples = _samples(info, dims, operands)
        return torch.stack([LinearFunction.apply(*sample) for sample in samples]), 0


class LinearBackwardFunction(Function):
    """The operator `linear_backward` with its derivatives."""

    @staticmethod
    def forward(*operands: Any) -> tuple[Tensor, Tensor]:
        with skip_autograd():
            dx, dw = _OPS.linear_backward(*operands)
        return dx, dw

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        dy, x, values, *index, ctx.need_input = inputs
        ctx.save_for_backward(dy, x, values, *index)
        ctx.save_for_forward(dy, x, values, *index)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad_dx: Tensor | None, grad_dw: Tensor | None) -> Any:
        dy, x, values, *index = ctx.saved_tensors
        needs = ctx.needs_input_grad
        to_dy = to_x = to_values = None
        if grad_dx is not None and ctx.need_input:
            if needs[0]:
                to_dy = LinearFunction.apply(grad_dx, values, *index, None)
            if needs[2] and is_gradient_needed(ctx.next_functions[1 if x is None else 2][0]):
                to_values = LinearBackwardFunction.apply(dy, grad_dx, values, *index, False)[1]
        if grad_dw is not None and x is not None:
            if needs[0]:
                to_dy = _sum(to_dy, LinearFunction.apply(x, grad_dw, *index, None))
            if needs[1]:
                to_x = LinearBackwardFunction.apply(dy, None, grad_dw, *index, True)[0]
        return to_dy, to_x, to_values, *[None] * 7

    @staticmethod
    def jvp(ctx: Any, tdy: Any, tx: Any, tvalues: Any, *_: Any) -> Any:
        dy, x, values, *index = ctx.saved_tensors
        tdx = tdw = None
        if tdy is not None:
            tdx, tdw = LinearBackwardFunction.apply(tdy, x, values, *index, ctx.need_input)
        if ctx.need_input and tvalues is not None:
            part = LinearBackwardFunction.apply(dy, None, tvalues, *index, True)[0]
            tdx = _sum(tdx, part)
        if x is not None and tx is not None:
            tdw = _sum(tdw, LinearBackwardFunction.apply(dy, tx, values, *index, False)[1])
        return tdx, tdw

    @staticmethod
    def vmap(
        info: Any, dims: tuple[Any, ...], *operands: Any
    ) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        dy, _, values, *index, need_input = operands
        samples = _samples(info, dims, operands)
        dx = None
        if need_input and dims[2] is None and dims[0] is not None and dy.dim() > 1:
            dy = dy.movedim(dims[0], 0)
            dx = LinearBackwardFunction.apply(dy, None, values, *index, True)[0]
            samples = [[*sample[:-1], False] for sample in samples]
        pairs = [LinearBackwardFunction.apply(*sample) for sample in samples]
        dxs, dws = zip(*pairs, strict=True)
        return (torch.stack(dxs) if dx is None else dx, torch.stack(dws)), (0, 0)


def _sum(*parts: Tensor | None) -> Tensor | None:
    """Return the sum of the parts that are not None; None if all are."""
    total = None
    for part in parts:
        if part is not None:
            total = part if total is None else total + part
    return total


def _samples(info: Any, dims: tuple[Any, ...], operands: tuple[Any, ...]) -> list[list[Any]]:
    """Return the operands of every sample."""
    pairs = list(zip(operands, dims, strict=True))
    return [
        [operand if dim is None else operand.select(dim, i) for operand, dim in pairs]
        for i in range(info.batch_size)
    ]


_PLAIN = (Tensor, torch.nn.Parameter, type(None), bool)


def _register_derivatives(name: str, function: type[Function], compute: Callable[..., Any]) -> None:
    operator, apply = getattr(_OPS, name), raw_apply(function)

    def call(*operands: Any) -> Any:
        if is_recording():
            return apply(*operands)
        # In compiled code the graph exists: skipping autograd saves half the time of a small layer,
        # and skipping the dispatcher, which nothing else needs here, a part of the rest.
        if is_plain_eager(operands[0]) and all(type(operand) in _PLAIN for operand in operands):
            return compute(*operands)
        with skip_autograd():
            return operator(*operands)

    _library.impl(name, call, "Autograd")


_register_derivatives("linear", LinearFunction, _forward)
_register_derivatives("linear_backward", LinearBackwardFunction, _backward)


# The functions.


def index_of(pattern: SparsePattern | PatternIndex | LayerIndex) -> PatternIndex:
    """Return the index tensors of a pattern or of a layer index; themselves unchanged."""
    if isinstance(pattern, PatternIndex):
        return pattern
    kinds = (SparsePattern, LayerIndex)
    return check_kind("pattern", pattern, kinds, "a SparsePattern or its index").index


def check_operands(**operands: Tensor | None) -> None:
    """Raise TypeError unless all operands are tensors; `bias` may be None."""
    for name, tensor in operands.items():
        if tensor is not None or name != "bias":
            check_kind(name, tensor, Tensor, "a tensor")


def linear(
    x: Tensor,
    values: Tensor,
    pattern: SparsePattern | PatternIndex | LayerIndex,
    bias: Tensor | None = None,
) -> Tensor:
    """Compute Y = X W^T + bias for a sparse W, differentiable in x, values and bias.

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
        return _dispatch(x, values, index_of(pattern), bias)
    check_operands(values=values, bias=bias)
    if type(pattern) is not LayerIndex:
        index = index_of(pattern)
        if pattern is index:
            p = layer_index_of(values, index)
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
    """Compute `linear` for layers, whose values another thread may replace at any time.

    Args:
        values: the Parameter.
        read: the index, and the values that belong to it.
    """
    if is_plain_eager(x):
        try:
            return _compute(x, values, bias, read)
        except (AttributeError, TypeError, ValueError):  # checks cost too much for every call
            check_operands(values=values, bias=bias)
            check_kind("read", read, Read, "what forward reads")
            raise
    p, memory, _ = read
    if (
        not p.on_cpu
        and is_plain_eager(x, autocast=True)
        and autocast_values(values, x.device.type) is values
    ):
        return _autocast(x, values, bias, read)
    return _dispatch(x, values if torch.is_grad_enabled() else memory, p.index, bias)


def _autocast(x: Tensor, values: Tensor, bias: Tensor | None, read: Read) -> Tensor:
    """Compute the operator under autocast, without the dispatcher."""
    with torch.autocast(x.device.type, enabled=False):
        return _compute(_autocast_operand(x, x.device.type), values, bias, read)


def _autocast_operand(x: Any, device: str) -> Any:
    """Return x, a tensor or None, in the dtype of autocast on this kind of device."""
    if x is None or not x.is_floating_point() or x.dtype is torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(device))


def autocast_values(values: Tensor, device: str) -> Tensor:
    """Return values of 16 bits in the dtype of autocast; others keep their precision."""
    if values.dtype in (torch.bfloat16, torch.float16):
        return values.to(torch.get_autocast_dtype(device))
    return values


def _dispatch(x: Tensor, values: Tensor, index: PatternIndex, bias: Tensor | None) -> Tensor:
    if not is_compiling():
        check_operands(x=x, values=values, bias=bias)
        if is_transformed():  # torch.func calls Functions, and no operators that contain one
            device = x.device.type
            if is_autocast(x):
                x, values = _autocast_operand(x, device), autocast_values(values, device)
            return LinearFunction.apply(x, values, *capture.hide(index), bias)
        if has_modes():
            register_flop_formulas()
    y: Tensor = torch.ops.dynsparse.linear(x, values, *index, bias)
    return y


def grad_input(dy: Tensor, values: Tensor, pattern: SparsePattern | PatternIndex) -> Tensor:
    """Compute dX = dY W, [..., in], of dy [..., out]."""
    check_operands(dy=dy, values=values)
    index = index_of(pattern)
    return torch.ops.dynsparse.linear_backward(dy, None, values, *index, True)[0]


def grad_weight(
    dy: Tensor, x: Tensor, values: Tensor, pattern: SparsePattern | PatternIndex
) -> Tensor:
    """Compute dW = dY^T X at the pattern's positions: the shape of `values`, which is not read."""
    check_operands(dy=dy, x=x, values=values)
    index = index_of(pattern)
    return torch.ops.dynsparse.linear_backward(dy, x, values, *index, False)[1]


# Autocast.


def register_autocast(
    library: torch.library.Library, name: str, cast: Sequence[int] = (0,)
) -> None:
    """Register the autocast behaviour of `name` and `name`_backward, on every device.

    Args:
        cast: the indices of the operands that are cast. For products these are the activations: the
            values, operand 1, are few, and float32 keeps its precision.
    """
    operator = getattr(torch.ops.dynsparse, name)
    operator_backward = getattr(torch.ops.dynsparse, f"{name}_backward")

    def register(device: str) -> None:
        def forward(*operands: Any) -> Any:
            lowered = list(operands)
            for i in cast:
                lowered[i] = _autocast_operand(operands[i], device)
            lowered[1] = autocast_values(lowered[1], device)
            with torch.autocast(device, enabled=False):
                return operator(*lowered)

        def backward(*operands: Any) -> Any:
            with torch.autocast(device, enabled=False):
                return operator_backward(*operands)

        library.impl(name, forward, f"Autocast{device.upper()}")
        library.impl(f"{name}_backward", backward, f"Autocast{device.upper()}")

    register("cpu")
    register("cuda")


register_autocast(_library, "linear")


# FLOPs: two for each non-zero and sample.


def _flops(x: Any, values: Any, *_: Any, **__: Any) -> int:
    return 2 * prod(x[:-1]) * prod(values)


def _backward_flops(dy: Any, x: Any, values: Any, *rest: Any, **_: Any) -> int:
    passes = (x is not None) + bool(rest[-1])
    return passes * 2 * prod(dy[:-1]) * prod(values)


flop_formulas: dict[str, Callable[..., int]] = {
    "linear": _flops,
    "linear_backward": _backward_flops,
}
"""Operator -> its formula for `FlopCounterMode`; other operators add theirs."""


def register_flop_formulas() -> None:
    """Register the formulas with `FlopCounterMode`, and with counters that are active.

    Importing it takes longer than importing torch, so this does nothing until it is imported.
    """
    counter = sys.modules.get("torch.utils.flop_counter")
    if counter is None:
        return
    registries = [counter.flop_registry]
    for mode in dispatch_modes():
        mode = getattr(mode, "counter", mode)
        if isinstance(mode, counter.FlopCounterMode):
            registries.append(mode.flop_registry)  # a copy of the first, made when it began
    for registry in registries:
        for name, formula in flop_formulas.items():
            if getattr(_OPS, name) not in registry:
                registry[getattr(_OPS, name)] = counter.shape_wrapper(formula)
