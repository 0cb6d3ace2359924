"""Which kernels compute a layer: one decision, asked by everybody.

`route` is what the operator follows, what `SparseLinear.kernel` and the benchmark name, and what
`dynsparse info` tabulates. The kinds are the files of `kernels/`:

- `sparse`: over the non-zeros, for low densities and large batches.
- `small`: for batches too small to fill vectors; for single elements by bit masks.
- `dense`: a dense product, the weight laid out a slab at a time, past the break-even density.
- `bfloat16`: over the non-zeros of bfloat16 activations, without a copy of these in float32.
- `torch`: plain torch, for other types and where no compiled kernels are.

On other devices than the CPU the kinds are the files of `cuda/`:

- `dense`: one dense product in the type of the activations, of a weight that is laid out for it.
- `blocks`: Triton kernels over blocks of 16 to 128 on NVIDIA GPUs.

On the CPU the fastest of the first three is chosen by a small model of what each costs, `costs.py`.
It counts nanoseconds on one thread; all kinds divide about evenly among threads, so the choice does
not depend on their number. `in_force.py` says which constants serve: this processor's own, which
`tuning` measures, or those of a table. `benchmarks/kernel_choice.py` measures all kinds over a grid
of layers, and says how far the choice is from the best and from a dense layer. On GPUs
`cuda/costs.py` chooses by what bounds the kernels on the chip.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dynsparse import native
from dynsparse.ops.linear import in_force
from dynsparse.ops.linear.costs import Costs, Layer, evaluate, family
from dynsparse.ops.linear.cuda import blocks
from dynsparse.ops.linear.cuda import costs as cuda_costs
from dynsparse.ops.linear.cuda.chip import chip_of
from dynsparse.ops.linear.layer_index import LayerIndex
from dynsparse.typed import typed

KINDS = ("sparse", "small", "dense")
KINDS_ELSEWHERE = cuda_costs.KINDS
ROUTES = (*KINDS, "bfloat16", "torch", "blocks")

# Below this density there are no bit masks: they would take more than half the memory of the
# values. Laying out a weight that is all but empty does not pay either.
LEAST_DENSITY = 1 / 16

# Kernels for small batches are written for these blocks, and not considered past so many samples:
# larger batches were not measured.
SMALL_BLOCKS = (1, 4, 8, 16, 32, 64, 128)
MOST_SAMPLES = 128

# Blocks that the processor's units for bfloat16 multiply.
_UNIT_BLOCKS = (16, 32, 64, 128)


def _cost(costs: Costs, kind: str, layer: Layer, batch: int, backward: bool) -> float:
    name = family(kind, layer.block_size)
    return evaluate(costs[name][backward], name, layer, batch)


def cheapest(costs: Costs, layer: Layer, batch: int, backward: bool) -> str:
    """The kind of least cost by these constants, of those that may compute the layer."""
    kinds = candidates(layer, batch)
    return min(kinds, key=lambda kind: _cost(costs, kind, layer, batch, backward))


def candidates(layer: Layer, batch: int) -> list[str]:
    """The kinds that may compute this layer on a CPU."""
    kinds = ["sparse"]
    density = layer.nnz * layer.block_size**2 / max(1, layer.out_features * layer.in_features)
    small_fits = layer.block_size in SMALL_BLOCKS
    if layer.block_size == 1:
        # Where vectors are not filled by masks, these are read bit by bit.
        small_fits = density >= LEAST_DENSITY and native.expands_masks()
    if small_fits and batch <= MOST_SAMPLES:
        kinds.append("small")
    if density >= LEAST_DENSITY:
        kinds.append("dense")
    return kinds


def is_full(layer: Layer) -> bool:
    """Whether the values are a dense weight as they lie there."""
    return layer.block_size == 1 and layer.nnz == layer.out_features * layer.in_features


def choose(layer: Layer, batch: int, backward: bool, dtype: torch.dtype = torch.float32) -> str:
    """The fastest kind for activations of `dtype` on a CPU with compiled kernels."""
    low = dtype is torch.bfloat16
    # These units beat float32 at every density.
    if low and layer.block_size in _UNIT_BLOCKS and native.bfloat16_unit() != "float32":
        return "bfloat16"
    if is_full(layer):
        return "dense"
    kind = "sparse" if batch == 0 else cheapest(in_force.constants(), layer, batch, backward)
    return "bfloat16" if low and kind == "sparse" else kind


_FLOAT32 = torch.float32
_forced: str | None = None


@contextmanager
@typed
def use_kernel(kind: str) -> Iterator[None]:
    """Compute with one kind inside this block, in the whole process: to compare and to measure.

    `small` takes single elements and blocks of 4, 8, 16, 32, 64 and 128. Layers that have no such
    kind, for their blocks or their device, stay with what is chosen for them. `sparse` computes
    bfloat16 activations by the route `bfloat16`.

    Raises:
        ValueError: a kind that does not exist.
    """
    global _forced
    kinds = dict.fromkeys((*KINDS, *KINDS_ELSEWHERE))
    if kind not in kinds:
        raise ValueError(f"kind must be one of {', '.join(kinds)}, got {kind!r}")
    before, _forced = _forced, kind
    try:
        yield
    finally:
        _forced = before


def forced() -> str | None:
    """The kind that `use_kernel` asks for."""
    return _forced


_log = logging.getLogger(__name__)

# Choices remembered per layer; batches of ever new sizes start over.
_MOST_CHOICES = 64


def route(p: LayerIndex, batch: int, backward: bool, dtype: torch.dtype) -> str:
    """Which of `ROUTES` computes a pass over `batch` activations of `dtype`: forward, or both
    gradients. As `choose`, remembered, and subject to `use_kernel`."""
    if not p.on_cpu:
        return _route_elsewhere(p, batch, backward, dtype)
    key = batch if backward else ~batch
    if dtype is _FLOAT32 and _forced is None and native.load() is not None:  # as most calls are
        kind = p.choices[0].get(key)
        if kind is not None:
            return kind
    low = dtype is torch.bfloat16
    if not (dtype is torch.float32 or low or dtype is torch.float16) or native.load() is None:
        return "torch"
    if _forced in KINDS and (_forced != "small" or p.block_size in SMALL_BLOCKS):
        return "bfloat16" if low and _forced == "sparse" else _forced
    choices = p.choices[low]
    kind = choices.get(key)
    if kind is None:
        if len(choices) >= _MOST_CHOICES:
            choices.clear()
        layer = Layer(p.out_features, p.in_features, p.nnz, p.block_size)
        kind = choices[key] = choose(layer, batch, backward, dtype)
        _tell(kind, layer, batch, backward)
    return kind


def _tell(kind: str, layer: Layer, batch: int, backward: bool) -> None:
    way = "backward" if backward else "forward"
    _log.debug("%s computes %s of %s over %d samples", kind, way, layer, batch)


def _route_elsewhere(p: LayerIndex, batch: int, backward: bool, dtype: torch.dtype) -> str:
    """On another device than the CPU."""
    device = p.cols.device
    if _forced == "dense" or not blocks.serves(p, dtype, device):
        return "dense"
    if _forced == "blocks":
        return "blocks"
    choices = p.choices[0]
    key = (batch, backward, dtype)
    kind = choices.get(key)
    if kind is None:
        if len(choices) >= _MOST_CHOICES:
            choices.clear()
        layer = Layer(p.out_features, p.in_features, p.nnz, p.block_size)
        kind = choices[key] = cuda_costs.choose(layer, batch, backward, dtype, chip_of(device))
        _tell(kind, layer, batch, backward)
    return kind
