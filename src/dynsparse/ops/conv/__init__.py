"""The sparse convolution of two dimensions: one operator, one autograd.

Its weight is a sparse matrix over the unfolded input, which is never materialised; see
`geometry.Geometry` for the order of its columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.compiler import is_compiling

from dynsparse._core.checks import check_kind
from dynsparse.ops.conv import autograd as autograd
from dynsparse.ops.conv.geometry import Geometry
from dynsparse.ops.linear.autograd import check_operands, index_of, register_flop_formulas
from dynsparse.ops.torch_internals import has_modes, refuse_transforms
from dynsparse.pattern import PatternIndex, SparsePattern

__all__ = ["Geometry", "conv", "grad_input", "grad_weight"]


def _check(geometry: Geometry, **operands: Tensor | None) -> None:
    check_operands(**operands)
    check_kind("geometry", geometry, Geometry, "a Geometry")
    refuse_transforms("a sparse convolution", *operands.values())


def conv(
    x: Tensor,
    values: Tensor,
    pattern: SparsePattern | PatternIndex,
    geometry: Geometry,
    bias: Tensor | None = None,
) -> Tensor:
    """Compute a convolution with a sparse weight, differentiable twice in x, values and bias.

    Args:
        x: [batch, in, height, width]; any strides; float32, float64, bfloat16 or float16.
        values: [nnz] or [nnz, b, b], the dtype of x; float32 values also take bfloat16 and float16
            activations and then accumulate in float32.
        pattern: the pattern of the matrix [out, kh * kw * in / groups], or its index tensors on the
            device of `values`.
        geometry: kernel, stride, padding, dilation and groups.
        bias: [out] or None.

    Returns:
        [batch, out, height, width] of the output, dtype and layout as x.

    Raises:
        RuntimeError: shapes, dtypes or devices that do not fit, index tensors that point outside;
            a transform of torch.func.
    """
    index = index_of(pattern)
    if not is_compiling():
        _check(geometry, x=x, values=values, bias=bias)
        if has_modes():
            register_flop_formulas()
    return torch.ops.dynsparse.conv(x, values, *index, bias, geometry.to_list())


def grad_input(
    dy: Tensor,
    values: Tensor,
    pattern: SparsePattern | PatternIndex,
    geometry: Geometry,
    size: Sequence[int],
) -> Tensor:
    """Return dX [batch, in, height, width] of dy [batch, out, ...]; `size` is (height, width)."""
    index = index_of(pattern)
    _check(geometry, dy=dy, values=values)
    g = geometry.to_list()
    return torch.ops.dynsparse.conv_backward(dy, None, values, *index, g, size, True)[0]


def grad_weight(
    dy: Tensor, x: Tensor, values: Tensor, pattern: SparsePattern | PatternIndex, geometry: Geometry
) -> Tensor:
    """Return the gradient of the weight at the pattern's positions: like values, which are not
    read."""
    index = index_of(pattern)
    _check(geometry, dy=dy, x=x, values=values)
    g = geometry.to_list()
    return torch.ops.dynsparse.conv_backward(dy, x, values, *index, g, x.shape[2:], False)[1]
