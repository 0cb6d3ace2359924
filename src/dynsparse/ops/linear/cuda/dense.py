"""Sparse linear products through dense ones, on any device but the CPU.

The weight is expanded in the type of the activations for one dense product: values, gradients and
optimizer state stay sparse. Backward reuses it if it is no larger than x or the values, both of
which are saved for backward anyway; otherwise it is freed and expanded again. So a model's memory
is in proportion to these, and not to its dense weights.

The gradient of the weight is computed a panel of rows at a time, in the type of the values, and its
entries are gathered. Triton kernels move the entries where Triton runs, and torch's operators
elsewhere, with the same bits. Shapes depend on the layer and not on the pattern, so there is no
host synchronisation. No two entries are written to one position: results are the same on every run.
"""

from __future__ import annotations

import functools
from types import ModuleType

import torch
from torch import Tensor
from torch.nn.functional import linear

from dynsparse.ops.linear.cuda.chip import runs_triton
from dynsparse.ops.linear.layer_index import LayerIndex
from dynsparse.pattern.on_device import flat_positions, order_by_slots

# Size of a panel of the gradient, in float32: 8192 x 8192 is one. Products of few rows leave
# multiprocessors idle, and all entries are searched for in each panel.
PANEL_BYTES = 256 << 20

# Without Triton, layers with at most so many lines of blocks keep their positions, 8 bytes each.
KEPT_LINES = 1 << 19

_LOW = (torch.bfloat16, torch.float16)


def forward(
    x: Tensor,
    values: Tensor,
    p: LayerIndex,
    bias: Tensor | None,
    keep: list[Tensor] | None = None,
) -> Tensor:
    """Compute y [B, out] = x W^T + bias, in the dtype of x.

    Args:
        x: [B, in], any strides and floating point type.
        values: [nnz] or [nnz, b, b], the dtype of x, or float32.
        p: the layer's index.
        bias: [out], or None.
        keep: the weight is appended to it, for `backward`, if it is small enough.
    """
    weight = expand(values, p, x.dtype)
    if keep is not None and not p.is_full and weight.nbytes <= max(x.nbytes, values.nbytes):
        keep.append(weight)
    return linear(x, weight, None if bias is None else bias.to(x.dtype))


