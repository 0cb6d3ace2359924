"""Launches of the Triton kernels on tensors.

Imports Triton; `blocks` and `dense` import this file when they first need it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton import JITFunction
from triton.compiler import CompiledKernel
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

# Compiled kernels by name, device, and all that Triton specialises them for.
_compiled: dict[tuple[Any, ...], CompiledKernel] = {}


def start(
    kernel: JITFunction,
    x: Tensor,
    grid: tuple[int, int, int],
    arguments: tuple[Any, ...],
    constants: dict[str, Any],
    warps: int = 4,
    stages: int = 3,
) -> None:
    """Start a kernel on the device of `x`; arguments and constants in the order of its parameters.

    Triton's own dispatch takes the host several times as long as a launch, so only the first launch
    of each kind goes through it.
    """
    values = constants.values()
    kinds = map(_kind_of, arguments)
    key = (kernel.__name__, x.get_device(), warps, stages, *values, *kinds)
    compiled = _compiled.get(key)
    with current_device(x):
        if compiled is not None:
            compiled[grid](*arguments, *values)
            return
        # Fusion of products and sums is named, since its default depends on Triton's version.
        options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
        compiled = kernel[grid](*arguments, **constants, **options)
    if isinstance(compiled, CompiledKernel):  # not in the interpreter
        _compiled[key] = compiled


def _kind_of(argument: Tensor | TensorDescriptor | int | None) -> Any:
    """Return what Triton specialises a kernel for of one argument."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        return argument == 1, argument % 16 == 0, argument >= 1 << 31
    if argument is None:
        return None
    return (argument.base.dtype, *argument.block_shape)


def _tiles(x: Tensor, tile: list[int]) -> TensorDescriptor:
    """Return a descriptor for the copy engine of an operand that has passed `_can_load_tiles`.

    Triton's constructor checks this again, which takes the host longer than all else in it.
    """
    descriptor = TensorDescriptor.__new__(TensorDescriptor)
    descriptor.base, descriptor.block_shape = x, tile
    descriptor.shape, descriptor.strides = x.shape, x.stride()
    return descriptor


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
    batch, b, rows = x.shape[0], values.shape[-1], records.shape[0]
    y = x.new_empty(batch, rows * b)
    if batch == 0:
        return y
    c = config
    if c is None:
        c = choose_rows(b, x.dtype, batch, rows, chip_of(x.device))
    grid = (-(-batch // c.samples) * rows, 1, 1)
    pattern = (bias, records, blocks, slots, batch, rows, c.group)
    constants: dict[str, Any] = {
        "B": b,
        "BM": c.samples,
        "BK": c.inputs,
        "TRANSPOSED": transposed,
        "BY_SLOT": slots.shape[0] > 0,
        "HAS_BIAS": bias is not None,
    }
    if c.tma and _can_load_tiles(x) and values.shape[0]:
        tile = [b, c.inputs] if transposed else [c.inputs, b]
        operands = (
            _tiles(x, [c.samples, c.inputs]),
            _tiles(values.view(-1, b), tile),
            _tiles(y, [c.samples, b]),
        )
        start(rows_tma_kernel, x, grid, (*operands, *pattern), constants, c.warps, c.stages)
    else:
        constants["PRECISION"] = precision_of(x.dtype)
        arguments = (x, values, y, *pattern, *x.stride())
        start(rows_kernel, x, grid, arguments, constants, c.warps, c.stages)
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
    batch, (nnz, b, _) = x.shape[0], p.values_shape
    if batch == 0:
        return x.new_zeros(p.values_shape, dtype=dtype)
    chip = chip_of(x.device)
    c = config
    if c is None:
        c = choose_gradient(b, x.dtype, nnz, p.out_features // b, batch, chip)
    steps = -(-batch // (c.split * c.samples))
    split = -(-batch // (steps * c.samples))
    parts = () if split == 1 else (split,)
    dw = x.new_empty(*parts, *p.values_shape, dtype=torch.float32 if parts else dtype)
    # Not for float32: products are less exact than its sums.
    with_sums = sums is not None and x.element_size() == 2
    db = x.new_empty(*parts, p.out_features, dtype=torch.float32) if with_sums else None
    work = chunks(p, c.blocks)
    grid = (work.shape[1], split, 1)
    pattern = (dw, db, work, p.row_ptr, p.cols, p.slots, batch, steps, nnz, p.out_features)
    constants: dict[str, Any] = {
        "B": b,
        "J": c.blocks,
        "BT": c.samples,
        "BY_SLOT": p.slots.shape[0] > 0,
    }
    if c.tma and _can_load_tiles(x) and _can_load_tiles(dy):
        constants["SUMS"] = with_sums
        operands = (_tiles(dy, [c.samples, b]), _tiles(x, [c.samples, b]))
        start(gradient_tma_kernel, x, grid, (*operands, *pattern), constants, c.warps, c.stages)
    else:
        constants["SUMS"] = smallest_tile_rows(chip) if with_sums else 1
        constants["PRECISION"] = precision_of(x.dtype)
        arguments = (dy, x, *pattern, *dy.stride(), *x.stride())
        start(gradient_kernel, x, grid, arguments, constants, c.warps, c.stages)
    if sums is not None and db is not None:
        sums.append(db.sum(0) if parts else db)
    return dw.sum(0).to(dtype) if parts else dw


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
    index = (p.row_ptr, p.cols, p.slots, first // p.block_size, p.in_features)
    constants = {
        "B": p.block_size,
        "N": _AT_ONCE,
        "BY_SLOT": len(p.slots) > 0,
        "COLLECT": collect,
    }
    start(move_kernel, values, (len(matrix), 1, 1), (values, matrix, *index), constants)
