"""Which way computes a convolution: one decision, asked by everybody."""

from __future__ import annotations

from functools import lru_cache

import torch

from dynsparse import native
from dynsparse.ops.conv.costs import cost, lanes
from dynsparse.ops.conv.geometry import Geometry
from dynsparse.ops.linear.choice import forced
from dynsparse.ops.linear.cost_table import Layer
from dynsparse.ops.linear.layer_index import LayerIndex

KINDS = ("sparse", "dense")

# Densities from which on a dense convolution is faster for large batches whatever the costs say,
# forward and backward (both gradients): measured on two threads of an idle two-core EPYC (family
# 25, model 17) with layers of 32 to 256 channels and batches of 32 (benchmarks/convolutions.py).
_ELEMENTS, _BLOCKS, _LARGE = (0.4, 0.7), (0.7, 0.6), 32


@lru_cache(maxsize=4096)
def cheaper(
    layer: Layer, g: Geometry, batch: int, size: tuple[int, int], backward: bool, width: int
) -> str:
    """The kind that is expected to take less time on a CPU; arguments as of `costs.terms`."""
    density = layer.nnz * layer.block_size**2 / max(1, layer.out_features * layer.in_features)
    limits = _BLOCKS if layer.block_size >= 4 else _ELEMENTS
    if batch >= _LARGE and density > limits[backward]:
        return "dense"
    return min(KINDS, key=lambda kind: cost(kind, layer, g, batch, size, backward, width))


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
    if forced() in KINDS:
        return str(forced())
    layer = Layer(p.out_features, p.in_features, p.nnz, p.block_size)
    return cheaper(layer, g, batch, size, backward, lanes())
