"""What the two ways to compute a convolution cost on a CPU: formulas, and constants as fitted.

`benchmarks/conv_choice.py` measures both ways over a grid of layers, densities and batches, fits
the constants and says how far the choice is from the faster way. They count nanoseconds on one
thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from dynsparse import native
from dynsparse.ops.conv.geometry import Geometry
from dynsparse.ops.linear.cost_table import Layer

# Of the terms below, forward and backward (both gradients), on one thread of a two-core EPYC
# (family 25, model 17) with AVX-512: batches of 1 to 32, densities of 0.02 to 0.9, mean error of a
# time 15 to 23 %. The machine was busy, so they are larger than on an idle one; what counts is
# their order.
CONSTANTS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "sparse elements": ((28000, 5.87, 6.66, 0.475), (95300, 9.71, 5.51, 0.571)),
    "sparse blocks": ((25300, 3.02, 6.22, 0.292), (92200, 3.66, 5.43, 0.588)),
    "dense": ((55700, 1.31, 1.27, 0.0186, 0.742), (157000, 2.16, 3.02, 0.0436, 0.933)),
}


def family(kind: str, block_size: int) -> str:
    """What has constants of its own."""
    if kind == "dense":
        return kind
    return "sparse blocks" if block_size >= 4 else "sparse elements"


@cache
def _lanes_of(path: str) -> int:
    return {"v4": 16, "v3": 8}.get(Path(path).stem.rpartition("_")[2], 4)


def lanes() -> int:
    """Floats of a vector of the kernels that are loaded."""
    library = native.load()
    return 1 if library is None else _lanes_of(library._name)


def _streams(batch: int, height: int, width: int) -> tuple[int, int]:
    """Groups of streams, and rows of a stream, as csrc/conv/run.cpp divides `batch` images of
    `height` rows: a vector has an image or a strip of one per lane."""
    found = []
    for strips in range(1, min(width, height) + 1):
        strip = -(-height // strips)
        groups = -(-batch * strips // width)
        found.append((groups * strip, strips, groups, strip))
    return min(found)[2:]


def terms(
    kind: str,
    layer: Layer,
    g: Geometry,
    batch: int,
    size: Sequence[int],
    backward: bool,
    width: int,
) -> tuple[float, ...]:
    """What the constants of a family are multiplied with.

    Args:
        size: of the output, (height, width).
        width: of a vector.
    """
    channels = layer.in_features // g.taps * g.groups
    held = layer.nnz * layer.block_size**2
    (rows, columns), (down, across) = size, g.stride
    if kind == "dense":
        elements = layer.out_features * layer.in_features
        places = batch * rows * columns
        moved = batch * rows * columns * (channels * down * across + layer.out_features)
        return 1, held, elements, elements * places, moved
    reach = [d * (k - 1) + 1 for d, k in zip(g.dilation, g.kernel, strict=True)]
    planes, others, phases = channels, layer.out_features, 1
    if backward:  # the phases of the input see the output without stride
        planes, others, phases = layer.out_features, 2 * channels, down * across
        reach = [-(-r // step) for r, step in zip(reach, g.stride, strict=True)]
        down = across = 1
    groups, strip = _streams(batch, rows, width)
    packed = groups * ((strip - 1) * down + reach[0]) * ((columns - 1) * across + reach[1])
    vectors = groups * strip * columns
    # A run of neighbouring outputs costs something beside them.
    work = held * vectors * (1 + 1.5 / min(8, columns))
    return 1, held, phases * (planes * packed + others * vectors), work


def cost(
    kind: str,
    layer: Layer,
    g: Geometry,
    batch: int,
    size: Sequence[int],
    backward: bool,
    width: int,
) -> float:
    """Nanoseconds that a pass is expected to take on one thread; arguments as of `terms`."""
    constants = CONSTANTS[family(kind, layer.block_size)][backward]
    found = terms(kind, layer, g, batch, size, backward, width)
    return sum(c * t for c, t in zip(constants, found, strict=True))
