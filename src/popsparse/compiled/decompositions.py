"""Decompositions of torch operators into those that the machine's programs support.

These are element-wise operators, views, sums and extremes over dimensions, matrix products, and the
products of sparse layers. Everything here is torch code, so torch itself is the reference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._decomp import get_decompositions

aten = torch.ops.aten

TABLE: dict[Any, Callable[..., Any]] = get_decompositions(
    [
        aten.addmm,
        aten.baddbmm,
        aten._log_softmax,
        aten._log_softmax_backward_data,
        aten._softmax,
        aten._softmax_backward_data,
        aten.nll_loss_forward,
        aten.nll_loss_backward,
        aten.mse_loss,
        aten.mse_loss_backward,
        aten.native_layer_norm,
        aten.native_layer_norm_backward,
        aten.native_batch_norm_backward,
        aten._unsafe_view,
        aten.split_with_sizes,
        aten.std,
        aten.t,
        aten.transpose,
    ]
)

WRITING: dict[Any, Callable[..., Any]] = get_decompositions([aten.native_batch_norm])
"""Operators that modify operands without declaring it: replaced where they are called."""


def _decomposition_of(operator: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        TABLE[operator] = function
        return function

    return register


@_decomposition_of(torch.ops.dynsparse.linear.default)
def _linear(x: Tensor, values: Tensor, *rest: Any) -> Any:
    if rest[-1] is None:
        return NotImplemented
    return torch.ops.dynsparse.linear(x, values, *rest[:-1], None) + rest[-1]


def _mean(x: Tensor, dims: Sequence[int] | None = None, keepdim: bool = False, **more: Any) -> Any:
    axes = list(range(x.ndim)) if not dims else list(dims)
    return x.sum(axes, keepdim, **more) / math.prod(x.shape[axis] for axis in axes)


TABLE[aten.mean.dim] = TABLE[aten.mean.default] = _mean


@_decomposition_of(aten.var_mean.correction)
def _var_mean(
    x: Tensor, dims: Any = None, *, correction: float = 1, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    axes = list(range(x.ndim)) if not dims else list(dims)
    count = math.prod(x.shape[axis] for axis in axes)
    mean = x.sum(axes, True) / count
    spread = (x - mean).square().sum(axes, keepdim) / max(count - correction, 0)
    return spread, mean if keepdim else mean.squeeze(axes)


@_decomposition_of(aten.select_backward.default)
def _select_backward(dy: Tensor, sizes: Sequence[int], dim: int, index: int) -> Tensor:
    dim, index = dim % len(sizes), index % sizes[dim]
    return _slice_backward(dy.unsqueeze(dim), sizes, dim, index, index + 1, 1)


@_decomposition_of(aten.slice_backward.default)
def _slice_backward(
    dy: Tensor, sizes: Sequence[int], dim: int, start: int, end: int, step: int
) -> Any:
    if step != 1:
        return NotImplemented
    dim = dim % len(sizes)
    start, end, _ = slice(start, end).indices(sizes[dim])
    return aten.constant_pad_nd(dy, [0, 0] * (dy.ndim - 1 - dim) + [start, sizes[dim] - end], 0.0)


@_decomposition_of(aten._safe_softmax.default)
def _safe_softmax(x: Tensor, dim: int, dtype: Any = None) -> Tensor:
    """Softmax that gives zeros for completely masked rows."""
    x = x if dtype is None else x.to(dtype)
    highest = x.amax([dim], True)
    powers = (x - torch.where(highest == -math.inf, 0.0, highest)).exp()
    total = powers.sum([dim], True)
    return powers / torch.where(total == 0, 1.0, total)


def _is_at(index: Tensor, size: int, dim: int) -> Tensor:
    """Whether each entry of a dimension is the one selected by an index of size 1 there."""
    shape = [1] * index.ndim
    shape[dim] = size
    return torch.arange(size, dtype=index.dtype).view(shape) == index


@_decomposition_of(aten.gather.default)
def _gather(x: Tensor, dim: int, index: Tensor, **_: Any) -> Any:
    if index.shape[dim] != 1:
        return NotImplemented
    return torch.where(_is_at(index, x.shape[dim], dim), x, 0.0).sum(dim, True)


@_decomposition_of(aten.scatter.value)
def _scatter(x: Tensor, dim: int, index: Tensor, value: float) -> Any:
    if index.shape[dim] != 1:
        return NotImplemented
    return torch.where(_is_at(index, x.shape[dim], dim), value, x)


# Convolutions and pooling, over views of an image by windows.


def _windows(x: Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any, fill: Any) -> Tensor:
    """View images [N, C, H, W] by windows: [N, C, rows, columns, height, width of a window]."""
    down, right = padding
    x = aten.constant_pad_nd(x, [right, right, down, down], fill) if down or right else x
    for axis in (0, 1):
        x = x.unfold(2 + axis, dilation[axis] * (kernel[axis] - 1) + 1, stride[axis])
    return x[..., :: dilation[0], :: dilation[1]] if max(dilation) > 1 else x


def _rows(windows: Tensor) -> Tensor:
    """Windows as rows of a matrix [N * windows, C * elements of a window]."""
    count, channels, *rest = windows.shape
    rows = windows.permute(0, 2, 3, 1, 4, 5)
    return rows.reshape(count * rest[0] * rest[1], channels * rest[2] * rest[3])


def _images(rows: Tensor, count: int, height: int, width: int) -> Tensor:
    """A matrix [N * H * W, C] as [N, C, H, W]."""
    return rows.view(count, height, width, rows.shape[1]).permute(0, 3, 1, 2)


def _dilate(x: Tensor, stride: Sequence[int]) -> Tensor:
    """Insert stride - 1 zeros between the elements of [..., H, W]."""
    if max(stride) == 1:
        return x
    *outer, height, width = x.shape
    down, right = stride
    apart = x.view(*outer, height, 1, width, 1)
    apart = aten.constant_pad_nd(apart, [0, right - 1, 0, 0, 0, down - 1], 0.0)
    apart = apart.reshape(*outer, height * down, width * right)
    return apart[..., : (height - 1) * down + 1, : (width - 1) * right + 1]


def _fold(windows: Tensor, size: Sequence[int], stride: Any, padding: Any, dilation: Any) -> Tensor:
    """The inverse of `_windows`, [N, C, *size]: overlapping elements are added."""
    *outer, rows, columns, height, width = windows.shape
    padded = [2 * p + n for p, n in zip(padding, size, strict=True)]
    if (height, width) == tuple(stride) and max(dilation) == 1:
        total = windows.transpose(-2, -3).reshape(*outer, rows * height, columns * width)
        below, beside = padded[0] - rows * height, padded[1] - columns * width
        total = aten.constant_pad_nd(total, [0, beside, 0, below], 0.0)
    else:
        parts = []
        for i in range(height):
            for j in range(width):
                part = _dilate(windows[..., i, j], stride)
                top, left = i * dilation[0], j * dilation[1]
                below = padded[0] - top - part.shape[-2]
                beside = padded[1] - left - part.shape[-1]
                parts.append(aten.constant_pad_nd(part, [left, beside, top, below], 0.0))
        total = parts[0]
        for part in parts[1:]:
            total = total + part
    return total[..., padding[0] : padding[0] + size[0], padding[1] : padding[1] + size[1]]


def _is_plain(stride: Any, transposed: bool, groups: int) -> bool:
    return len(stride) == 2 and not transposed and groups == 1


@_decomposition_of(aten.convolution.default)
def _convolution(
    x: Tensor, weight: Tensor, bias: Any, stride: Any, padding: Any, dilation: Any,
    transposed: bool, _: Any, groups: int,
) -> Any:  # fmt: skip
    if not _is_plain(stride, transposed, groups):
        return NotImplemented
    windows = _windows(x, weight.shape[2:], stride, padding, dilation, 0.0)
    product = _rows(windows) @ weight.view(weight.shape[0], -1).t()
    images = _images(product, x.shape[0], *windows.shape[2:4])
    return images if bias is None else images + bias.view(-1, 1, 1)


@_decomposition_of(aten.convolution_backward.default)
def _convolution_backward(
    dy: Tensor, x: Tensor, weight: Tensor, _: Any, stride: Any, padding: Any, dilation: Any,
    transposed: bool, __: Any, groups: int, needed: Sequence[bool],
) -> Any:  # fmt: skip
    if not _is_plain(stride, transposed, groups):
        return NotImplemented
    dx = dw = db = None
    channels, kernel = weight.shape[1], weight.shape[2:]
    if needed[0]:
        apart = _dilate(dy, stride)
        pads = []
        for axis in (1, 0):
            first = dilation[axis] * (kernel[axis] - 1) - padding[axis]
            pads += [first, x.shape[2 + axis] - apart.shape[2 + axis] - first]
            pads[-1] += dilation[axis] * (kernel[axis] - 1)
        apart = aten.constant_pad_nd(apart, pads, 0.0)
        windows = _windows(apart, kernel, [1, 1], [0, 0], dilation, 0.0)
        turned = weight.flip(2, 3).permute(0, 2, 3, 1).reshape(-1, channels)
        dx = _images(_rows(windows) @ turned, x.shape[0], *x.shape[2:])
    if needed[1]:
        windows = _windows(x, kernel, stride, padding, dilation, 0.0)
        rows = dy.permute(0, 2, 3, 1).reshape(-1, dy.shape[1])
        dw = (rows.t() @ _rows(windows)).view(weight.shape)
    if needed[2]:
        db = dy.sum([0, 2, 3])
    return dx, dw, db


def _as_pairs(*settings: Any) -> list[Any]:
    """Pooling settings for both dimensions; empty ones default to the first, the kernel size."""
    filled = [setting or settings[0] for setting in settings]
    return [[*setting] * (2 // len(setting)) for setting in filled]


def _positions(x: Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any) -> Tensor:
    """Positions of the elements of windows in an image, [rows, columns of windows, ...]."""
    image = torch.arange(x.shape[-2] * x.shape[-1]).view(1, 1, *x.shape[-2:])
    return _windows(image, kernel, stride, padding, dilation, -1)[0, 0]


@_decomposition_of(aten.max_pool2d_with_indices.default)
def _max_pool(
    x: Tensor, kernel: Any, stride: Any = (), padding: Any = (0, 0), dilation: Any = (1, 1),
    ceil_mode: bool = False,
) -> Any:  # fmt: skip
    if ceil_mode:
        return NotImplemented
    kernel, stride, padding, dilation = _as_pairs(kernel, stride, padding, dilation)
    windows = _windows(x, kernel, stride, padding, dilation, -math.inf)
    highest = windows.amax([4, 5])
    is_highest = windows == highest[..., None, None]
    positions = _positions(x, kernel, stride, padding, dilation)
    nowhere = x.shape[-2] * x.shape[-1]
    return highest, torch.where(is_highest, positions, nowhere).amin([4, 5])


@_decomposition_of(aten.max_pool2d_with_indices_backward.default)
def _max_pool_backward(
    dy: Tensor, x: Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any,
    ceil_mode: bool, indices: Tensor,
) -> Any:  # fmt: skip
    if ceil_mode:
        return NotImplemented
    kernel, stride, padding, dilation = _as_pairs(kernel, stride, padding, dilation)
    positions = _positions(x, kernel, stride, padding, dilation)
    windows = torch.where(indices[..., None, None] == positions, dy[..., None, None], 0.0)
    return _fold(windows, x.shape[-2:], stride, padding, dilation)


@_decomposition_of(aten.avg_pool2d.default)
def _average_pool(
    x: Tensor, kernel: Any, stride: Any = (), padding: Any = (0, 0), ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: int | None = None,
) -> Any:  # fmt: skip
    kernel, stride, padding = _as_pairs(kernel, stride, padding)
    if ceil_mode or (max(padding) and not count_include_pad):
        return NotImplemented
    windows = _windows(x, kernel, stride, padding, [1, 1], 0.0)
    return windows.sum([4, 5]) / (divisor_override or math.prod(kernel))


@_decomposition_of(aten.avg_pool2d_backward.default)
def _average_pool_backward(
    dy: Tensor, x: Tensor, kernel: Any, stride: Any, padding: Any, ceil_mode: bool,
    count_include_pad: bool, divisor_override: int | None,
) -> Any:  # fmt: skip
    kernel, stride, padding = _as_pairs(kernel, stride, padding)
    if ceil_mode or (max(padding) and not count_include_pad):
        return NotImplemented
    share = dy / (divisor_override or math.prod(kernel))
    windows = share[..., None, None].expand(*share.shape, *kernel)
    return _fold(windows, x.shape[-2:], stride, padding, [1, 1])


# Embeddings: selecting rows is a product with a one-hot matrix.


def _one_hot(indices: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    return (indices.reshape(-1, 1) == torch.arange(count)).to(dtype)


@_decomposition_of(aten.embedding.default)
def _embedding(weight: Tensor, indices: Tensor, *_: Any) -> Tensor:
    rows = _one_hot(indices, weight.shape[0], weight.dtype) @ weight
    return rows.view(*indices.shape, weight.shape[1])


@_decomposition_of(aten.embedding_dense_backward.default)
def _embedding_backward(
    dy: Tensor, indices: Tensor, count: int, padding: int, scale_by_frequency: bool
) -> Any:
    if scale_by_frequency or padding >= 0:
        return NotImplemented
    return _one_hot(indices, count, dy.dtype).t() @ dy.reshape(-1, dy.shape[-1])
