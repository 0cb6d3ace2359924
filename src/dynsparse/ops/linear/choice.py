"""Which kernels compute a layer: the decision and its override.

`route` decides for execution, `SparseLinear.kernel`, `dynsparse info` and the benchmark. On a CPU
the kinds are (`cpu.py`, `cpu_dense.py`):

- `sparse`: over the non-zeros, for low densities and large batches.
- `small`: for batches too small to fill vectors; for single elements by bit masks.
- `dense`: a dense product, the weight laid out some rows at a time, above the break-even density.
- `bfloat16`: over the non-zeros of bfloat16 activations, without a float32 copy of these.
- `torch`: plain torch, for other dtypes and without compiled kernels.

On an accelerator they are (`cuda/`):

- `dense`: one dense product, in the dtype of the activations.
- `blocks`: Triton kernels for blocks of 16 to 128 on NVIDIA GPUs.

On a CPU a cost model (`cost_table.py`) picks the fastest of the first three. It predicts
nanoseconds on one thread; all kinds scale about equally with threads, so the choice does not depend
on their number. `benchmarks/kernel_choice.py` measures how far the choice is from the best one. On
GPUs `cuda/costs.py` decides by what bounds the kernels on the chip.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dynsparse._core import native
from dynsparse._core.checks import typed
from dynsparse.ops.linear.cost_table import Costs, Layer, active, evaluate, family
from dynsparse.ops.linear.cuda import blocks
from dynsparse.ops.linear.cuda import costs as cuda_costs
from dynsparse.ops.linear.cuda.chip import chip_of
from dynsparse.ops.linear.layer_index import LayerIndex

KINDS = ("sparse", "small", "dense")
DEVICE_KINDS = cuda_costs.KINDS
ROUTES = (*KINDS, "bfloat16", "torch", "blocks")

# Below this density bit masks would take more than half the memory of the values, and laying out
# the dense weight does not pay either.
LEAST_DENSITY = 1 / 16

# The blocks that the kernels for small batches support, and the largest batch they were measured
# with.
SMALL_BLOCKS = (1, 4, 8, 16, 32, 64, 128)
MOST_SAMPLES = 128

# Blocks that the processor's bfloat16 units multiply.
_UNIT_BLOCKS = (16, 32, 64, 128)


def _cost(costs: Costs, kind: str, layer: Layer, batch: int, backward: bool) -> float:
    name = family(kind, layer.block_size)
    return evaluate(costs[name][backward], name, layer, batch)


def cheapest(costs: Costs, layer: Layer, batch: int, backward: bool) -> str:
    """The candidate of least predicted cost."""
    kinds = candidates(layer, batch)
    return min(kinds, key=lambda kind: _cost(costs, kind, layer, batch, backward))


def candidates(layer: Layer, batch: int) -> list[str]:
    """The kinds that the cost model considers for this layer on a CPU."""
    kinds = ["sparse"]
    density = layer.nnz * layer.block_size**2 / max(1, layer.out_features * layer.in_features)
    small_fits = layer.block_size in SMALL_BLOCKS
    if layer.block_size == 1:
        # Instruction sets that do not expand masks read them bit by bit.
        small_fits = density >= LEAST_DENSITY and native.expands_masks()
    if small_fits and batch <= MOST_SAMPLES:
        kinds.append("small")
    if density >= LEAST_DENSITY:
        kinds.append("dense")
    return kinds


def is_full(layer: Layer) -> bool:
    """Whether every element is present, so that the values are the dense weight."""
    return layer.block_size == 1 and layer.nnz == layer.out_features * layer.in_features


def choose(layer: Layer, batch: int, backward: bool, dtype: torch.dtype = torch.float32) -> str:
    """The fastest kind for activations of `dtype` on a CPU with compiled kernels."""
    low = dtype is torch.bfloat16
    # The bfloat16 units beat float32 at every density.
    if low and layer.block_size in _UNIT_BLOCKS and native.bfloat16_unit() != "float32":
        return "bfloat16"
    if is_full(layer):
        return "dense"
    kind = "sparse" if batch == 0 else cheapest(active().costs, layer, batch, backward)
    return "bfloat16" if low and kind == "sparse" else kind


_FLOAT32 = torch.float32
_forced: str | None = None


@contextmanager
@typed
def use_kernel(kind: str) -> Iterator[None]:
    """Compute with one kind inside this context, in the whole process: to compare and to measure.

    `small` supports single elements and blocks of 4, 8, 16, 32, 64 and 128. Layers whose block size
    or device does not support the kind compute with the chosen one. `sparse` computes bfloat16
    activations with the kind `bfloat16`.

    Raises:
        ValueError: a kind that does not exist.
    """
    global _forced
    kinds = dict.fromkeys((*KINDS, *DEVICE_KINDS))
    if kind not in kinds:
        raise ValueError(f"kind must be one of {', '.join(kinds)}, got {kind!r}")
    before, _forced = _forced, kind
    try:
        yield
    finally:
        _forced = before


def forced() -> str | None:
    """The kind set by `use_kernel`, or None."""
    return _forced


_log = logging.getLogger(__name__)

# Choices kept per layer; they are cleared beyond this number of batch sizes.
_MOST_CHOICES = 64


def route(p: LayerIndex, batch: int, backward: bool, dtype: torch.dtype) -> str:
    """Which of `ROUTES` computes a pass over `batch` activations of `dtype`: forward, or both
    gradients. The result of `choose`, cached, unless `use_kernel` overrides it."""
    if not p.on_cpu:
        return _route_on_device(p, batch, backward, dtype)
    key = batch if backward else ~batch
    if dtype is _FLOAT32 and _forced is None and native.load() is not None:  # most calls
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
        _log_choice(kind, layer, batch, backward)
    return kind


def _log_choice(kind: str, layer: Layer, batch: int, backward: bool) -> None:
    pass_ = "backward" if backward else "forward"
    _log.debug("%s computes %s of %s over %d samples", kind, pass_, layer, batch)


def _route_on_device(p: LayerIndex, batch: int, backward: bool, dtype: torch.dtype) -> str:
    """On an accelerator."""
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
        _log_choice(kind, layer, batch, backward)
    return kind
