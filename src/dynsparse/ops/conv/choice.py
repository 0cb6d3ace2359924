"""Which way computes a convolution: one decision, asked by everybody."""

from __future__ import annotations

import torch

from dynsparse import native
from dynsparse.ops.conv.geometry import Geometry
from dynsparse.ops.linear.choice import forced
from dynsparse.ops.linear.layer_index import LayerIndex

__all__ = ["route"]

# Densities from which on a dense convolution is faster, by the edge of blocks.
BREAK_EVEN = {1: 0.4, 16: 0.6}


def route(
    p: LayerIndex,
    g: Geometry,
    batch: int,
    size: tuple[int, int],
    backward: bool,
    dtype: torch.dtype,
) -> str:
    """ "sparse" (the compiled kernels, over the non-zeros) or "dense" (`dense.py`).

    Args:
        size: of the output.
    """
    low = dtype in (torch.bfloat16, torch.float16)
    if not p.on_cpu or not (dtype is torch.float32 or low) or native.load() is None:
        return "dense"
    if batch * size[0] * size[1] == 0:
        return "dense"
    if forced() in ("sparse", "dense"):
        return str(forced())
    density = p.nnz * p.block_size**2 / max(1, p.out_features * p.in_features)
    return "dense" if density > BREAK_EVEN[16 if p.block_size >= 4 else 1] else "sparse"
