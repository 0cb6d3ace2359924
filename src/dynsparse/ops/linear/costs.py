"""What the kernels cost: a formula, and its constants as fitted on the machines measured so far.

`benchmarks/kernel_choice.py` measures all kinds of kernels over a grid of layers and fits the
constants: mean error of a time 10 to 25 %. What counts is the order of the kinds, which depends on
the processor through its caches and the width of its arithmetic.
"""

from __future__ import annotations

from math import log2
from typing import NamedTuple

from dynsparse import native

__all__ = ["Cost", "Layer", "constants", "evaluate", "family"]


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


# By family, forward and backward (both gradients).
Costs = dict[str, tuple[Cost, Cost]]


def family(kind: str, block_size: int) -> str:
    """The kernels of a kind that serve this block size: these share their constants."""
    if kind == "dense":
        return kind
    if block_size == 1:
        return f"{kind} elements"
    return "sparse blocks of 16" if kind == "sparse" and block_size % 16 == 0 else f"{kind} blocks"


# One thread of a two-core Xeon with AVX-512 and 2 MiB of second-level cache a core (family 6, model
# 167 or 207), layers of 256 to 4096 features, batches of 1 to 2048, densities of 0.01 to 1.
_INTEL: Costs = {
    "sparse elements": (
        Cost(6666, 0.1739, 0.1514, 0.0338, 16, 0.0877),
        Cost(10082, 0.445, 1.4113, 0.0508, 16, 1.3183),
    ),
    "sparse blocks": (  # blocks that are no multiples of 16
        Cost(5816, 0.196, 0.0737, 0.0157, 16, 0.0087),
        Cost(7169, 0.4568, 1.7683, 0.0421, 16, 0.0427),
    ),
    "sparse blocks of 16": (  # 32, 64 and so on, too
        Cost(7448, 0.1524, 0.1146, 0.0189, 4, 0.1834),
        Cost(9860, 0.2993, 0.006, 0.0357, 4, 0.1375),
    ),
    "small elements": (
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

# One thread of a two-core EPYC with AVX-512 and 1 MiB of second-level cache a core (family 25,
# model 17), likewise.
_AMD: Costs = {
    "sparse elements": (
        Cost(7922, 0.122, 0.0058, 0.0395, 16, 0.1528),
        Cost(12254, 0.3972, 1.0344, 0.0541, 16, 0.8155),
    ),
    "sparse blocks": (
        Cost(6905, 0.1867, 0.0, 0.0204, 16, 0.0501),
        Cost(9710, 0.4114, 0.9547, 0.0467, 16, 0.3134),
    ),
    "sparse blocks of 16": (
        Cost(7382, 0.1462, 0.0847, 0.0217, 4, 0.0824),
        Cost(9980, 0.1611, 0.0, 0.0465, 2, 0.1128),
    ),
    "small elements": (
        Cost(6871, 0.1016, 0.0046, 0.0279, 2, 0.0281),
        Cost(9182, 0.4426, 0.1289, 0.045, 0, 0.2007),
    ),
    "small blocks": (
        Cost(5793, 1.2219, 0.0, 0.0271, 0, 0.0296),
        Cost(7625, 1.776, 0.0, 0.0675, 0, 0.0939),
    ),
    "dense": (
        Cost(15749, 0.135, 0.2228, 0.0245, 0, 0.1608),
        Cost(27877, 0.2079, 0.4005, 0.0501, 0, 0.6022),
    ),
}


# ASSUMED, nobody has measured: ARM of 64 bits as the EPYC above, with as many multiply-adds a cycle
# (four of 128 bits), but three loads of 128 bits where that has one of 512. Multiply-adds of sparse
# kernels wait for a load each; dense products use theirs again.
_ARM_LOADS = 4 / 3
_ARM: Costs = {
    name: costs
    if name == "dense"
    else tuple(cost._replace(sample=cost.sample * _ARM_LOADS) for cost in costs)  # type: ignore[misc]
    for name, costs in _AMD.items()
}


def constants() -> Costs:
    """Those of this machine: ARM's, which are assumed, or its maker's; other makers' processors
    count as Intel's."""
    if "neon" in native.supported_isas():
        return _ARM
    return _AMD if native.processor_maker() == "AuthenticAMD" else _INTEL


def evaluate(c: Cost, name: str, layer: Layer, batch: int) -> float:
    """The formula of `Cost` for kernels of the family `name`."""
    elements = layer.out_features * layer.in_features
    values = layer.nnz * layer.block_size**2
    entries = elements if name in ("small elements", "dense") else values
    return (
        c.call
        + c.feature * (layer.out_features + layer.in_features) * batch
        + entries * (c.entry + c.sample * max(batch, c.least_batch))
        + c.far * values * log2(1 + values / (1 << 18))
    )
