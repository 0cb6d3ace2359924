"""The three passes of a sparse convolution, non-zero by non-zero in plain torch: the oracle."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dynsparse.ops.conv.geometry import Geometry
from dynsparse.ops.linear.naive import block_size_of, cols_of, rows_of
from dynsparse.pattern import PatternIndex


def _entries(
    values: Tensor, index: PatternIndex, g: Geometry
) -> Iterator[tuple[int, slice, slice, int, int]]:
    """Yield (slot, outputs, inputs, down, across) of every block."""
    b = block_size_of(values)
    height, width = (len(index.row_ptr) - 1) * b, (len(index.col_ptr) - 1) * b
    per_group = width // g.taps
    pairs = zip(rows_of(index).tolist(), cols_of(index).tolist(), strict=True)
    for slot, (row, col) in enumerate(pairs):
        tap, channel = divmod(col * b, per_group)
        group = row * b * g.groups // height
        first = group * per_group + channel
        down, across = divmod(tap, g.kernel[1])
        yield slot, slice(row * b, row * b + b), slice(first, first + b), down, across


def _window(padded: Tensor, down: int, across: int, size: tuple[int, ...], g: Geometry) -> Tensor:
    """Return the entries that one tap reads of a padded input [batch, channels, height, width]."""
    (sh, sw), (dh, dw) = g.stride, g.dilation
    rows = slice(down * dh, down * dh + sh * (size[0] - 1) + 1, sh)
    cols = slice(across * dw, across * dw + sw * (size[1] - 1) + 1, sw)
    return padded[:, :, rows, cols]


def forward(
    x: Tensor, values: Tensor, index: PatternIndex, bias: Tensor | None, g: Geometry
) -> Tensor:
    """Return y [batch, out, ...] of x [batch, in, height, width]; values [nnz] or [nnz, b, b]."""
    b, padded = block_size_of(values), g.pad(x)
    size = g.output_size(*x.shape[2:])
    y = x.new_zeros(x.shape[0], (len(index.row_ptr) - 1) * b, *size)
    for slot, outputs, inputs, down, across in _entries(values, index, g):
        patches = _window(padded, down, across, size, g)[:, inputs]
        y[:, outputs] += torch.einsum("oi,nihw->nohw", values[slot].view(b, b), patches)
    return y if bias is None else y + bias[:, None, None]


def grad_input(
    dy: Tensor, values: Tensor, index: PatternIndex, size: tuple[int, int], g: Geometry
) -> Tensor:
    """Return dX [batch, in, *size] of dy [batch, out, ...]."""
    b = block_size_of(values)
    channels = (len(index.col_ptr) - 1) * b // g.taps * g.groups
    dx = g.pad(dy.new_zeros(dy.shape[0], channels, *size))
    for slot, outputs, inputs, down, across in _entries(values, index, g):
        part = torch.einsum("oi,nohw->nihw", values[slot].view(b, b), dy[:, outputs])
        _window(dx, down, across, tuple(dy.shape[2:]), g)[:, inputs] += part
    top, left = g.padding[:2]
    return dx[:, :, top : top + size[0], left : left + size[1]]


def grad_weight(dy: Tensor, x: Tensor, values: Tensor, index: PatternIndex, g: Geometry) -> Tensor:
    """Return the gradient of the weight at the pattern's positions: the shape of `values`."""
    b, padded = block_size_of(values), g.pad(x)
    out = x.new_zeros(len(values), b, b)
    for slot, outputs, inputs, down, across in _entries(values, index, g):
        patches = _window(padded, down, across, tuple(dy.shape[2:]), g)[:, inputs]
        out[slot] = torch.einsum("nohw,nihw->oi", dy[:, outputs], patches)
    return out.view(values.shape)
