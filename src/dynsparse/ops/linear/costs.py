"""What the kernels cost: a formula, and tables of its constants.

`tables.py` has the constants of the machines measured so far, `in_force.py` says which serve here,
and `tuning` measures them where the program runs. The mean error of a time is 10 to 25 %. What
counts is the order of the kinds, which depends on the processor through its caches and the width of
its arithmetic.
"""

from __future__ import annotations

from math import log2
from typing import NamedTuple


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

FAMILIES = (
    "sparse elements",
    "sparse blocks",  # blocks that are no multiples of 16
    "sparse blocks of 16",  # 32, 64 and so on, too
    "small elements",
    "small blocks",
    "dense",
)


class Table(NamedTuple):
    """Constants, and where they come from.

    Attributes:
        name: of the processors that it is for.
        origin: where it was measured, or what it was estimated from.
        costs: a `Cost` of each of `FAMILIES`, forward and backward.
        measured_here: whether this processor was measured.
    """

    name: str
    origin: str
    costs: Costs
    measured_here: bool = False


def family(kind: str, block_size: int) -> str:
    """The kernels of a kind that serve this block size: these share their constants."""
    if kind == "dense":
        return kind
    if block_size == 1:
        return f"{kind} elements"
    return "sparse blocks of 16" if kind == "sparse" and block_size % 16 == 0 else f"{kind} blocks"


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
