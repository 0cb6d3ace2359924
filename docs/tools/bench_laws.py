"""Speed-up laws and break-even densities, from the cells of a benchmark."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

# The law has no terms for the batch and the overhead of a call; above these densities the layer
# computes densely.
_LAW_FEATURES, _LAW_BATCH, _LAW_DENSITY = 256, 128, 0.3


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

    An exponent is None if all cells have the same size.
    `factor` is the residual spread: two thirds of the cells are within this factor of the law.
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
    """The least-squares law of the logarithms; None for fewer cells than coefficients."""
    sizes = np.array([[p.n, p.density, p.block] for p in points], float).reshape(-1, 3)
    varies = [len(np.unique(column)) > 1 for column in sizes.T]
    if len(points) < 1 + sum(varies) or not points:
        return None
    logs = np.log(sizes[:, varies])
    matrix = np.column_stack([np.ones(len(points)), logs])
    target = np.log([p.speedup for p in points])
    coefficients, *_ = np.linalg.lstsq(matrix, target, rcond=None)
    residuals = np.abs(target - matrix @ coefficients)
    free = max(1, len(points) - len(coefficients))
    powers = iter(coefficients[1:].tolist())
    a, b, e = (next(powers) if is_varied else None for is_varied in varies)
    return Law(
        c=math.exp(coefficients[0]),
        a=a,
        b=b,
        e=e,
        factor=math.exp(math.sqrt(float((residuals**2).sum()) / free)),
        worst=math.exp(float(residuals.max())),
        cells=len(points),
    )


@dataclass(frozen=True)
class BreakEven:
    """The density up to which a layer is faster than dense, and the speed-up of the densest cell.

    `density` is None if even the sparsest cell is slower. `crosses`: whether a crossing was
    measured; without one `density` is the largest measured.
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
    crossings = []
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
        crossings.append(BreakEven(*key, crossing, crosses, last.density, last.speedup))
    return crossings


def _crossing(before: Point, after: Point) -> float:
    """The density between two cells at which the speed-up is 1."""
    high, low = math.log(before.speedup), math.log(after.speedup)
    part = high / (high - low)
    return math.exp(
        math.log(before.density) + part * (math.log(after.density) - math.log(before.density))
    )


def points(results: dict[str, Any], contender: str, threads: int) -> Iterator[Point]:
    """The speed-up over `contender` of every float32 layer's training step in the results.

    A cell that several benchmarks measured counts once, with the last measurement.
    """
    by_sizes: dict[tuple[Any, ...], Point] = {}
    for benchmark in results["benchmarks"].values():
        if benchmark.get("measure") != "step":
            continue
        for cell in benchmark["cells"]:
            if cell["threads"] != threads or cell["dtype"] != "float32":
                continue
            if ratio := cell["ratios"].get(contender):
                in_features, out_features = cell["features"]
                n = math.sqrt(in_features * out_features)
                key = (in_features, out_features, cell["batch"], cell["density"], cell["block"])
                by_sizes[key] = Point(n, *key[2:], ratio["median"])
    yield from by_sizes.values()


def _is_in_law(point: Point) -> bool:
    large = point.n >= _LAW_FEATURES and point.batch >= _LAW_BATCH
    return large and point.density <= _LAW_DENSITY


def most_threads(results: dict[str, Any]) -> int:
    """The largest number of threads of a training step in the results; 0 if there is none."""
    steps = [b for b in results["benchmarks"].values() if b.get("measure") == "step"]
    return max((cell["threads"] for step in steps for cell in step["cells"]), default=0)


def fit_laws(results: dict[str, Any]) -> dict[str, Law]:
    """Contender -> the law over it.

    Laws use the largest number of threads measured, layers of 256 features or more, batches of 128
    or more and densities up to 0.3.
    """
    laws = {}
    for contender in ("masked", "dense"):
        cells = points(results, contender, most_threads(results))
        law = fit([point for point in cells if _is_in_law(point)])
        if law is not None:
            laws[contender] = law
    return laws
