"""The time of a layer on a GPU: bounds of its passes, and the kind that should be fastest.

A kernel over blocks reads X from the L2 cache once for every block that needs it. It is also bound
by arithmetic, by the memory traffic of activations, and for narrow blocks by reading the operands
of the tensor cores. The predicted time is the largest bound, over the share of it that such kernels
reach, or the time of one program's steps, which follow each other, plus the time to start kernels.
It is the device's time: what the host takes to launch kernels is not in it, since CUDA graphs and
large batches hide that.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from dynsparse.ops.linear.cost_table import Layer
from dynsparse.ops.linear.cuda.chip import Chip, Numbers, numbers_of
from dynsparse.ops.linear.cuda.configurations import (
    BLOCKS,
    Gradient,
    Rows,
    choose_gradient,
    choose_rows,
)

Pass = Literal["forward", "grad_input", "grad_weight"]
PASSES: tuple[Pass, ...] = ("forward", "grad_input", "grad_weight")

Kind = Literal["dense", "blocks"]
KINDS: tuple[Kind, ...] = ("dense", "blocks")
"""The kinds of products."""

# Seconds from starting a kernel to its first result, and after its last; torch's kernels overlap.
_START = {"blocks": 5e-6, "dense": 3e-6}
# Seconds of one step over samples in the gradient of the values.
_STEP = 0.4e-6


class Rates(NamedTuple):
    """The operations and bytes that a chip reaches per second.

    Attributes:
        name: the name of the chip.
        measured: whether rates and shares were measured, with these kernels, or are assumed.
        source: the source of the rates.
        multiprocessors: their number on that chip; rates of others scale with theirs.
        products: operations (a multiply-add is 2) of cuBLAS in a large product of random numbers,
            by what the tensor cores multiply. "tf32x3" is cuBLAS without TF32, on CUDA cores.
        tensor: operations of the tensor cores, for the kernels over blocks: three products of tf32
            make one of "tf32x3".
        cache, memory: bytes from the L2 cache to the multiprocessors, and of a copy in memory, read
            and written.
        share: the share of the bound of a pass that its kernel reaches once started, by numbers
            and block size: (forward and grad_input, grad_weight).
    """

    name: str
    measured: bool
    source: str
    multiprocessors: int
    products: dict[Numbers, float]
    tensor: dict[Numbers, float]
    cache: float
    memory: float
    share: dict[Numbers, dict[int, tuple[float, float]]]


H100 = Rates(
    name="H100",
    measured=True,
    source="benchmarks/gpu.py on an H100 with HBM3, torch 2.11, Triton 3.6; shares of 16-bit "
    "numbers fitted to its grid, others of 4096 features, 8192 samples, density 0.1; cache: "
    "gpu-benches, h200.txt",
    multiprocessors=132,
    products={"16-bit": 800e12, "tf32": 330e12, "tf32x3": 52e12},
    tensor={"16-bit": 800e12, "tf32": 400e12, "tf32x3": 400e12 / 3},
    cache=9.7e12,
    memory=3.0e12,
    # Hopper's tensor cores read tf32 along the sum only, so grad_weight transposes in registers.
    share={
        "16-bit": {16: (0.45, 0.23), 32: (0.75, 0.5), 64: (0.85, 0.7), 128: (0.85, 0.6)},
        "tf32": {16: (0.78, 0.13), 32: (0.79, 0.14), 64: (0.68, 0.13), 128: (0.56, 0.16)},
        "tf32x3": {16: (0.64, 0.53), 32: (0.6, 0.44), 64: (0.49, 0.35), 128: (0.51, 0.26)},
    },
)

_ASSUMED: dict[Numbers, float] = {"16-bit": 0.6, "tf32": 0.6, "tf32x3": 0.3}

B200 = Rates(
    name="B200",
    measured=False,
    source="products 80 %, memory 90 % of the data sheet; a multiprocessor's cache as on the H100; "
    "shares of first versions of such kernels: all assumed",
    multiprocessors=148,
    products={"16-bit": 1800e12, "tf32": 900e12, "tf32x3": 62e12},
    tensor={"16-bit": 1800e12, "tf32": 900e12, "tf32x3": 300e12},
    cache=10.9e12,
    memory=7.2e12,
    share={numbers: dict.fromkeys(BLOCKS, (share, share)) for numbers, share in _ASSUMED.items()},
)
"""The rates for all chips but those of compute capability 9.0: none has faster dense products
relative to its cache, so blocks are chosen only where they should be faster on every chip."""


def rates_of(chip: Chip) -> Rates:
    """Return the rates of a chip, scaled to its number of multiprocessors."""
    row = H100 if chip.capability == (9, 0) else B200
    scale = chip.multiprocessors / row.multiprocessors
    return row._replace(
        products={numbers: scale * rate for numbers, rate in row.products.items()},
        tensor={numbers: scale * rate for numbers, rate in row.tensor.items()},
        cache=scale * row.cache,
    )


class Bounds(NamedTuple):
    """Lower bounds of the seconds of a pass over blocks."""

    arithmetic: float
    operands: float
    memory: float
    cache: float

    @property
    def largest(self) -> float:
        """The largest of the bounds."""
        return max(self)

    @property
    def name(self) -> str:
        """The name of the largest bound."""
        return self._fields[self.index(self.largest)]


def dense_seconds(layer: Layer, batch: int, numbers: Numbers, rates: Rates) -> float:
    """Return the seconds of one dense product of the layer's size by cuBLAS."""
    return 2 * batch * layer.out_features * layer.in_features / rates.products[numbers]


