"""What a layer costs on a GPU: bounds of its passes, and the kind that should take least time.

A kernel over blocks reads X from the L2 cache once for every block that needs it. Besides this the
arithmetic bounds it, the memory through which activations go, and for narrow blocks the reading of
the tensor cores' operands. What it takes is predicted as the largest bound over the share of it
that such kernels reach (`rates.py`), and what starting kernels takes.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from dynsparse.ops.linear.cost_table import Layer
from dynsparse.ops.linear.cuda.chip import Chip
from dynsparse.ops.linear.cuda.configurations import (
    BLOCKS,
    Gradient,
    Rows,
    gradient_for,
    rows_for,
)
from dynsparse.ops.linear.cuda.precision import Numbers, numbers_of
from dynsparse.ops.linear.cuda.rates import Rates, rates_of

Pass = Literal["forward", "grad_input", "grad_weight"]
PASSES: tuple[Pass, ...] = ("forward", "grad_input", "grad_weight")

Kind = Literal["dense", "blocks"]
KINDS: tuple[Kind, ...] = ("dense", "blocks")
"""What may compute a layer."""

# Until the first result of a kernel, and behind its last; torch's own kernels run while others end.
_START = {"blocks": 5e-6, "dense": 2e-6}
# What the host takes to launch one, while the device computes.
_LAUNCH = {"blocks": 15e-6, "dense": 5e-6}


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


def product(layer: Layer, batch: int, numbers: Numbers, rates: Rates) -> float:
    """Seconds of one dense product of the layer's size by cuBLAS."""
    return 2 * batch * layer.out_features * layer.in_features / rates.products[numbers]


def config_of(
    layer: Layer, batch: int, what: Pass, dtype: torch.dtype, chip: Chip
) -> Rows | Gradient:
    """The configuration that runs."""
    b, height, width = layer.block_size, layer.out_features, layer.in_features
    if what == "grad_weight":
        return gradient_for(b, dtype, layer.nnz, height // b, batch, chip)
    return rows_for(b, dtype, batch, (height if what == "forward" else width) // b, chip)


def bounds(
    layer: Layer, batch: int, config: Rows | Gradient, numbers: Numbers, rates: Rates
) -> Bounds:
    """What bounds a pass over the layer's blocks in one configuration: `Rows` for forward and the
    gradient of the input, `Gradient` for that of the weight."""
    b, size = layer.block_size, 2 if numbers == "16-bit" else 4
    values = layer.nnz * b * b
    arithmetic = 2 * batch * values / rates.tensor[numbers]
    activations = batch * (layer.out_features + layer.in_features) * size
    read = float(batch * b * layer.nnz * size)  # each block its part of X
    if isinstance(config, Rows):
        read += -(-batch // config.samples) * values * size  # each tile of samples all values
    else:  # and the blocks of a program together their part of dY; a row's last lacks half of them
        missing = layer.out_features / b * (config.blocks - 1) / 2
        read += batch * b * size * (layer.nnz + missing) / config.blocks
    return Bounds(
        arithmetic,
        # A step of the tensor cores takes half a clock per output, and reading its operands from
        # shared memory 16 and a quarter per output.
        arithmetic * max(1.0, 32 / b + 0.5),
        (activations + values * size) / rates.memory,
        read / rates.cache,
    )


def seconds(
    kind: Kind, layer: Layer, batch: int, what: Pass, dtype: torch.dtype, chip: Chip
) -> float:
    """What a pass is expected to take: the device's time, or the host's where launching the kernels
    takes longer."""
    numbers, rates = numbers_of(dtype), rates_of(chip)
    if kind == "blocks":
        config = config_of(layer, batch, what, dtype, chip)
        device = bounds(layer, batch, config, numbers, rates).least / rates.share[numbers]
        kernels = 1
    else:
        kernels, moved = _moved(layer, batch, what, dtype.itemsize)
        device = product(layer, batch, numbers, rates) + moved / rates.memory
    return max(device + kernels * _START[kind], kernels * _LAUNCH[kind])


def _moved(layer: Layer, batch: int, what: Pass, size: int) -> tuple[int, int]:
    """Kernels of the dense way, and bytes that they move beside the product."""
    elements = layer.out_features * layer.in_features
    held = layer.nnz * layer.block_size**2
    if held == elements and layer.block_size == 1:  # the values are the weight
        return 1, 0
    if what == "grad_weight":  # the product in float32, and what is collected from it
        return 2, elements * 4 + held * (4 + size)
    if what == "grad_input" and elements <= max(batch * layer.in_features, held):
        return 1, 0  # forward has kept the weight
    return 3, (elements + 2 * held) * size  # zeros, the values in their places, the product


def choose(layer: Layer, batch: int, backward: bool, dtype: torch.dtype, chip: Chip) -> Kind:
    """ "blocks" or "dense": what is expected to take less time for activations of `dtype`, forward
    or both gradients. Layers that the kernels over blocks do not take are "dense".

    "dense" is about as fast as a dense layer, so that no layer is much slower than that.
    """
    if layer.block_size not in BLOCKS or dtype is torch.float64:
        return "dense"
    passes = PASSES[1:] if backward else PASSES[:1]
    return min(
        KINDS, key=lambda kind: sum(seconds(kind, layer, batch, p, dtype, chip) for p in passes)
    )
