"""Launches of the Triton kernels on tensors.

Imports Triton; `blocks` and `dense` import this file when they first need it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from dynsparse.ops.linear.cuda.chip import chip_of, current_device, precision_of
from dynsparse.ops.linear.cuda.configurations import (
    Gradient,
    Rows,
    choose_gradient,
    choose_rows,
    chunks,
    columns_by_length,
    rows_by_length,
    smallest_tile_rows,
)
from dynsparse.ops.linear.cuda.kernels import (
    gradient_kernel,
    gradient_tma_kernel,
    move_kernel,
    rows_kernel,
    rows_tma_kernel,
)
from dynsparse.ops.linear.layer_index import LayerIndex

# Entries of a row that a program moves at a step.
_AT_ONCE = 1024


def _can_load_tiles(x: Tensor) -> bool:
    """Whether the copy engine can load aligned activations as tiles, on Hopper and later.

    Samples must be rows, at multiples of 16 bytes.
    """
    return x.stride(1) == 1 and x.stride(0) * x.element_size() % 16 == 0


def _rows(
    x: Tensor,
    values: Tensor,
    bias: Tensor | None,
    lists: tuple[Tensor, Tensor, Tensor],
    transposed: bool,
    config: Rows | None,
) -> Tensor:
    records, blocks, slots = lists
    batch = len(x)
    b, rows = values.shape[-1], len(records)
    y = x.new_empty(batch, rows * b)
    if batch == 0:
        return y
    c = config
    if c is None:
        c = choose_rows(b, x.dtype, batch, rows, chip_of(x.device))
    grid = (-(-batch // c.samples) * rows,)
    pattern = (bias, records, blocks, slots, batch, rows, c.group)
    options = {
        "B": b,
        "BM": c.samples,
        "BK": c.inputs,
        "TRANSPOSED": transposed,
        "BY_SLOT": len(slots) > 0,
        "HAS_BIAS": bias is not None,
        "num_warps": c.warps,
        "num_stages": c.stages,
    }
    with current_device(x):
        if c.tma and _can_load_tiles(x) and len(values):
            tile = [b, c.inputs] if transposed else [c.inputs, b]
            rows_tma_kernel[grid](
                TensorDescriptor.from_tensor(x, [c.samples, c.inputs]),
                TensorDescriptor.from_tensor(values.view(-1, b), tile),
                TensorDescriptor.from_tensor(y, [c.samples, b]),
                *pattern,
                **options,
            )
            return y
        rows_kernel[grid](
            x, values, y, *pattern, *x.stride(), PRECISION=precision_of(x.dtype), **options
        )
    return y


def forward(
    x: Tensor, values: Tensor, p: LayerIndex, bias: Tensor | None, config: Rows | None = None
) -> Tensor:
    """Return y [batch, out] of x [batch, in], values of its dtype, and a contiguous bias.

    x is aligned, see `blocks.ensure_aligned`.
    """
    return _rows(x, values, bias, (rows_by_length(p), p.cols, p.slots), True, config)


def grad_input(dy: Tensor, values: Tensor, p: LayerIndex, config: Rows | None = None) -> Tensor:
    """Return dx [batch, in] of an aligned dy [batch, out] and values of its dtype."""
    lists = (columns_by_length(p), *p.column_order())
    # Tensor cores read tf32 along the sum only; transposing the blocks first takes half the time.
    transposed = dy.dtype is torch.float32
    return _rows(
        dy, values.mT.contiguous() if transposed else values, None, lists, transposed, config
    )


def grad_weight(
    dy: Tensor,
    x: Tensor,
    p: LayerIndex,
    dtype: torch.dtype,
    config: Gradient | None = None,
    sums: list[Tensor] | None = None,
) -> Tensor:
    """Return dvalues [nnz, b, b] of `dtype`, of aligned dy and x.

    If `sums` is given and x has 16 bits, the sum of dy over the samples, float32 [out], is appended
    to it.

    If samples are split among programs, their sums are added up in float32 in a fixed order, so
    every run gives the same bits.
    """
    batch, (nnz, b, _) = len(x), p.values_shape
    if batch == 0:
        return x.new_zeros(p.values_shape, dtype=dtype)
    chip = chip_of(x.device)
    c = config
    if c is None:
        c = choose_gradient(b, x.dtype, nnz, p.out_features // b, batch, chip)
    steps = -(-batch // (c.split * c.samples))
    split = -(-batch // (steps * c.samples))
    dw = x.new_empty(split, *p.values_shape, dtype=dtype if split == 1 else torch.float32)
    # Not for float32: products are less exact than its sums.
    with_sums = sums is not None and x.element_size() == 2
    db = x.new_empty(split, p.out_features, dtype=torch.float32) if with_sums else None
    work = chunks(p, c.blocks)
    grid = (work.shape[1], split)
    pattern = (dw, db, work, p.row_ptr, p.cols, p.slots, batch, steps, nnz, p.out_features)
    options = {
        "B": b,
        "J": c.blocks,
        "BT": c.samples,
        "BY_SLOT": len(p.slots) > 0,
        "num_warps": c.warps,
        "num_stages": c.stages,
    }
    with current_device(x):
        if c.tma and _can_load_tiles(x) and _can_load_tiles(dy):
            tile = [c.samples, b]
            gradient_tma_kernel[grid](
                TensorDescriptor.from_tensor(dy, tile),
                TensorDescriptor.from_tensor(x, tile),
                *pattern,
                SUMS=with_sums,
                **options,
            )
        else:
            gradient_kernel[grid](
                dy,
                x,
                *pattern,
                *dy.stride(),
                *x.stride(),
                SUMS=smallest_tile_rows(chip) if with_sums else 1,
                PRECISION=precision_of(x.dtype),
                **options,
            )
    if sums is not None and db is not None:
        sums.append(db[0] if split == 1 else db.sum(0))
    return dw[0] if split == 1 else dw.sum(0).to(dtype)


def lay_out(values: Tensor, p: LayerIndex, dtype: torch.dtype) -> Tensor:
    """Return the weight [out, in] in `dtype` of contiguous values."""
    weight = values.new_empty(p.out_features, p.in_features, dtype=dtype)
    _move(values, weight, p, 0, collect=False)
    return weight


def collect(gradient: Tensor, p: LayerIndex, first: int, collected: Tensor) -> None:
    """Gather the pattern's entries from some rows of the gradient, contiguous [any, in] from row
    `first` on, into `collected`, contiguous, like values."""
    _move(collected, gradient, p, first, collect=True)


def _move(values: Tensor, matrix: Tensor, p: LayerIndex, first: int, collect: bool) -> None:
    with current_device(values):
        move_kernel[(len(matrix),)](
            *(values, matrix, p.row_ptr, p.cols, p.slots, first // p.block_size, p.in_features),
            B=p.block_size,
            N=_AT_ONCE,
            BY_SLOT=len(p.slots) > 0,
            COLLECT=collect,
        )
