"""Which kernels compute a layer: the fastest by a small model of what each costs.

- `sparse`: the kernels over non-zeros (`sparse.py`), for low densities and large batches.
- `small`: the kernels for batches too small to fill vectors (`small.py`); those for single elements
  read bit masks instead of column numbers.
- `dense`: a dense product, the weight laid out a panel at a time (`dense.py`), past the break-even
  density. It never takes more memory than one panel.

The model counts nanoseconds on one thread. All kinds divide about evenly among threads, so the
choice does not depend on their number. `benchmarks/kernel_choice.py` measures all kinds over a grid
of layers, fits the constants (`costs.py`) and says how far the choice is from the best and from a
dense layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from dynsparse import native
from dynsparse.ops.linear.costs import Layer, constants, evaluate
from dynsparse.ops.linear.kernels import small
from dynsparse.ops.linear.layer_index import LayerIndex

__all__ = ["KINDS", "choose", "choose_for", "cost", "use_kernel"]

KINDS = ("sparse", "small", "dense")

# Below this density there are no bit masks: they would take more than half the memory of the
# values. Laying out a weight that is all but empty does not pay either.
LEAST_DENSITY = 1 / 16

# Kernels for small batches are not considered past this one: larger ones were not measured.
MOST_SAMPLES = 128


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
    return evaluate(constants()[name][backward], name, layer, batch)


def candidates(layer: Layer, batch: int) -> list[str]:
    """The kinds that may compute this layer."""
    kinds = ["sparse"]
    density = layer.nnz * layer.block_size**2 / max(1, layer.out_features * layer.in_features)
    if layer.block_size == 1:
        # Without AVX-512 the masks are read bit by bit.
        small_fits = density >= LEAST_DENSITY and native.describe()["isa"] == "v4"
    else:
        small_fits = layer.block_size in small.BLOCK_SIZES
    if small_fits and batch <= MOST_SAMPLES:
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
    kinds = candidates(layer, batch)
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


def choose_for(p: LayerIndex, batch: int, backward: bool) -> str:
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