def backward(
    dy: Tensor,
    x: Tensor,
    values: Tensor,
    p: LayerIndex,
    need_input: bool,
    need_values: bool,
    weight: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Compute (dx [B, in] in the dtype of dy, dvalues like values); None if not needed.

    16-bit activations are accumulated in float32, and the gradient of float32 values is not rounded
    in between where torch supports that (CUDA, from 2.8 on).

    Args:
        dy: [B, out]; x: [B, in], likewise.
        values, p: as for `forward`.
        weight: the one that `forward` appended to `keep`.
    """
    dx = None
    if need_input:
        if weight is None or weight.dtype is not dy.dtype:
            weight = expand(values, p, dy.dtype)
        dx = dy @ weight
    return dx, _gather_gradient(dy, x, values, p) if need_values else None


def lines_of(row_ptr: Tensor, cols: Tensor, slots: Tensor, b: int, width: int) -> Tensor:
    """Return the rows of every block's lines in a matrix [out * in / b, b]: int64 [..., nnz * b],
    by slots.

    Args:
        width: in / b.
    """
    first = order_by_slots(flat_positions(row_ptr, cols, b * width), slots)
    if b == 1:
        return first
    lines = torch.arange(0, b * width, width, device=cols.device)
    return (first.unsqueeze(-1) + lines).flatten(-2)


def _make_lines(p: LayerIndex) -> Tensor:
    return lines_of(p.row_ptr, p.cols, p.slots, p.block_size, p.in_features // p.block_size)


def _keeps_lines(p: LayerIndex) -> bool:
    one_panel = 4 * p.out_features * p.in_features <= PANEL_BYTES
    return one_panel and p.nnz * p.block_size <= KEPT_LINES


def derive(p: LayerIndex) -> None:
    """Make what `lines` keeps, if the kernels read it."""
    if p.nnz and not p.is_full and _keeps_lines(p) and not runs_triton(p.cols.device):
        lines(p)


def lines(p: LayerIndex) -> Tensor:
    """Return `lines_of` the layer, kept on the CPU and, if they are few, on other devices."""
    # In large layers of single elements they would take as much memory as the optimizer's state.
    keep = p.on_cpu or _keeps_lines(p)
    return p.get_derived("lines", _make_lines) if keep else _make_lines(p)


def _kernels(p: LayerIndex) -> ModuleType | None:
    """Import the kernels that move entries, and with them Triton; None if they do not run."""
    if not p.nnz or not runs_triton(p.cols.device):
        return None
    from dynsparse.ops.linear.cuda import launch

    return launch


def expand(values: Tensor, p: LayerIndex, dtype: torch.dtype) -> Tensor:
    """Return the weight [out, in] in `dtype`; of full layers it may share memory with values."""
    if p.is_full:
        return values.to(dtype).view(p.out_features, p.in_features)
    kernels = _kernels(p)
    if kernels is not None:
        weight: Tensor = kernels.lay_out(values.contiguous(), p, dtype)
        return weight
    b = p.block_size
    weight = values.new_zeros(p.out_features * p.in_features // b, b, dtype=dtype)
    weight.index_copy_(0, lines(p), values.to(dtype).reshape(-1, b))
    return weight.view(p.out_features, p.in_features)


def gather(matrix: Tensor, p: LayerIndex) -> Tensor:
    """Return the entries of a matrix [out, in] at the pattern, like values."""
    kernels = _kernels(p)
    if kernels is not None:
        collected = matrix.new_empty(p.values_shape)
        kernels.collect(matrix.contiguous(), p, 0, collected)
        return collected
    return matrix.reshape(-1, p.block_size).index_select(0, lines(p)).view(p.values_shape)


def _gather_gradient(dy: Tensor, x: Tensor, values: Tensor, p: LayerIndex) -> Tensor:
    """Compute dy^T x at the pattern, like values."""
    b, dtype = p.block_size, values.dtype
    if p.is_full:
        return _product(dy.t(), x, dtype).view_as(values)
    rows = min(p.out_features, max(1, PANEL_BYTES // (4 * p.in_features * b)) * b)
    if rows == p.out_features:
        return gather(_product(dy.t(), x, dtype), p)
    kernels = _kernels(p)
    if kernels is not None:
        collected = torch.empty_like(values, memory_format=torch.contiguous_format)
        for first in range(0, p.out_features, rows):
            part = dy.narrow(1, first, min(rows, p.out_features - first))
            kernels.collect(_product(part.t(), x, dtype).contiguous(), p, first, collected)
        return collected
    # The host does not know which entries are in a panel: each panel is searched for all of them.
    positions, collected = lines(p), values.new_zeros(p.nnz * b, b)
    for first in range(0, p.out_features, rows):
        part = dy.narrow(1, first, min(rows, p.out_features - first))
        panel = _product(part.t(), x, dtype).view(-1, b)
        index = positions - first * (p.in_features // b)
        inside = (index >= 0) & (index < len(panel))
        entries = panel.index_select(0, index.clamp_(0, len(panel) - 1))
        collected = torch.where(inside.view(-1, 1), entries, collected)
    return collected.view_as(values)


def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a matrix product of activations in `dtype`."""
    if dtype is torch.float32 and has_accumulators(left):
        return torch.mm(left, right, out_dtype=dtype)
    return (left @ right).to(dtype)


def has_accumulators(x: Tensor) -> bool:
    """Whether products of this 16-bit type can be returned as float32, unrounded."""
    if x.dtype not in _LOW or not x.is_cuda or torch.version.hip is not None or not x.numel():
        return False
    return _knows_accumulators()


@functools.cache
def _knows_accumulators() -> bool:
    return "dtype" in torch.ops.aten.mm.overloads()
