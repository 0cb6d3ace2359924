"""Which kernels compute a convolution: the decision, and the cost model behind it.

`benchmarks/conv_choice.py` measures both kinds over a grid of layers, densities and batches, fits
the constants and reports how far the choice is from the faster kind. Costs are nanoseconds on one
thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path

import torch

from dynsparse._core import native
from dynsparse.ops.conv.geometry import Geometry
from dynsparse.ops.linear.cost_table import Layer
from dynsparse.ops.linear.layer_index import LayerIndex
from dynsparse.ops.linear.products import forced_kind

KINDS = ("sparse", "dense")

# Densities above which a dense convolution is faster for large batches whatever the costs say,
# forward and backward (both gradients): measured on two threads of an idle two-core EPYC (family
# 25, model 17) with layers of 32 to 256 channels and batches of 32 (benchmarks/convolutions.py).
_ELEMENTS, _BLOCKS, _LARGE = (0.4, 0.7), (0.7, 0.6), 32

# Constants of `terms`, forward and backward (both gradients), measured on one thread of a two-core
# EPYC (family 25, model 17) with AVX-512: batches of 1 to 32, densities of 0.02 to 0.9, mean error
# of a time 15 to 23 %. The machine was busy, so they are larger than on an idle one; only their
# order matters.
CONSTANTS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "sparse elements": ((28000, 5.87, 6.66, 0.475), (95300, 9.71, 5.51, 0.571)),
    "sparse blocks": ((25300, 3.02, 6.22, 0.292), (92200, 3.66, 5.43, 0.588)),
    "dense": ((55700, 1.31, 1.27, 0.0186, 0.742), (157000, 2.16, 3.02, 0.0436, 0.933)),
}


def family(kind: str, block_size: int) -> str:
    """Return the key of `CONSTANTS` for this kind and block size."""
    if kind == "dense":
        return kind
    return "sparse blocks" if block_size >= 4 else "sparse elements"


@cache
def _vector_width_of(path: str) -> int:
    return {"v4": 16, "v3": 8}.get(Path(path).stem.rpartition("_")[2], 4)


def vector_width() -> int:
    """Return the number of floats in a vector of the loaded kernels."""
    library = native.load()
    return 1 if library is None else _vector_width_of(library._name)


def _count_streams(batch: int, height: int, width: int) -> tuple[int, int]:
    """Return the number of groups of streams, and of rows of a stream.

    csrc/conv/run.cpp divides `batch` images of `height` rows into them: each of the `width` lanes
    of a vector holds an image or a strip of one.
    """
    divisions = []
    for strips in range(1, min(width, height) + 1):
        strip = -(-height // strips)
        groups = -(-batch * strips // width)
        divisions.append((groups * strip, strips, groups, strip))
    return min(divisions)[2:]


def terms(
    kind: str,
    layer: Layer,
    g: Geometry,
    batch: int,
    size: Sequence[int],
    backward: bool,
    width: int,
) -> tuple[float, ...]:
    """Return the factors of the constants of a family.

    Args:
        size: (height, width) of the output.
        width: number of floats in a vector.
    """
    channels = layer.in_features // g.taps * g.groups
    nonzeros = layer.nnz * layer.block_size**2
    (rows, columns), (down, across) = size, g.stride
    if kind == "dense":
        elements = layer.out_features * layer.in_features
        places = batch * rows * columns
        copied = batch * rows * columns * (channels * down * across + layer.out_features)
        return 1, nonzeros, elements, elements * places, copied
    reach = [d * (k - 1) + 1 for d, k in zip(g.dilation, g.kernel, strict=True)]
    planes, others, phases = channels, layer.out_features, 1
    if backward:  # each phase of the input sees the output without stride
        planes, others, phases = layer.out_features, 2 * channels, down * across
        reach = [-(-r // step) for r, step in zip(reach, g.stride, strict=True)]
        down = across = 1
    groups, strip = _count_streams(batch, rows, width)
    packed = groups * ((strip - 1) * down + reach[0]) * ((columns - 1) * across + reach[1])
    vectors = groups * strip * columns
    # Each run of neighbouring outputs has a fixed cost.
    work = nonzeros * vectors * (1 + 1.5 / min(8, columns))
    return 1, nonzeros, phases * (planes * packed + others * vectors), work


def cost(
    kind: str,
    layer: Layer,
    g: Geometry,
    batch: int,
    size: Sequence[int],
    backward: bool,
    width: int,
) -> float:
    """Return the predicted nanoseconds of a pass on one thread; arguments as of `terms`."""
    constants = CONSTANTS[family(kind, layer.block_size)][backward]
    factors = terms(kind, layer, g, batch, size, backward, width)
    return sum(c * t for c, t in zip(constants, factors, strict=True))


@lru_cache(maxsize=4096)
def cheapest_kind(
    layer: Layer, g: Geometry, batch: int, size: tuple[int, int], backward: bool, width: int
) -> str:
    """Return the kind of least predicted time on a CPU; arguments as of `terms`."""
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
    """Return "sparse" (compiled kernels over the non-zeros) or "dense" (a dense convolution).

    Args:
        size: (height, width) of the output.
    """
    low = dtype in (torch.bfloat16, torch.float16)
    if not p.on_cpu or not (dtype is torch.float32 or low) or native.load() is None:
        return "dense"
    if batch * size[0] * size[1] == 0:
        return "dense"
    if forced_kind() in KINDS:
        return str(forced_kind())
    layer = Layer(p.out_features, p.in_features, p.nnz, p.block_size)
    return cheapest_kind(layer, g, batch, size, backward, vector_width())
