"""The three products for any floating point type, shape and device: checks, then the passes.

On a CPU float32 work goes to the compiled kernels that `choice` finds fastest; everything else
(float64, other devices, no compiled kernels) goes through `naive`. bfloat16 has kernels of its own
(`bfloat16.py`); what these do not serve, and float16, is computed in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dynsparse import native
from dynsparse.ops import capture
from dynsparse.ops.linear import naive
from dynsparse.ops.linear.choice import choose_for
from dynsparse.ops.linear.kernels import bfloat16, dense, small, sparse
from dynsparse.ops.linear.layer_index import LayerIndex

__all__ = ["backward", "check_backward", "check_input", "forward", "record"]

_FORWARD = {"sparse": sparse.forward, "small": small.forward, "dense": dense.forward}
_BACKWARD = {"sparse": sparse.backward, "small": small.backward, "dense": dense.backward}


def check_input(x: Tensor, values: Tensor, features: int, what: str) -> None:
    """Raises RuntimeError where `x`, called `what`, cannot meet `values` in `features` features."""
    if x.dim() == 0 or x.shape[-1] != features:
        raise RuntimeError(
            f"{what} must end in {features} features for this sparse layer, "
            f"got the shape {list(x.shape)}"
        )
    if not x.is_floating_point():
        raise RuntimeError(f"{what} must be floating point, got {x.dtype}")
    if x.device != values.device:
        raise RuntimeError(
            f"{what} is on {x.device} but the layer's values are on {values.device}: "
            "move one of them"
        )
    low = x.dtype in (torch.bfloat16, torch.float16) and values.dtype == torch.float32
    if x.dtype != values.dtype and not low:
        raise RuntimeError(
            f"{what} is {x.dtype} but the layer's values are {values.dtype}: convert one of them "
            "(bfloat16 and float16 activations may meet float32 values)"
        )


def _check_forward(x: Tensor, values: Tensor, p: LayerIndex, bias: Tensor | None) -> None:
    if values.shape != p.values_shape or values.device != p.row_ptr.device:
        LayerIndex(p.index, values)  # raises, and says what is wrong
        raise RuntimeError(
            f"values must have the shape {list(p.values_shape)} on {p.row_ptr.device}, "
            f"got {list(values.shape)} on {values.device}"
        )
    check_input(x, values, p.in_features, "x")
    if bias is not None and (bias.shape != (p.out_features,) or bias.device != values.device):
        raise RuntimeError(
            f"bias must be [{p.out_features}] on {values.device}, "
            f"got the shape {list(bias.shape)} on {bias.device}"
        )


def check_backward(dy: Tensor, x: Tensor | None, values: Tensor, p: LayerIndex) -> None:
    """Raises RuntimeError where the operands of the two gradients do not fit."""
    check_input(dy, values, p.out_features, "dy")
    if x is None:
        return
    check_input(x, values, p.in_features, "x")
    if x.shape[:-1] != dy.shape[:-1]:
        raise RuntimeError(
            f"x and dy must agree in all but the features, got the shapes {list(x.shape)} "
            f"and {list(dy.shape)}"
        )


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _matrix(x: Tensor, dtype: torch.dtype) -> Tensor:
    if x.dim() != 2:
        x = x.reshape(-1, x.shape[-1])
    return x if x.dtype is dtype else x.to(dtype)


def forward(x: Tensor, values: Tensor, p: LayerIndex, bias: Tensor | None) -> Tensor:
    """[..., in] -> [..., out], the dtype of x. Everything is checked."""
    # What most calls bring needs no conversion, and one condition instead of the checks in turn.
    if (
        x.dtype is torch.float32
        and values.dtype is torch.float32
        and x.is_cpu
        and values.is_cpu
        and p.on_cpu
        and values.shape == p.values_shape
        and x.dim() == 2
        and x.shape[1] == p.in_features
        and (
            bias is None
            or (bias.dtype is torch.float32 and bias.is_cpu and bias.shape == p.bias_shape)
        )
        and native.load() is not None
    ):
        return _FORWARD[choose_for(p, x.shape[0], False)](x, values, p, bias)
    _check_forward(x, values, p, bias)
    if bfloat16.serves(x, values, p, False):
        y = bfloat16.forward(_matrix(x, x.dtype), values, p, bias)
        return y if x.dim() == 2 else y.view(*x.shape[:-1], p.out_features)
    dtype = _compute_dtype(x.dtype)
    x2d = _matrix(x, dtype)
    w = values.to(dtype)
    b = None if bias is None else bias.to(dtype)
    if sparse.available(x2d, w):
        y = _FORWARD[choose_for(p, x2d.shape[0], False)](x2d, w, p, b)
    else:
        y = naive.forward(x2d, w, p.index, b)
    if y.dtype is not x.dtype:
        y = y.to(x.dtype)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], p.out_features)


def backward(
    dy: Tensor, x: Tensor | None, values: Tensor, p: LayerIndex, need_input: bool
) -> tuple[Tensor | None, Tensor | None]:
    """dX [..., in] where needed, and dW like values where x is given.

    Without checks: autograd comes with what forward has checked, others call `check_backward`.
    """
    if (
        dy.dtype is torch.float32
        and values.dtype is torch.float32
        and dy.is_cpu
        and p.on_cpu
        and dy.dim() == 2
        and (x is None or (x.dtype is torch.float32 and x.dim() == 2))
        and native.load() is not None
    ):
        passes = _BACKWARD[choose_for(p, dy.shape[0], True)]
        return passes(dy, dy if x is None else x, values, p, need_input, x is not None)
    low = bfloat16.serves(dy, values, p, True)
    dtype = dy.dtype if low else _compute_dtype(dy.dtype)
    dy2d = _matrix(dy, dtype)
    x2d = None if x is None else _matrix(x, dtype)
    any_x = dy2d if x2d is None else x2d  # not read without need_values
    w = values if low or values.dtype is dtype else values.to(dtype)
    if low:
        dx, dw = bfloat16.backward(dy2d, any_x, w, p, need_input, x2d is not None)
    elif sparse.available(dy2d, w):
        passes = _BACKWARD[choose_for(p, dy2d.shape[0], True)]
        dx, dw = passes(dy2d, any_x, w, p, need_input, x2d is not None)
    else:
        dx = naive.grad_input(dy2d, w, p.index) if need_input else None
        dw = None if x2d is None else naive.grad_weight(dy2d, x2d, w, p.index)
    if dx is not None:
        if dx.dtype is not dy.dtype:
            dx = dx.to(dy.dtype)
        if dy.dim() != 2:
            dx = dx.view(*dy.shape[:-1], p.in_features)
    if dw is not None and dw.dtype is not values.dtype:
        dw = dw.to(values.dtype)
    return dx, dw


def record(values: Tensor, x: Tensor, dy: Tensor) -> None:
    """Hand x and dY to the capture of this layer, as the matrices it wants."""
    dtype = _compute_dtype(dy.dtype)
    capture.record(values, _matrix(x.detach(), dtype), _matrix(dy.detach(), dtype))
