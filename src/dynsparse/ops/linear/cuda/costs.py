"""What a layer costs on a GPU: bounds of its passes, and the kind that should take least time.

A kernel over blocks reads X from the L2 cache once for every block that needs it. Besides this the
arithmetic bounds it, the memory through which activations go, and for narrow blocks the reading of
the tensor cores' operands. What it takes is predicted as the largest bound over the share of it
that such kernels reach (`rates.py`), and what starting kernels takes.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from dynsparse.ops.linear.costs import Layer
from dynsparse.ops.linear.cuda.chip import Chip
from dynsparse.ops.linear.cuda.configurations import BLOCKS, Numbers, numbers_of
from dynsparse.ops.linear.cuda.dense import KEPT_LINES, PANEL_BYTES
from dynsparse.ops.linear.cuda.rates import Rates, rates_of

__all__ = ["KINDS", "PASSES", "Bounds", "Kind", "Pass", "bounds", "choose", "product", "seconds"]

Pass = Literal["forward", "grad_input", "grad_weight"]
PASSES: tuple[Pass, ...] = ("forward", "grad_input", "grad_weight")

Kind = Literal["dense", "blocks", "masked"]
KINDS: tuple[Kind, ...] = ("dense", "blocks")
"""What may compute a layer. "masked", a dense layer whose weight and its gradient are multiplied by
a mask, is what they are compared with."""

# Until the first result of a kernel, and behind its last; torch's own kernels run while others end.
_START = {"blocks": 5e-6, "torch": 2e-6}
# What the host takes to launch one, while the device computes.
_LAUNCH = {"triton": 15e-6, "torch": 5e-6}


class Bounds(NamedTuple):
    """Seconds that a pass over blocks takes at least, by what bounds it."""

    arithmetic: float
    operands: float
    memory: float
    cache: float

    @property
    def least(self) -> float:
        """What none of them lets it go below."""
        return max(self)

    @property
    def name(self) -> str:
        """Of what bounds it."""
        return self._fields[self.index(self.least)]


def _size(numbers: Numbers) -> int:
    return 2 if numbers == "16-bit" else 4


def product(layer: Layer, batch: int, numbers: Numbers, rates: Rates) -> float:
    """Seconds of one dense product of the layer's size by cuBLAS."""
    return 2 * batch * layer.out_features * layer.in_features / rates.products[numbers]


def bounds(layer: Layer, batch: int, what: Pass, numbers: Numbers, rates: Rates) -> Bounds:
    """What bounds a pass over the layer's blocks, of any size.

    Tiles are as large as is sensible: 256 samples, or 128 for blocks of 128 and more; the gradient
    of the weight computes blocks of a row together while these are up to 256 wide.
    """
    b, size = layer.block_size, _size(numbers)
    values = layer.nnz * b * b
    arithmetic = 2 * batch * values / rates.tensor[numbers]
    activations = batch * (layer.out_features + layer.in_features) * size
    read: float = batch * b * layer.nnz * size  # each block its part of X
    if what == "grad_weight":
        read *= 1 + 1 / max(1, 256 // b)  # and those together their part of dY
    else:
        read += -(-batch // (256 if b <= 64 else 128)) * values * size
    return Bounds(
        arithmetic,
        arithmetic * rates.operands.slowdown(b),
        (activations + values * size) / rates.memory,
        read / rates.cache,
    )


def seconds(
    kind: Kind,
    layer: Layer,
    batch: int,
    what: Pass,
    numbers: Numbers,
    rates: Rates,
    *,
    captured: bool = False,
) -> float:
    """What a pass is expected to take: the device's time, or the host's where launching the kernels
    takes longer and they are not `captured` in a CUDA graph."""
    elements = layer.out_features * layer.in_features
    if kind == "blocks":
        device = bounds(layer, batch, what, numbers, rates).least / rates.share[numbers]
        device, launches = device + _START["blocks"], _LAUNCH["triton"]
    else:
        kernels, own, moved = 1, 0, 0.0
        if kind == "masked":
            if what != "grad_input":  # the weight is masked once, and so is its gradient
                kernels, moved = 2, elements * (2 * _size(numbers) + 1)
        elif layer.nnz * layer.block_size < elements:  # else the values are the weight
            kernels, own, moved = _moved(layer, batch, what, numbers)
        device = product(layer, batch, numbers, rates) + moved / rates.memory
        device += (kernels + own) * _START["torch"]
        launches = kernels * _LAUNCH["torch"] + own * _LAUNCH["triton"]
    return device if captured else max(device, launches)


def _moved(layer: Layer, batch: int, what: Pass, numbers: Numbers) -> tuple[int, int, float]:
    """Kernels of the dense way, torch's and our own, and bytes that they move beside products."""
    size, held = _size(numbers), layer.nnz * layer.block_size**2
    elements, lines = layer.out_features * layer.in_features, layer.nnz * layer.block_size
    panels = -(-elements * 4 // PANEL_BYTES)
    small = panels == 1 and lines <= KEPT_LINES  # then torch's kernels move the entries
    index = 8 * lines if small else 4 * layer.nnz
    if what == "grad_weight":  # products in float32, and what is collected from each
        own = 0 if small else panels
        return 2 * panels - own, own, elements * 4 + held * (4 + size) + index
    if what == "grad_input" and elements <= max(batch * layer.in_features, held):
        return 1, 0, 0  # forward has kept the weight
    own = 0 if small else 1  # after zeros: the values, and then the product
    return 3 - own, own, elements * size + held * 2 * size + index


def choose(layer: Layer, batch: int, backward: bool, dtype: torch.dtype, chip: Chip) -> Kind:
    """ "blocks" or "dense": what is expected to take less time for activations of `dtype`, forward
    or both gradients. Layers that the kernels over blocks do not take are "dense".

    "dense" is about as fast as a dense layer, so that no layer is much slower than that.
    """
    if layer.block_size not in BLOCKS or dtype is torch.float64:
        return "dense"
    numbers, rates = numbers_of(dtype), rates_of(chip)
    passes = PASSES[1:] if backward else PASSES[:1]

    def all_passes(kind: Kind) -> float:
        return sum(seconds(kind, layer, batch, what, numbers, rates) for what in passes)

    return min(KINDS, key=all_passes)
