"""The kernels of growth on tensors. Imports Triton; `block_scores` imports this when needed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dynsparse.ops.grow.cuda.kernels import scores_kernel
from dynsparse.ops.linear.cuda.chip import chip_of, current_device
from dynsparse.ops.linear.cuda.configurations import group_of
from dynsparse.ops.linear.cuda.precision import TERMS, precision_of

TILE = 128
"""Outputs and inputs of a program."""

# Of addresses, in bytes: 16 entries of float32, so that the compiler may copy 16 bytes at a time.
_ALIGNMENT = 64


def _alike(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Where strides differ or an address is odd, copies that are alike."""
    if len({t.stride() for t in tensors}) == 1 and not any(
        t.data_ptr() % _ALIGNMENT for t in tensors
    ):
        return list(tensors)
    return [t.clone(memory_format=torch.contiguous_format) for t in tensors]


def _distances(tensors: Sequence[Tensor]) -> list[int]:
    """From the first tensor, in entries."""
    first = tensors[0]
    return [(t.data_ptr() - first.data_ptr()) // first.element_size() for t in tensors]


def scores(dys: Sequence[Tensor], xs: Sequence[Tensor], b: int, pooling: str) -> Tensor:
    """float32 [out / b, in / b] of pairs dy [batch, out] and x [batch, in] of one dtype."""
    many, device = len(xs), xs[0].device
    pairs = None
    if many > 1:
        dys, xs = _alike(dys), _alike(xs)
        table = [*map(len, xs), *_distances(dys), *_distances(xs)]
        pairs = torch.tensor(table, dtype=torch.int64)
        if device.type == "cuda":  # from pinned memory: nothing waits
            pairs = pairs.pin_memory().to(device, non_blocking=True)
    dy, x = dys[0], xs[0]
    height, width = dy.shape[1], x.shape[1]
    pooled = torch.empty(height // b, width // b, dtype=torch.float32, device=device)
    group = group_of(TILE, max(1, max(map(len, xs))), x.dtype, chip_of(device))
    precision = precision_of(x.dtype)
    with current_device(x):
        scores_kernel[(-(-height // TILE) * -(-width // TILE),)](
            dy,
            x,
            pooled,
            pairs,
            len(x),
            many,
            height,
            width,
            group,
            *dy.stride(),
            *x.stride(),
            B=b,
            BO=TILE,
            BI=TILE,
            BT=16 if precision == "tf32x3" else 128 // x.element_size(),
            MANY=many > 1,
            POOLING=pooling,
            PRECISION=precision,
            TERMS=TERMS if precision == "tf32x3" else 0,
            num_warps=8,
            num_stages=3,
        )
    return pooled
