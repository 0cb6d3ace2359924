"""The sparse fully connected operator and its autograd, registered with torch.library.

`torch.ops.dynsparse.linear` takes plain strided tensors, so torch.compile, autocast and fake
tensors see an ordinary operator. On a CPU float32 work goes to the compiled kernels; everything
else (float64, other devices, no compiled kernels) goes through `naive`. Eager calls with ordinary
tensors take a shorter way to the same two functions: the dispatcher's way through Python costs tens
of microseconds, more than the products of a small layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dynsparse.ops import capture
from dynsparse.ops.linear import cpu, naive
from dynsparse.pattern import PatternIndex, SparsePattern

__all__ = ["grad_input", "grad_weight", "linear"]

_INDEX = "Tensor row_ptr, Tensor cols, Tensor col_ptr, Tensor csc_rows, Tensor csc_perm"

_library = torch.library.Library("dynsparse", "DEF")
_library.define(f"linear(Tensor x, Tensor values, {_INDEX}, Tensor? bias) -> Tensor")
_library.define(
    f"linear_backward(Tensor dy, Tensor? x, Tensor values, {_INDEX}, bool need_input)"
    " -> (Tensor, Tensor)"
)


def _features(index: PatternIndex, b: int) -> tuple[int, int]:
    return (index.row_ptr.shape[0] - 1) * b, (index.col_ptr.shape[0] - 1) * b


def _check(x: Tensor, values: Tensor, features: int, what: str) -> None:
    if x.dim() == 0 or x.shape[-1] != features:
        raise RuntimeError(
            f"{what} must end in {features} features for this sparse layer, "
            f"got the shape {list(x.shape)}"
        )
    if not x.is_floating_point():
        raise RuntimeError(f"{what} must be floating point, got {x.dtype}")
    low = x.dtype in (torch.bfloat16, torch.float16) and values.dtype == torch.float32
    if x.dtype != values.dtype and not low:
        raise RuntimeError(
            f"{what} is {x.dtype} but the layer's values are {values.dtype}: convert one of them "
            "(bfloat16 and float16 activations may meet float32 values)"
        )


def _check_values(values: Tensor, index: PatternIndex) -> None:
    """Lengths and types that do not fit would make the kernels read where nothing is."""
    if values.dim() not in (1, 3) or (values.dim() == 3 and values.shape[1] != values.shape[2]):
        raise RuntimeError(
            f"values must be [nnz] or [nnz, b, b], got the shape {list(values.shape)}"
        )
    nnz = index.cols.shape[0]
    if values.shape[0] != nnz:
        raise RuntimeError(
            f"values hold {values.shape[0]} blocks but the pattern has {nnz}: "
            "pass the values of this pattern"
        )
    if index.csc_rows.shape[0] != nnz or index.csc_perm.shape[0] != nnz:
        raise RuntimeError("the index tensors differ in length: take them from SparsePattern.index")
    for tensor in index:
        if tensor.dtype is not torch.int32 or tensor.device != values.device:
            raise RuntimeError(
                f"the index tensors must be int32 on {values.device}, where the values are, "
                f"got {tensor.dtype} on {tensor.device}"
            )


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _matrix(x: Tensor, dtype: torch.dtype) -> Tensor:
    if x.dim() != 2:
        x = x.reshape(-1, x.shape[-1])
    return x if x.dtype is dtype else x.to(dtype)


def _forward(x: Tensor, values: Tensor, *rest: Tensor | None) -> Tensor:
    index, bias = PatternIndex(*rest[:5]), rest[5]  # type: ignore[arg-type]
    _check_values(values, index)
    out_features, in_features = _features(index, naive.block_size_of(values))
    _check(x, values, in_features, "x")
    if bias is not None and bias.shape != (out_features,):
        raise RuntimeError(f"bias must be [{out_features}], got the shape {list(bias.shape)}")
    dtype = _compute_dtype(x.dtype)
    x2d = _matrix(x, dtype)
    w = values.to(dtype)
    b = None if bias is None else bias.to(dtype)
    passes = cpu if cpu.available(x2d, w) else naive
    y = passes.forward(x2d, w, index, b)
    if y.dtype is not x.dtype:
        y = y.to(x.dtype)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], out_features)


def _operator_backward(
    dy: Tensor, x: Tensor | None, values: Tensor, *rest: Tensor | bool
) -> tuple[Tensor, Tensor]:
    index = PatternIndex(*rest[:5])  # type: ignore[arg-type]
    _check_values(values, index)
    out_features, in_features = _features(index, naive.block_size_of(values))
    _check(dy, values, out_features, "dy")
    if x is not None:
        _check(x, values, in_features, "x")
        if x.shape[:-1] != dy.shape[:-1]:
            raise RuntimeError(
                f"x and dy must agree in all but the features, got the shapes {list(x.shape)} "
                f"and {list(dy.shape)}"
            )
    if x is not None and capture.is_open(values):
        # Copies, since compiled code may reuse both buffers.
        _record(values, x.clone(), dy.clone())
    return _backward(dy, x, values, *rest)


def _record(values: Tensor, x: Tensor, dy: Tensor) -> None:
    dtype = _compute_dtype(dy.dtype)
    capture.record(values, _matrix(x.detach(), dtype), _matrix(dy.detach(), dtype))


def _backward(
    dy: Tensor, x: Tensor | None, values: Tensor, *rest: Tensor | bool
) -> tuple[Tensor, Tensor]:
    """Without checks: autograd comes with what forward has checked, others by the operator."""
    index, need_input = PatternIndex(*rest[:5]), bool(rest[5])  # type: ignore[arg-type]
    _, in_features = _features(index, naive.block_size_of(values))
    dtype = _compute_dtype(dy.dtype)
    dy2d = _matrix(dy, dtype)
    x2d = None if x is None else _matrix(x, dtype)
    w = values.to(dtype)
    if cpu.available(dy2d, w):
        any_x = dy2d if x2d is None else x2d  # not read without need_values
        dx, dw = cpu.backward(dy2d, any_x, w, index, need_input, x2d is not None)
    else:
        dx = naive.grad_input(dy2d, w, index) if need_input else None
        dw = None if x2d is None else naive.grad_weight(dy2d, x2d, w, index)
    return (
        dy.new_empty(0) if dx is None else dx.to(dy.dtype).view(*dy.shape[:-1], in_features),
        values.new_empty(0) if dw is None else dw.to(values.dtype),
    )


_library.impl("linear", _forward, "CompositeExplicitAutograd")
_library.impl("linear_backward", _operator_backward, "CompositeExplicitAutograd")


@torch.library.register_fake("dynsparse::linear", lib=_library)
def _(x: Tensor, values: Tensor, *rest: Tensor | None) -> Tensor:
    index = PatternIndex(*rest[:5])  # type: ignore[arg-type]
    out_features, in_features = _features(index, naive.block_size_of(values))
    _check(x, values, in_features, "x")
    return x.new_empty(*x.shape[:-1], out_features)


@torch.library.register_fake("dynsparse::linear_backward", lib=_library)
def _(dy: Tensor, x: Tensor | None, values: Tensor, *rest: Tensor | bool) -> tuple[Tensor, Tensor]:
    index = PatternIndex(*rest[:5])  # type: ignore[arg-type]
    _, in_features = _features(index, naive.block_size_of(values))
    return (
        dy.new_empty(*dy.shape[:-1], in_features) if rest[5] else dy.new_empty(0),
        values.new_empty(0) if x is None else torch.empty_like(values),
    )


def _save(ctx, x: Tensor, values: Tensor, bias: Tensor | None, *index: Tensor) -> None:
    # Without a gradient of the values nothing of x is needed, so it is not kept alive.
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, values, *index)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _gradients(ctx, dy: Tensor, need_bias: bool, passes):
    """Of x, values and bias; `passes` is the operator of the two sparse ones, or its short way."""
    x, values, *index = ctx.saved_tensors
    need_input, need_values = ctx.needs_input_grad[:2]
    dx = dw = db = None
    if need_input or need_values:
        dx, dw = passes(dy, x, values, *index, need_input)
    if need_bias:
        db = dy.reshape(-1, dy.shape[-1]).sum(0, dtype=ctx.bias_dtype)
    return dx if need_input else None, dw if need_values else None, db


def _setup_context(ctx, inputs, output) -> None:
    x, values, *index, bias = inputs
    _save(ctx, x, values, bias, *index)


def _autograd(ctx, dy: Tensor):
    operator = torch.ops.dynsparse.linear_backward
    dx, dw, db = _gradients(ctx, dy, ctx.needs_input_grad[7], operator)
    return dx, dw, *[None] * 5, db


def _no_double_backward(ctx, *grads):
    raise RuntimeError(
        "dynsparse's sparse linear layer has no second derivative: "
        "call backward without create_graph=True"
    )


torch.library.register_autograd(
    "dynsparse::linear", _autograd, setup_context=_setup_context, lib=_library
)
torch.library.register_autograd("dynsparse::linear_backward", _no_double_backward, lib=_library)


def _autocast(device: str) -> None:
    def forward(x: Tensor, *rest: Tensor | None) -> Tensor:
        # Only the activations are lowered: the values are few, and stay as exact as they are.
        if x.is_floating_point() and x.dtype != torch.float64:
            x = x.to(torch.get_autocast_dtype(device))
        with torch.autocast(device, enabled=False):
            return torch.ops.dynsparse.linear(x, *rest)

    def backward(*args):
        with torch.autocast(device, enabled=False):
            return torch.ops.dynsparse.linear_backward(*args)

    _library.impl("linear", forward, f"Autocast{device.upper()}")
    _library.impl("linear_backward", backward, f"Autocast{device.upper()}")


_autocast("cpu")
_autocast("cuda")


def _eager_backward(
    dy: Tensor, x: Tensor | None, values: Tensor, *rest: Tensor | bool
) -> tuple[Tensor, Tensor]:
    if x is not None and capture.is_open(values):
        _record(values, x, dy)
    return _backward(dy, x, values, *rest)


class _EagerLinear(torch.autograd.Function):
    """The operator and its autograd without the dispatcher."""

    @staticmethod
    def forward(ctx, x, values, bias, *index):
        _save(ctx, x, values, bias, *index)
        return _forward(x, values, *index, bias)

    @staticmethod
    def backward(ctx, dy):
        # With create_graph the operator is called, which refuses second derivatives.
        operator = torch.ops.dynsparse.linear_backward
        passes = operator if torch.is_grad_enabled() else _eager_backward
        return *_gradients(ctx, dy, ctx.needs_input_grad[2], passes), *[None] * 5


def _is_plain_eager(x: Tensor) -> bool:
    """Whether nothing watches the dispatcher: no compiler, mode, transform, autocast, subclass."""
    return not (
        torch.compiler.is_compiling()
        or type(x) is not Tensor
        or torch.is_autocast_enabled(x.device.type)
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.jit.is_tracing()
        or x.is_meta
    )


def _index_of(pattern: SparsePattern | PatternIndex) -> PatternIndex:
    return pattern.index if isinstance(pattern, SparsePattern) else pattern


def linear(
    x: Tensor, values: Tensor, pattern: SparsePattern | PatternIndex, bias: Tensor | None = None
) -> Tensor:
    """Y = X W^T + bias for a sparse W. Differentiable in x, values and bias.

    Args:
        x: [..., in]; any strides; float32, float64, bfloat16 or float16.
        values: [nnz] or [nnz, b, b], the dtype of x; float32 values also take bfloat16 and float16
            activations and then accumulate in float32.
        pattern: the pattern, or its index tensors on the device of `values`.
        bias: [out] or None.

    Returns:
        [..., out], the dtype of x, contiguous.

    Raises:
        RuntimeError: shapes or dtypes that do not fit, or a second derivative.
    """
    index = _index_of(pattern)
    if _is_plain_eager(x):
        return _EagerLinear.apply(x, values, bias, *index)
    return torch.ops.dynsparse.linear(x, values, *index, bias)


def grad_input(dy: Tensor, values: Tensor, pattern: SparsePattern | PatternIndex) -> Tensor:
    """dX = dY W: [..., out] -> [..., in]."""
    index = _index_of(pattern)
    return torch.ops.dynsparse.linear_backward(dy, None, values, *index, True)[0]


def grad_weight(
    dy: Tensor, x: Tensor, values: Tensor, pattern: SparsePattern | PatternIndex
) -> Tensor:
    """dW = (dY^T X) at the pattern's positions only: the shape of `values`, which is not read."""
    index = _index_of(pattern)
    return torch.ops.dynsparse.linear_backward(dy, x, values, *index, False)[1]
