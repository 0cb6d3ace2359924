"""What GPUs can do, as data: one row per family of chips.

`source` says where a row is from. Rates were measured by others or derived from data sheets; the
shares that the kernels reach of them are predictions until `benchmarks/gpu.py` has run on such a
chip: it prints the row as measured, ready to take its place here.
"""

from __future__ import annotations

from typing import NamedTuple

from dynsparse.ops.linear.cuda.chip import Chip
from dynsparse.ops.linear.cuda.configurations import Family, Numbers, family_of

__all__ = ["RATES", "Operands", "Rates", "rates_of"]


class Operands(NamedTuple):
    """Clocks of one step of the tensor cores whose tile is b wide: reading its operands from shared
    memory takes `fixed + each * b`, multiplying them `multiply * b`."""

    fixed: float
    each: float
    multiply: float

    def slowdown(self, b: int) -> float:
        """How much slower than at its best the arithmetic is for blocks of `b`."""
        return max(1.0, (self.fixed + self.each * b) / (self.multiply * b))


class Rates(NamedTuple):
    """A chip.

    Attributes:
        name: of the chip that the row is about.
        measured: whether `share` was measured with these kernels, or is predicted.
        source: where the rates are from.
        multiprocessors: of that chip; products and cache of others scale with theirs.
        products: multiply-adds count 2: what cuBLAS reaches in a large product of random numbers,
            by what the tensor cores multiply. "tf32x3" is cuBLAS without TF32, on CUDA cores.
        tensor: likewise of the tensor cores, for the kernels over blocks: three products of tf32
            make one of "tf32x3".
        cache, memory: bytes per second from the L2 cache to the multiprocessors, and of a copy in
            memory, read and written.
        operands: what narrow tiles cost.
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
    operands: Operands
    share: dict[Numbers, float]


# First versions of such kernels reach 60 %; splitting operands in registers takes half of the time.
_EXPECTED: dict[Numbers, float] = {"16-bit": 0.6, "tf32": 0.6, "tf32x3": 0.3}
# `wgmma` of 64 rows a warp group; `mma.sync` of four warps of 32 rows, at 1024 and at 512
# multiply-adds a clock; shared memory gives 128 bytes a clock.
_WGMMA, _MMA, _MMA_SLOW = Operands(16, 0.25, 0.5), Operands(32, 1, 2), Operands(32, 1, 4)


def _tensor(low: float, tf32: float) -> dict[Numbers, float]:
    return {"16-bit": low, "tf32": tf32, "tf32x3": tf32 / 3}


RATES: dict[Family, Rates] = {
    "80": Rates(
        name="A100 80 GB",
        measured=False,
        source="cache and memory measured (gpu-benches, a100_80.txt); products 80 % of the data "
        "sheet, as on the H200",
        multiprocessors=108,
        products={"16-bit": 250e12, "tf32": 125e12, "tf32x3": 15e12},
        tensor=_tensor(250e12, 125e12),
        cache=5.4e12,
        memory=1.7e12,
        operands=_MMA,
        share=_EXPECTED,
    ),
    "86": Rates(
        name="L40",
        measured=False,
        source="cache and memory measured (gpu-benches, l40.txt); products 80 % of the data sheet",
        multiprocessors=142,
        products={"16-bit": 145e12, "tf32": 72e12, "tf32x3": 70e12},
        tensor=_tensor(145e12, 72e12),
        cache=5.2e12,
        memory=0.78e12,
        operands=_MMA_SLOW,
        share=_EXPECTED,
    ),
    "90": Rates(
        name="H200",
        measured=False,
        source="16-bit products and memory measured (torch 2.11), cache measured (gpu-benches, "
        "h200.txt); tf32 half of the 16-bit products, float32 78 % of the data sheet: assumed",
        multiprocessors=132,
        products={"16-bit": 790e12, "tf32": 395e12, "tf32x3": 52e12},
        tensor=_tensor(790e12, 395e12),
        cache=9.7e12,
        memory=4.3e12,
        operands=_WGMMA,
        share=_EXPECTED,
    ),
    "100": Rates(
        name="B200",
        measured=False,
        source="products 80 %, memory 90 % of the data sheet; a multiprocessor's cache as on the "
        "H200: all assumed",
        multiprocessors=148,
        products={"16-bit": 1800e12, "tf32": 900e12, "tf32x3": 62e12},
        tensor=_tensor(1800e12, 900e12),
        cache=10.9e12,
        memory=7.2e12,
        operands=_WGMMA,
        share=_EXPECTED,
    ),
}


def rates_of(chip: Chip) -> Rates:
    """The row of the chip's family, for as many multiprocessors as the chip has."""
    row = RATES[family_of(chip.capability)]
    scale = chip.multiprocessors / row.multiprocessors
    return row._replace(
        products={numbers: scale * rate for numbers, rate in row.products.items()},
        tensor={numbers: scale * rate for numbers, rate in row.tensor.items()},
        cache=scale * row.cache,
    )
