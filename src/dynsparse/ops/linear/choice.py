"""Which kernels compute a layer: the fastest by a small model of what each costs.

- `sparse`: the kernels over non-zeros (`cpu.py`), for low densities and large batches.
- `masked`: bit masks instead of column numbers (`masked.py`), single elements and small batches.
- `dense`: a dense product, the weight laid out a panel at a time (`dense.py`), past the break-even
  density. It never takes more memory than one panel.

The model counts nanoseconds on one thread. All kinds divide about evenly among threads, so the
choice does not depend on their number. `benchmarks/kernel_choice.py` measures all kinds over a grid
of layers, fits the constants below and says how far the choice is from the best and from a dense
layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import log2
from typing import NamedTuple

from dynsparse.ops import native
from dynsparse.ops.linear.prepared import Prepared

__all__ = ["KINDS", "Cost", "Layer", "choose", "choose_for", "cost", "use_kernel"]

KINDS = ("sparse", "masked", "dense")

# Below this density there are no bit masks: they would take more than half the memory of the
# values. Laying out a weight that is all but empty does not pay either.
LEAST_DENSITY = 1 / 16


class Layer(NamedTuple):
    """What the costs depend on: features, blocks present and their size."""

    out_features: int
    in_features: int
    nnz: int
    block_size: int


class Cost(NamedTuple):
    """Nanoseconds of one pass: call + feature * (in + out) * batch + entries * (entry
    + sample * max(batch, least_batch)) + far * non-zeros * log2(1 + megabytes of values).

    Entries are the non-zeros for `sparse` kernels and all elements of the matrix for the others.
    `far` is what values cost that come from beyond the second-level cache.
    """

    call: float
    feature: float
    entry: float
    sample: float
    least_batch: int
    far: float


# By what computes, forward and backward (both gradients). Measured on one thread of a two-core
# Xeon with AVX-512 and 2 MiB of second-level cache a core, layers of 256 to 4096 features, batches
# of 1 to 2048, densities of 0.01 to 1; mean error of a time 10 to 20 %.
_COSTS: dict[str, tuple[Cost, Cost]] = {
    "elements": (
        Cost(6966, 0.198, 0.1052, 0.03072, 16, 0.0622),
        Cost(11356, 0.551, 0.1305, 0.05056, 32, 0.8519),
    ),
    "tiles": (  # blocks that are no multiples of 16
        Cost(26554, 0.986, 0.0, 0.00955, 32, 0.0270),
        Cost(35107, 0.293, 0.0, 0.03458, 16, 0.3819),
    ),
    "panels": (  # blocks of 16, 32 and so on
        Cost(34348, 0.0, 0.2255, 0.01399, 2, 0.0495),
        Cost(7015, 0.0, 0.0, 0.02681, 4, 0.0694),
    ),
    "masked": (
        Cost(6218, 0.257, 0.0114, 0.02036, 2, 0.0296),
        Cost(7277, 1.679, 0.1554, 0.02959, 0, 0.0686),
    ),
    "dense": (
        Cost(3645, 0.462, 0.4250, 0.01183, 0, 0.1061),
        Cost(20251, 1.167, 0.5569, 0.02120, 2, 0.2712),
    ),
}


def family(kind: str, block_size: int) -> str:
    """What computes: the kind, or the family of sparse kernels that serves this block size."""
    if kind != "sparse":
        return kind
    return "elements" if block_size == 1 else "tiles" if block_size % 16 else "panels"


def cost(kind: str, layer: Layer, batch: int, backward: bool) -> float:
    """Nanoseconds that a pass is expected to take on one thread."""
    c = _COSTS[family(kind, layer.block_size)][backward]
    elements = layer.out_features * layer.in_features
    values = layer.nnz * layer.block_size**2
    entries = values if kind == "sparse" else elements
    return (
        c.call
        + c.feature * (layer.out_features + layer.in_features) * batch
        + entries * (c.entry + c.sample * max(batch, c.least_batch))
        + c.far * values * log2(1 + values / (1 << 18))
    )


def candidates(layer: Layer) -> list[str]:
    """The kinds that may compute this layer."""
    density = layer.nnz * layer.block_size**2 / max(1, layer.out_features * layer.in_features)
    if density < LEAST_DENSITY:
        return ["sparse"]
    # Without AVX-512 the masks are read bit by bit.
    masked = layer.block_size == 1 and native.describe()["isa"] == "v4"
    return ["sparse", "masked", "dense"] if masked else ["sparse", "dense"]


def choose(layer: Layer, batch: int, backward: bool) -> str:
    """The cheapest kind by the model."""
    kinds = candidates(layer)
    return kinds[0] if batch == 0 else min(kinds, key=lambda k: cost(k, layer, batch, backward))


_forced: str | None = None


@contextmanager
def use_kernel(kind: str) -> Iterator[None]:
    """Compute with one kind inside this block, in the whole process: to compare and to measure.

    `masked` takes single elements only; layers of blocks stay with what is chosen for them.

    Raises:
        ValueError: a kind that does not exist.
    """
    global _forced
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    before, _forced = _forced, kind
    try:
        yield
    finally:
        _forced = before


# Choices remembered per layer; batches of ever new sizes start over.
_MOST_CHOICES = 64


def choose_for(p: Prepared, batch: int, backward: bool) -> str:
    """As `choose`, remembered, and subject to `use_kernel`."""
    if _forced is not None and (_forced != "masked" or p.block_size == 1):
        return _forced
    key = batch if backward else ~batch
    kind = p.choices.get(key)
    if kind is None:
        if len(p.choices) >= _MOST_CHOICES:
            p.choices.clear()
        layer = Layer(p.out_features, p.in_features, p.nnz, p.block_size)
        kind = p.choices[key] = choose(layer, batch, backward)
    return kind
