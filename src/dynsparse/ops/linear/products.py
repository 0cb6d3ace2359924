"""The products for any floating point dtype, shape and device: checks, conversions, the kernel.

On a CPU 16-bit activations are computed in float32, except by kernels for bfloat16; on an
accelerator every dtype is computed as it is.

`route` selects the kernels, for execution, `SparseLinear.kernel`, `dynsparse info` and the
benchmark. On a CPU the kinds are (`cpu.py`, `cpu_dense.py`):

- `sparse`: over the non-zeros, for low densities and large batches.
- `small`: for batches too small to fill vectors; for single elements by bit masks.
- `dense`: a dense product, the weight laid out some rows at a time, above the break-even density.
- `bfloat16`: over the non-zeros of bfloat16 activations, without a float32 copy of these.
- `torch`: plain torch, for other dtypes and without compiled kernels.

On an accelerator they are (`cuda/`):

- `dense`: one dense product, in the dtype of the activations.
- `blocks`: Triton kernels for blocks of 16 to 128 on NVIDIA GPUs.

On a CPU the cost model of `cost_table.py` picks the fastest of the first three. On GPUs
`cuda/costs.py` decides by what bounds the kernels on the chip.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from dynsparse._core import native
from dynsparse._core.checks import check_types
from dynsparse.ops import capture
from dynsparse.ops.linear import cuda
from dynsparse.ops.linear.cost_table import SMALL_BLOCKS, Layer, choose
from dynsparse.ops.linear.cpu import KERNELS
from dynsparse.ops.linear.cuda import blocks
from dynsparse.ops.linear.cuda import costs as cuda_costs
from dynsparse.ops.linear.cuda.chip import chip_of
from dynsparse.ops.linear.layer_index import LayerIndex
from dynsparse.ops.torch_internals import empty_on_cpu

_log = logging.getLogger(__name__)

_FLOAT32 = torch.float32

KINDS = ("sparse", "small", "dense")
DEVICE_KINDS = cuda_costs.KINDS

_forced_kind: str | None = None


@contextmanager
@check_types
def use_kernel(kind: str) -> Iterator[None]:
    """Compute with one kind inside this context, in the whole process, to compare and to measure.

    `small` supports single elements and blocks of 4, 8, 16, 32, 64 and 128. Layers whose block size
    or device does not support the kind use the default choice. `sparse` computes bfloat16
    activations with the kind `bfloat16`.

    Raises:
        ValueError: a kind that does not exist.
    """
    global _forced_kind
    kinds = dict.fromkeys((*KINDS, *DEVICE_KINDS))
    if kind not in kinds:
        raise ValueError(f"kind must be one of {', '.join(kinds)}, got {kind!r}")
    before, _forced_kind = _forced_kind, kind
    try:
        yield
    finally:
        _forced_kind = before


def forced_kind() -> str | None:
    """Return the kind that `use_kernel` has set, or None."""
    return _forced_kind


# Choices kept per layer; they are cleared beyond this number of batch sizes.
_MOST_CHOICES = 64


def route(p: LayerIndex, batch: int, backward: bool, dtype: torch.dtype) -> str:
    """Return the kind of kernels for a pass over `batch` activations of `dtype`.

    The pass is forward, or with `backward` both gradients. The result is that of `choose`, cached,
    unless `use_kernel` overrides it.
    """
    if not p.on_cpu:
        return _route_on_device(p, batch, backward, dtype)
    key = batch if backward else ~batch
    if dtype is _FLOAT32 and _forced_kind is None and native.load() is not None:  # most calls
        kind = p.choices[0].get(key)
        if kind is not None:
            return kind
    low = dtype is torch.bfloat16
    if not (dtype is torch.float32 or low or dtype is torch.float16) or native.load() is None:
        return "torch"
    if _forced_kind in KINDS and (_forced_kind != "small" or p.block_size in SMALL_BLOCKS):
        return "bfloat16" if low and _forced_kind == "sparse" else _forced_kind
    choices = p.choices[low]
    kind = choices.get(key)
    if kind is None:
        if len(choices) >= _MOST_CHOICES:
            choices.clear()
        layer = Layer(p.out_features, p.in_features, p.nnz, p.block_size)
        kind = choices[key] = choose(layer, batch, backward, dtype)
        _log_choice(kind, layer, batch, backward)
    return kind


def _log_choice(kind: str, layer: Layer, batch: int, backward: bool) -> None:
    pass_ = "backward" if backward else "forward"
    _log.debug("%s computes %s of %s over %d samples", kind, pass_, layer, batch)


def _route_on_device(p: LayerIndex, batch: int, backward: bool, dtype: torch.dtype) -> str:
    """Return the kind of kernels on an accelerator."""
    device = p.cols.device
    if _forced_kind == "dense" or not blocks.supports(p, dtype, device):
        return "dense"
    if _forced_kind == "blocks":
        return "blocks"
    choices = p.choices[0]
    key = (batch, backward, dtype)
    kind = choices.get(key)
    if kind is None:
        if len(choices) >= _MOST_CHOICES:
            choices.clear()
        layer = Layer(p.out_features, p.in_features, p.nnz, p.block_size)
        kind = choices[key] = cuda_costs.choose(layer, batch, backward, dtype, chip_of(device))
        _log_choice(kind, layer, batch, backward)
    return kind


def check_input(x: Tensor, values: Tensor, features: int, what: str) -> None:
    """Raise RuntimeError unless `x`, called `what`, fits `values` and ends in so many features."""
    if x.dim() == 0 or x.shape[-1] != features:
        raise RuntimeError(
            f"{what} must end in {features} features for this sparse layer, "
            f"got the shape {list(x.shape)}"
        )
    check_dtype(x, values, what)


def check_dtype(x: Tensor, values: Tensor, what: str) -> None:
    """Raise RuntimeError unless dtype and device of `x`, called `what`, fit those of `values`."""
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
            "(bfloat16 and float16 activations may be used with float32 values)"
        )


def check_bias(bias: Tensor | None, values: Tensor, features: int) -> None:
    """Raise RuntimeError unless the bias is None or has so many features, where `values` are."""
    if bias is not None and (bias.shape != (features,) or bias.device != values.device):
        raise RuntimeError(
            f"bias must be [{features}] on {values.device}, got the shape {list(bias.shape)} "
            f"on {bias.device}"
        )


def _check_forward(x: Tensor, values: Tensor, p: LayerIndex, bias: Tensor | None) -> None:
    if values.shape != p.values_shape or values.device != p.row_ptr.device:
        if p.is_overwritten:
            raise RuntimeError("the pattern of this sparse layer was changed by another thread")
        LayerIndex(p.index, values)  # raises, and says what is wrong
        raise RuntimeError(
            f"values must have the shape {list(p.values_shape)} on {p.row_ptr.device}, "
            f"got {list(values.shape)} on {values.device}"
        )
    check_input(x, values, p.in_features, "x")
    check_bias(bias, values, p.out_features)


def check_backward(dy: Tensor, x: Tensor | None, values: Tensor, p: LayerIndex) -> None:
    """Raise RuntimeError unless the operands of the gradients fit."""
    check_input(dy, values, p.out_features, "dy")
    if x is None:
        return
    check_input(x, values, p.in_features, "x")
    if x.shape[:-1] != dy.shape[:-1]:
        raise RuntimeError(
            f"x and dy must agree in all but the features, got the shapes {list(x.shape)} "
            f"and {list(dy.shape)}"
        )


def compute_dtype_of(x: Tensor) -> torch.dtype:
    """Return the dtype to compute in: float32 for 16-bit dtypes on a CPU, otherwise that of x."""
    low = x.dtype in (torch.bfloat16, torch.float16)
    return torch.float32 if low and x.is_cpu else x.dtype


def _matrix(x: Tensor, dtype: torch.dtype) -> Tensor:
    if x.dim() != 2:
        x = x.reshape(-1, x.shape[-1])
    return x if x.dtype is dtype else x.to(dtype)


def forward(
    x: Tensor,
    values: Tensor,
    p: LayerIndex,
    bias: Tensor | None,
    keep: list[Tensor] | None = None,
    plain: bool = False,
) -> Tensor:
    """Check the operands and compute y [..., out] of x [..., in], in its dtype.

    Args:
        keep: a list to which tensors for `backward` are appended on an accelerator: see `forward`
            of `cuda.dense` and `cuda.blocks`.
        plain: whether the values are known to be float32, contiguous, on the CPU and of `p`.
    """
    dtype, shape = x.dtype, x.shape
    # One condition in place of all checks and conversions for the operands of most calls.
    is_simple = (
        dtype is _FLOAT32
        and x.is_cpu
        and len(shape) == 2
        and shape[1] == p.in_features
        and (
            plain
            or (
                values.dtype is _FLOAT32
                and values.is_cpu
                and p.on_cpu
                and values.shape == p.values_shape
                and values.is_contiguous()
            )
        )
        and (
            bias is None
            or (
                bias.dtype is _FLOAT32
                and bias.is_cpu
                and bias.shape == p.bias_shape
                and bias.is_contiguous()
            )
        )
    )
    if not is_simple:
        _check_forward(x, values, p, bias)
    kind = route(p, shape[0] if is_simple else x.numel() // max(1, shape[-1]), False, dtype)
    if is_simple:
        return KERNELS[kind].forward(x, values, p, bias)
    takes_all = kind == "bfloat16" or not p.on_cpu  # values and bias of any dtype
    compute_dtype = dtype if takes_all else compute_dtype_of(x)
    w = values if takes_all else values.to(compute_dtype).contiguous()
    b = bias if takes_all or bias is None else bias.to(compute_dtype).contiguous()
    kernels = KERNELS if p.on_cpu else cuda.KERNELS
    extra = () if keep is None or p.on_cpu else (keep,)
    y = kernels[kind].forward(_matrix(x, compute_dtype), w, p, b, *extra)
    if y.dtype is not dtype:
        y = y.to(dtype)
    # Not a view: autograd forbids writing to it, and `fully_shard` warns.
    return y if x.dim() == 2 else y.contiguous().resize_(*x.shape[:-1], p.out_features)


def backward(
    dy: Tensor,
    x: Tensor | None,
    values: Tensor,
    p: LayerIndex,
    need_input: bool,
    *saved: Tensor,
    sums: list[Tensor] | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Compute dX [..., in] if needed, and dW, like values, if x is given.

    It checks nothing: forward has checked the operands of autograd, and other callers call
    `check_backward`.

    Args:
        saved: the tensors that `forward` appended to `keep`.
        sums: a list to which the gradient of the bias, float32 [out], is appended by kernels that
            also sum dY: those on CPUs, except in float64, and `cuda.blocks`.
    """
    dtype = dy.dtype
    is_simple = (
        dtype is _FLOAT32
        and values.dtype is _FLOAT32
        and dy.dim() == 2
        and (x is None or (x.dtype is _FLOAT32 and x.dim() == 2))
        and p.on_cpu
        and values.is_contiguous()
    )
    samples = dy.shape[0] if is_simple else dy.numel() // max(1, dy.shape[-1])
    kind = route(p, samples, True, dtype)
    if is_simple:
        passes, dbias = KERNELS[kind].backward, _allocate_sums(p, sums)
        return passes(dy, dy if x is None else x, values, p, need_input, x is not None, dbias)
    takes_all = kind == "bfloat16" or not p.on_cpu
    compute_dtype = dtype if takes_all else compute_dtype_of(dy)
    dy2d = _matrix(dy, compute_dtype)
    x2d = dy2d if x is None else _matrix(x, compute_dtype)  # not read without x
    w = values if takes_all else values.to(compute_dtype).contiguous()
    if p.on_cpu:
        passes = KERNELS[kind].backward
        dbias = None if dtype is torch.float64 else _allocate_sums(p, sums)
        dx, dw = passes(dy2d, x2d, w, p, need_input, x is not None, dbias)
    else:
        # A weight [out, in] or blocks [nnz, b, b], if forward used the same kernels.
        reusable = [t for t in saved if (t.dim() == 3) == (kind == "blocks")]
        more = {} if sums is None or kind != "blocks" else {"sums": sums}
        passes = cuda.KERNELS[kind].backward
        dx, dw = passes(dy2d, x2d, w, p, need_input, x is not None, *reusable, **more)
    if dx is not None:
        if dx.dtype is not dtype:
            dx = dx.to(dtype)
        if dy.dim() != 2:
            dx = dx.view(*dy.shape[:-1], p.in_features)
    if dw is not None and dw.dtype is not values.dtype:
        dw = dw.to(values.dtype)
    return dx, dw


def _allocate_sums(p: LayerIndex, sums: list[Tensor] | None) -> Tensor | None:
    """Allocate the tensor that kernels write the gradient of the bias to; append it to `sums`."""
    if sums is None:
        return None
    dbias = empty_on_cpu((p.out_features,), (1,), _FLOAT32)
    sums.append(dbias)
    return dbias


def record(row_ptr: Tensor, x: Tensor, dy: Tensor) -> None:
    """Pass x and dY to the capture of this layer, as matrices."""
    dtype = compute_dtype_of(dy)
    capture.record(row_ptr, _matrix(x.detach(), dtype), _matrix(dy.detach(), dtype))
