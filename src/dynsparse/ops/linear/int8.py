"""The product Y = X W^T + b with weights in int8, W[r, c] = scale[r] * values at (r, c).

For inference: there are no derivatives. Activations are float32. Without compiled kernels it
computes with the dense weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dynsparse._core import native
from dynsparse.ops.linear.layer_index import TensorCache, check_rows
from dynsparse.ops.linear.panels import make_masks, make_row_panels
from dynsparse.ops.torch_internals import empty_on_cpu, refuse_onnx_export
from dynsparse.pattern.on_device import expand_row_pointers

QUAD = 4
"""Columns of a block that lie together in `to_kernel_order`."""

_library = torch.library.Library("dynsparse", "FRAGMENT")
_library.define(
    "linear_int8(Tensor x, Tensor values, Tensor scale, Tensor row_ptr, Tensor cols, Tensor? bias, "
    "int in_features, bool int8_activations) -> Tensor"
)


def to_kernel_order(values: Tensor) -> Tensor:
    """Return values [nnz] or [nnz, b, b] in the order of the kernels.

    It is [nnz, b / 4, b, 4] for block sizes that are multiples of 8, otherwise the same.
    """
    if values.dim() == 1 or values.shape[2] % 8:
        return values.contiguous()
    return values.unflatten(2, (-1, QUAD)).transpose(1, 2).contiguous()


def from_kernel_order(values: Tensor) -> Tensor:
    """Return values in row-major order: the inverse of `to_kernel_order`."""
    return values.transpose(1, 2).flatten(2) if values.dim() == 4 else values


def block_size_of(values: Tensor) -> int:
    """Return the block size of values in the order of the kernels."""
    return 1 if values.dim() == 1 else values.shape[2]


def check_input(x: Tensor, in_features: int) -> None:
    """Raise RuntimeError unless x is [..., in_features], float32 and on the CPU."""
    if x.dtype is not torch.float32 or not (x.is_cpu or x.is_meta) or x.layout is not torch.strided:
        raise RuntimeError(
            f"a layer with int8 weights computes float32 activations on the CPU, got {x.dtype} on "
            f"{x.device}"
        )
    if not x.dim() or x.shape[-1] != in_features:
        raise RuntimeError(
            f"x must end in {in_features} features for this sparse layer, got the shape "
            f"{list(x.shape)}"
        )


def check_weight(
    values: Tensor,
    scale: Tensor,
    row_ptr: Tensor,
    cols: Tensor,
    bias: Tensor | None,
    in_features: int,
) -> None:
    """Raise RuntimeError unless the operands fit each other; the kernels do not check.

    `check_rows` checks the contents of the index.
    """
    b = block_size_of(values)
    blocks = {1: (), 3: (b, b), 4: (b // QUAD, b, QUAD)}
    out = (row_ptr.shape[0] - 1) * b if row_ptr.dim() == 1 else -1
    floats = (scale,) if bias is None else (scale, bias)
    fits = (
        values.dtype is torch.int8
        and values.dim() in blocks
        and values.shape[1:] == blocks[values.dim()]
        and values.dim() == (1 if values.dim() == 1 else 3 if b % 8 else 4)
        and row_ptr.dtype is cols.dtype is torch.int32
        and cols.shape == values.shape[:1]
        and in_features % max(b, 1) == 0
        and all(t.dtype is torch.float32 and t.shape == (out,) for t in floats)
        and all(t.is_cpu or t.is_meta for t in (values, row_ptr, cols, *floats))
        and all(t.is_contiguous() for t in (values, row_ptr, cols, *floats))
    )
    if not fits:
        raise RuntimeError(
            "the tensors of this layer do not fit int8 weights on the CPU: scale and bias must be "
            "float32 [out_features], so do not convert or move a quantized model"
        )


def linear_int8(
    x: Tensor,
    values: Tensor,
    scale: Tensor,
    row_ptr: Tensor,
    cols: Tensor,
    bias: Tensor | None,
    in_features: int,
    int8_activations: bool,
) -> Tensor:
    """Compute Y [..., out] = X W^T + bias.

    Args:
        x: [..., in_features], float32 on the CPU, as everything else.
        values: int8 [nnz] or [nnz, b, b], by rows, as `to_kernel_order` returns them.
        scale: float32 [out].
        row_ptr, cols: the pattern's rows of blocks, int32 [out / b + 1] and [nnz].
        bias: float32 [out] or None.
        in_features: the columns of W.
        int8_activations: whether products with blocks whose size is a multiple of 8 round each
            sample to multiples of its largest magnitude / 127. A sample with a feature that is not
            finite then gives NaN.

    Raises:
        RuntimeError: operands that do not fit.
        MemoryError: no scratch memory.
    """
    check_weight(values, scale, row_ptr, cols, bias, in_features)
    check_rows(row_ptr, cols, in_features // block_size_of(values))
    return compute(x, values, scale, row_ptr, cols, bias, in_features, int8_activations)


def compute(
    x: Tensor,
    values: Tensor,
    scale: Tensor,
    row_ptr: Tensor,
    cols: Tensor,
    bias: Tensor | None,
    in_features: int,
    int8_activations: bool,
) -> Tensor:
    """Compute `linear_int8` with a weight that was checked."""
    check_input(x, in_features)
    out = scale.shape[0]
    rows = x if x.dim() == 2 else x.reshape(-1, in_features)
    library: Any = native.load()
    if library is None:
        weight = to_dense(values, scale, row_ptr, cols, in_features)
        rounded = _round_samples(rows) if int8_activations and values.dim() == 4 else rows
        y = torch.nn.functional.linear(rounded, weight, bias)
    else:
        batch = rows.shape[0]
        y = empty_on_cpu((batch, out), (out, 1), torch.float32)
        panels = masks = None
        if values.dim() == 1 and batch:
            panels, masks = _derive(row_ptr, cols, in_features, batch)
        status = library.dynsparse_int8_forward(
            rows.data_ptr(),
            *rows.stride(),
            values.data_ptr(),
            scale.data_ptr(),
            row_ptr.data_ptr(),
            cols.data_ptr(),
            None if panels is None else panels.data_ptr(),
            None if masks is None else masks.data_ptr(),
            None if bias is None else bias.data_ptr(),
            y.data_ptr(),
            batch,
            out,
            in_features,
            block_size_of(values),
            int8_activations,
            torch.get_num_threads(),
        )
        if status:
            raise MemoryError("no scratch memory for a sparse product")
    return y if x.dim() == 2 else y.view(*x.shape[:-1], out)


# (row_ptr, cols) -> a tuple of their panels or masks.
_panels, _masks = TensorCache(), TensorCache()


def _derive(
    row_ptr: Tensor, cols: Tensor, in_features: int, batch: int
) -> tuple[Tensor | None, Tensor | None]:
    """Return the panels and the bit masks by which single elements are computed, each or None."""
    sizes = len(row_ptr) - 1, in_features, len(cols)
    if batch <= native.call("dynsparse_small_masks_samples", sizes[2], *sizes[:2], 1):
        return None, _keep(_masks, row_ptr, cols, lambda: make_masks(row_ptr, cols, in_features))
    if batch < native.call("dynsparse_panels_from", *sizes, False):
        return None, None

    def make() -> Tensor | None:
        return make_row_panels(row_ptr, cols, in_features, batch)

    return _keep(_panels, row_ptr, cols, make), None


def _keep(
    cache: TensorCache, row_ptr: Tensor, cols: Tensor, make: Callable[[], Tensor | None]
) -> Tensor | None:
    """Return what `make` returned for this index; None where each call would make it anew."""
    index = row_ptr, cols
    if any(tensor.is_inference() for tensor in index):
        return None
    kept: tuple[Tensor | None] | None = cache.get(index)
    if kept is None:
        kept = (make(),)
        cache.put(index, kept)
    return kept[0]


def _round_samples(x: Tensor) -> Tensor:
    """Round each sample of x [B, in] to multiples of its largest magnitude / 127."""
    step = x.abs().amax(1, keepdim=True) / 127
    return (x / torch.where(step > 0, step, 1)).round() * step


def to_dense(
    values: Tensor, scale: Tensor, row_ptr: Tensor, cols: Tensor, in_features: int
) -> Tensor:
    """Return W [out, in_features], float32."""
    b = block_size_of(values)
    blocks = from_kernel_order(values).reshape(-1, b, b).float()
    rows = expand_row_pointers(row_ptr, len(cols))
    dense = scale.new_zeros(len(row_ptr) - 1, in_features // b, b, b)
    dense[rows, cols.long()] = blocks
    return dense.transpose(1, 2).reshape(len(scale), in_features) * scale[:, None]


def _shapes(x: Tensor, values: Tensor, scale: Tensor, *rest: Any) -> Tensor:
    check_input(x, rest[3])
    check_weight(values, scale, *rest[:4])
    return x.new_empty(*x.shape[:-1], scale.shape[0])


_library.impl("linear_int8", refuse_onnx_export(linear_int8), "CompositeExplicitAutograd")
_library.impl("linear_int8", refuse_onnx_export(_shapes), "Meta")
