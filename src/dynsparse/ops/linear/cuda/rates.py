"""What GPUs can do, as data: the H200, and one conservative row for other chips.

`source` says where a row is from. Rates were measured by others or come from data sheets; the
shares that the kernels reach of them are assumed until `benchmarks/gpu.py` has run on such a chip:
it prints the row as measured, ready to take its place here.
"""

from __future__ import annotations

from typing import NamedTuple

from dynsparse.ops.linear.cuda.chip import Chip
from dynsparse.ops.linear.cuda.precision import Numbers


class Rates(NamedTuple):
    """A chip.

    Attributes:
        name: of the chip that the row is about.
        measured: whether `share` was measured with these kernels, or is assumed.
        source: where the rates are from.
        multiprocessors: of that chip; products and cache of others scale with theirs.
        products: multiply-adds count 2: what cuBLAS reaches in a large product of random numbers,
            by what the tensor cores multiply. "tf32x3" is cuBLAS without TF32, on CUDA cores.
        tensor: likewise of the tensor cores, for the kernels over blocks: three products of tf32
            make one of "tf32x3".
        cache, memory: bytes per second from the L2 cache to the multiprocessors, and of a copy in
            memory, read and written.
        share: of the bound of a pass that its kernel reaches, by what is multiplied.
    """

    name: str
    measured: bool
    source: str
    multiprocessors: int
    products: dict[Numbers, float]
    tensor: dict[Numbers, float]
    cache: float
    memory: float
    share: dict[Numbers, float]


# First versions of such kernels reach 60 %; splitting operands in registers takes half of the time.
_ASSUMED: dict[Numbers, float] = {"16-bit": 0.6, "tf32": 0.6, "tf32x3": 0.3}

H200 = Rates(
    name="H200",
    measured=False,
    source="16-bit products and memory measured (torch 2.11), cache measured (gpu-benches, "
    "h200.txt); tf32 half of the 16-bit products, float32 78 % of the data sheet: assumed",
    multiprocessors=132,
    products={"16-bit": 790e12, "tf32": 395e12, "tf32x3": 52e12},
    tensor={"16-bit": 790e12, "tf32": 395e12, "tf32x3": 395e12 / 3},
    cache=9.7e12,
    memory=4.3e12,
    share=_ASSUMED,
)

B200 = Rates(
    name="B200",
    measured=False,
    source="products 80 %, memory 90 % of the data sheet; a multiprocessor's cache as on the H200: "
    "all assumed",
    multiprocessors=148,
    products={"16-bit": 1800e12, "tf32": 900e12, "tf32x3": 62e12},
    tensor={"16-bit": 1800e12, "tf32": 900e12, "tf32x3": 300e12},
    cache=10.9e12,
    memory=7.2e12,
    share=_ASSUMED,
)
"""For all chips but the H200 and its like: none has faster dense products beside its cache, so that
blocks are chosen only where they should pay on every chip."""


def rates_of(chip: Chip) -> Rates:
    """The row for the chip, for as many multiprocessors as it has."""
    row = H200 if chip.capability == (9, 0) else B200
    scale = chip.multiprocessors / row.multiprocessors
    return row._replace(
        products={numbers: scale * rate for numbers, rate in row.products.items()},
        tensor={numbers: scale * rate for numbers, rate in row.tensor.items()},
        cache=scale * row.cache,
    )
