"""The dense way: a dense convolution with the weight laid out for it.

It serves every device and type. Off the CPU it is the only way; on it what is past the break-even
density goes it, and what the compiled kernels do not take. The weight exists as long as a pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from dynsparse.ops.conv.geometry import Geometry, to_matrix, to_weight
from dynsparse.ops.linear.layer_index import LayerIndex
from dynsparse.ops.linear.naive import cols_of, rows_of


def _flat(p: LayerIndex) -> Tensor:
    """Flat block positions of the slots, int64 [nnz]."""
    return rows_of(p.index) * (p.in_features // p.block_size) + cols_of(p.index)


def _laid_out(values: Tensor, p: LayerIndex, g: Geometry) -> Tensor:
    """The weight [out, in / groups, kh, kw]."""
    b, out, features = p.block_size, p.out_features, p.in_features
    blocks = values.new_zeros(out // b * (features // b), b * b)
    blocks.index_copy_(0, p.derived("flat", _flat), values.reshape(-1, b * b))
    matrix = blocks.view(out // b, features // b, b, b).transpose(1, 2).reshape(out, features)
    return to_weight(matrix, g.kernel)


def _taken(weight: Tensor, p: LayerIndex) -> Tensor:
    """The reverse, for a gradient: like the values."""
    b = p.block_size
    matrix = to_matrix(weight)
    blocks = matrix.view(matrix.shape[0] // b, b, matrix.shape[1] // b, b).transpose(1, 2)
    return blocks.reshape(-1, b * b).index_select(0, p.derived("flat", _flat)).view(p.values_shape)


def _settled(x: Tensor, g: Geometry) -> tuple[Tensor, tuple[int, int]]:
    """The input and its padding, which torch's convolution has the same on both sides."""
    top, left, bottom, right = g.padding
    if (top, left) == (bottom, right):
        return x, (top, left)
    return pad(x, (left, right, top, bottom)), (0, 0)


def forward(x: Tensor, values: Tensor, p: LayerIndex, bias: Tensor | None, g: Geometry) -> Tensor:
    x, padding = _settled(x, g)
    return torch.conv2d(x, _laid_out(values, p, g), bias, g.stride, padding, g.dilation, g.groups)


def backward(
    dy: Tensor,
    x: Tensor | None,
    values: Tensor,
    p: LayerIndex,
    g: Geometry,
    size: Sequence[int],
    need_input: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """dX [batch, in, *size] where needed, and dW like the values where x is given."""
    channels = p.in_features // g.taps * g.groups
    # torch reads the shape alone where it has no gradient of the weight to compute.
    given = dy.new_empty(1).expand(dy.shape[0], channels, *size) if x is None else x
    settled, padding = _settled(given, g)
    dx, dw, _ = torch.ops.aten.convolution_backward(
        dy, settled, _laid_out(values, p, g), None, g.stride, padding, g.dilation,
        False, [0, 0], g.groups, [need_input, x is not None, False],
    )  # fmt: skip
    if need_input and settled is not given:
        top, left = g.padding[:2]
        dx = dx[:, :, top : top + size[0], left : left + size[1]]
    return dx if need_input else None, None if x is None else _taken(dw, p)
