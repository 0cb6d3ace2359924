"""What the measured cells say together: a power law, and where dense catches up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class Point(NamedTuple):
    """One measured cell: speed-up over dense of a layer of n x n features."""

    n: float
    batch: int
    density: float
    block: int
    speedup: float


@dataclass(frozen=True)
class Law:
    """speed-up = c * n^a * density^b * block^e.

    An exponent is None where all cells agree in that size, so that nothing can be said of it.
    `factor` is the residual spread: two thirds of the cells lie within it of the law, up or down.
    `worst` is the largest factor between a cell and the law. `cells` counts them.
    """

    c: float
    a: float | None
    b: float | None
    e: float | None
    factor: float
    worst: float
    cells: int

    def __call__(self, n: float, density: float, block: int) -> float:
        exponents = (self.a or 0.0, self.b or 0.0, self.e or 0.0)
        return self.c * math.prod(
            size**power for size, power in zip((n, density, block), exponents, strict=True)
        )


POPSPARSE = {"c": 0.0013, "a": 0.59, "b": -0.54, "e": 0.50}
"""Li et al. 2023, "PopSparse: Accelerated block sparse matrix multiplication on IPU": speed-up over
dense products on an IPU, with m features for n."""


def fit(points: Sequence[Point]) -> Law | None:
    """The law of least squared logarithms; None for fewer cells than it has coefficients."""
    sizes = np.array([[p.n, p.density, p.block] for p in points], float).reshape(-1, 3)
    varies = [len(np.unique(column)) > 1 for column in sizes.T]
    if len(points) < 1 + sum(varies) or not points:
        return None
    logs = np.log(sizes[:, varies])
    matrix = np.column_stack([np.ones(len(points)), logs])
    target = np.log([p.speedup for p in points])
    found, *_ = np.linalg.lstsq(matrix, target, rcond=None)
    residuals = np.abs(target - matrix @ found)
    free = max(1, len(points) - len(found))
    powers = iter(found[1:].tolist())
    a, b, e = (next(powers) if there else None for there in varies)
    return Law(
        c=math.exp(found[0]),
        a=a,
        b=b,
        e=e,
        factor=math.exp(math.sqrt(float((residuals**2).sum()) / free)),
        worst=math.exp(float(residuals.max())),
        cells=len(points),
    )


@dataclass(frozen=True)
class BreakEven:
    """Up to which density a layer is faster than dense, and how the densest cell does.

    `density` is None where even the sparsest cell is slower. `crosses` says whether a crossing was
    seen; without one `density` is the largest that was measured.
    """

    n: float
    batch: int
    block: int
    density: float | None
    crosses: bool
    densest: float
    speedup_there: float


def break_even(points: Sequence[Point]) -> list[BreakEven]:
    """One per (n, batch, block), the crossing interpolated on logarithmic axes."""
    found = []
    for key in sorted({(p.n, p.batch, p.block) for p in points}, key=lambda k: (k[2], k[0], k[1])):
        cells = sorted(
            (p for p in points if (p.n, p.batch, p.block) == key), key=lambda p: p.density
        )
        crossing: float | None = cells[-1].density
        crosses = False
        for before, after in zip([None, *cells], cells, strict=False):
            if after.speedup >= 1:
                continue
            crosses = True
            crossing = None if before is None else _crossing(before, after)
            break
        last = cells[-1]
        found.append(BreakEven(*key, crossing, crosses, last.density, last.speedup))
    return found


def _crossing(before: Point, after: Point) -> float:
    """The density between two cells at which the speed-up is 1."""
    high, low = math.log(before.speedup), math.log(after.speedup)
    part = high / (high - low)
    return math.exp(
        math.log(before.density) + part * (math.log(after.density) - math.log(before.density))
    )
