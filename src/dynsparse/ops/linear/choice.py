"""Which kernels compute a layer: the fastest by a small model of what each costs.

- `sparse`: the kernels over non-zeros (`cpu.py`), for low densities and large batches.
- `small`: the kernels for batches too small to fill vectors (`small.py`); those for single elements
  read bit masks instead of column numbers.
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
from dynsparse.ops.linear import small
from dynsparse.ops.linear.prepared import Prepared

__all__ = ["KINDS", "Cost", "Layer", "choose", "choose_for", "cost", "use_kernel"]

KINDS = ("sparse", "small", "dense")

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

    Entries are the non-zeros for kernels that read only these, and all elements of the matrix for
    `dense` and where bit masks are read.
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
        Cost(6666, 0.1739, 0.1514, 0.0338, 16, 0.0877),
        Cost(10082, 0.445, 1.4113, 0.0508, 16, 1.3183),
    ),
    "tiles": (  # blocks that are no multiples of 16
        Cost(5816, 0.196, 0.0737, 0.0157, 16, 0.0087),
        Cost(7169, 0.4568, 1.7683, 0.0421, 16, 0.0427),
    ),
    "panels": (  # blocks of 16, 32 and so on
        Cost(7448, 0.1524, 0.1146, 0.0189, 4, 0.1834),
        Cost(9860, 0.2993, 0.006, 0.0357, 4, 0.1375),
    ),
    "masks": (
        Cost(6725, 0.2173, 0.0049, 0.0224, 2, 0.0491),
        Cost(8950, 0.6643, 0.1406, 0.0368, 0, 0.1597),
    ),
    "small blocks": (
        Cost(5624, 1.4935, 0.0, 0.0235, 2, 0.0389),
        Cost(6833, 3.1534, 0.0, 0.0656, 2, 0.105),
    ),
    "dense": (
        Cost(11157, 0.1748, 0.2672, 0.0158, 0, 0.1866),
        Cost(21483, 0.2304, 0.4351, 0.03, 0, 0.3647),
    ),
}


def family(kind: str, block_size: int) -> str:
    """What computes: the kernels of a kind that serve this block size."""
    if kind == "dense":
        return kind
    if kind == "small":
        return "masks" if block_size == 1 else "small blocks"
    return "elements" if block_size == 1 else "tiles" if block_size % 16 else "panels"


def cost(kind: str, layer: Layer, batch: int, backward: bool) -> float:
    """Nanoseconds that a pass is expected to take on one thread."""
    name = family(kind, layer.block_size)
    return evaluate(_COSTS[name][backward], name, layer, batch)


def evaluate(c: Cost, name: str, layer: Layer, batch: int) -> float:
    """The formula of `Cost` for kernels of the family `name`."""
    elements = layer.out_features * layer.in_features
    values = layer.nnz * layer.block_size**2
    entries = elements if name in ("masks", "dense") else values
    return (
        c.call
        + c.feature * (layer.out_features + layer.in_features) * batch
        + entries * (c.entry + c.sample * max(batch, c.least_batch))
        + c.far * values * log2(1 + values / (1 << 18))
    )


def candidates(layer: Layer) -> list[str]:
    """The kinds that may compute this layer."""
    kinds = ["sparse"]
    density = layer.nnz * layer.block_size**2 / max(1, layer.out_features * layer.in_features)
    if layer.block_size == 1:
        # Without AVX-512 the masks are read bit by bit.
        if density >= LEAST_DENSITY and native.describe()["isa"] == "v4":
            kinds.append("small")
    elif layer.block_size in small.BLOCK_SIZES:
        kinds.append("small")
    if density >= LEAST_DENSITY:
        kinds.append("dense")
    return kinds


def is_full(layer: Layer) -> bool:
    """Whether the values are a dense weight as they lie there."""
    return layer.block_size == 1 and layer.nnz == layer.out_features * layer.in_features


def choose(layer: Layer, batch: int, backward: bool) -> str:
    """The cheapest kind by the model."""
    if is_full(layer):
        return "dense"
    kinds = candidates(layer)
    return kinds[0] if batch == 0 else min(kinds, key=lambda k: cost(k, layer, batch, backward))


_forced: str | None = None


@contextmanager
def use_kernel(kind: str) -> Iterator[None]:
    """Compute with one kind inside this block, in the whole process: to compare and to measure.

    `small` takes single elements and blocks of 4, 8, 16 and 32; layers of other blocks stay with
    what is chosen for them.

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
    if _forced is not None and (_forced != "small" or small.fits(p)):
        return _forced
    key = batch if backward else ~batch
    kind = p.choices.get(key)
    if kind is None:
        if len(p.choices) >= _MOST_CHOICES:
            p.choices.clear()
        layer = Layer(p.out_features, p.in_features, p.nnz, p.block_size)
        kind = p.choices[key] = choose(layer, batch, backward)
    return kind