def config_of(
    layer: Layer, batch: int, what: Pass, dtype: torch.dtype, chip: Chip
) -> Rows | Gradient:
    """Return the configuration of a pass."""
    b, height, width = layer.block_size, layer.out_features, layer.in_features
    if what == "grad_weight":
        return choose_gradient(b, dtype, layer.nnz, height // b, batch, chip)
    return choose_rows(b, dtype, batch, (height if what == "forward" else width) // b, chip)


def bounds(
    layer: Layer, batch: int, config: Rows | Gradient, numbers: Numbers, rates: Rates
) -> Bounds:
    """Return the bounds of a pass over the layer's blocks.

    Args:
        config: `Rows` for forward and the gradient of the input, `Gradient` for that of the weight.
    """
    b, size = layer.block_size, 2 if numbers == "16-bit" else 4
    values = layer.nnz * b * b
    arithmetic = 2 * batch * values / rates.tensor[numbers]
    activations = batch * (layer.out_features + layer.in_features) * size
    read = float(batch * b * layer.nnz * size)  # for each block its part of X
    if isinstance(config, Rows):
        read += -(-batch // config.samples) * values * size  # for each tile of samples all values
    else:  # and for the blocks of a program their part of dY; the last of a row has half of them
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
    """Return the predicted time of a pass on the device."""
    numbers, rates = numbers_of(dtype), rates_of(chip)
    if kind == "blocks":
        config = config_of(layer, batch, what, dtype, chip)
        share = rates.share[numbers][layer.block_size][what == "grad_weight"]
        taken, kernels = bounds(layer, batch, config, numbers, rates).largest / share, 1
        if isinstance(config, Gradient):
            taken = max(taken, batch / (config.split * config.samples) * _STEP)
            kernels += config.split > 1  # parts are added up
    else:
        kernels, moved = _count_kernels_and_bytes(layer, batch, what, dtype.itemsize)
        taken = dense_seconds(layer, batch, numbers, rates) + moved / rates.memory
    return taken + kernels * _START[kind]


def _count_kernels_and_bytes(layer: Layer, batch: int, what: Pass, size: int) -> tuple[int, int]:
    """Return the number of kernels of kind "dense", and the bytes they move besides the product."""
    elements = layer.out_features * layer.in_features
    values = layer.nnz * layer.block_size**2
    if values == elements and layer.block_size == 1:  # the values are the weight
        return 1, 0
    if what == "grad_weight":  # the product in float32, and the gathered entries
        return 2, elements * 4 + values * (4 + size)
    if what == "grad_input" and elements <= max(batch * layer.in_features, values):
        return 1, 0  # the weight is saved by forward
    return 2, (elements + 2 * values) * size  # the weight, of zeros and values, and the product


def choose(layer: Layer, batch: int, backward: bool, dtype: torch.dtype, chip: Chip) -> Kind:
    """Return "blocks" or "dense", which is predicted to be faster for activations of `dtype`.

    In forward, or with `backward` in both gradients. Layers that the kernels over blocks do not
    support are "dense", which is about as fast as a dense layer.
    """
    if layer.block_size not in BLOCKS or dtype is torch.float64:
        return "dense"
    passes = PASSES[1:] if backward else PASSES[:1]
    return min(
        KINDS, key=lambda kind: sum(seconds(kind, layer, batch, p, dtype, chip) for p in passes)
    )
