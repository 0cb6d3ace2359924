"""Which way computes a convolution: one decision, asked by everybody."""

from __future__ import annotations

import torch

from dynsparse import native
from dynsparse.ops.linear.choice import forced
from dynsparse.ops.linear.layer_index import LayerIndex

__all__ = ["route"]

# Densities from which on a dense convolution is faster, forward and backward (both gradients), as
# measured on a two-core EPYC (family 25, model 17) with layers of 32 to 256 channels and batches of
# 32: benchmarks/convolutions.py.
_ELEMENTS, _BLOCKS = (0.4, 0.7), (0.7, 0.6)


def route(
    p: LayerIndex,
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
    limits = _BLOCKS if p.block_size >= 4 else _ELEMENTS
    return "dense" if density > limits[backward] else "sparse"
