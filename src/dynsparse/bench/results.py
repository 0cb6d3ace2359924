"""What a run of benchmarks leaves behind: one JSON file, and what follows from its cells.

```
{"format": "dynsparse-bench", "version": 1, "machine": {...}, "note": .., "spec": "benchmarks.yml",
 "benchmarks": {NAME: {"about": .., "measure": .., "reference": .., "measured": DATE,
    "cells": [{"layer": "784x300", "features": [784, 300], "batch": .., "density": .., "block": ..,
       "threads": .., "dtype": .., "kernel": KERNEL, "times": {WHO: SPREAD},
       "ratios": {WHO: SPREAD}, "rounds": .., "foreign": .., "disturbed": ..}],
    "refused": [{"cell": .., "why": ..}]}},
 "popsparse_law": {"c": .., "a": .., "b": .., "e": ..},
 "laws": {WHO: {"threads": .., "c": .., "a": .., "b": .., "e": .., "factor": ..,
    "worst": .., "cells": ..}},
 "break_even": {THREADS: [{"n": .., "batch": .., "block": .., "density": .., ...}]}}
```

KERNEL names what computed the passes, as `SparseLinear.kernel` does: "sparse", or forward and
backward where they differ. SPREAD is {"median": .., "low": .., "high": ..}, low and high the
quartiles. Times are seconds per call; ratios are WHO's time over the reference's.

A training's cell has "training" in place of times and ratios. A model's are those of its blocks;
beside them it has {"model": NAME, "blocks": .., "depth": how many were timed, "whole": {"times":
.., "ratios": ..}, "parts": {WHO: {PART: seconds}}}; one of memory has {"memory": {WHO: {"peak":
bytes, "state": .., "blocks": ..}}} in place of all figures. A command's benchmark has "figures" or
"output" in place of cells.

In figures entered by hand a spread may be a median alone, "times" empty, DATE words, and the
machine's "python" null. "note", which is optional, is a remark for pages that show them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dynsparse._core.checks import shortened
from dynsparse._core.files.atomic_write import atomic_write_text
from dynsparse._core.files.limits import LimitError, parse_json
from dynsparse.bench.cells import Cell
from dynsparse.bench.host import describe_host


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
    """Up to which density a layer is faster than dense, and how the densest cell does.

    `density` is None where even the sparsest cell is slower. `crosses`: whether a crossing was
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


Results = dict[str, Any]

_FORMAT, _VERSION = "dynsparse-bench", 1

# The law has no term for the batch and none for the price of a call; and past these densities the
# layer computes densely.
_LAW_FEATURES, _LAW_BATCH, _LAW_DENSITY = 256, 128, 0.3
_NEEDED = ("machine", "spec", "benchmarks", "laws", "popsparse_law", "break_even")


def empty_results(spec: str) -> Results:
    """Of this machine, nothing measured yet."""
    return {
        "format": _FORMAT,
        "version": _VERSION,
        "machine": describe_host(),
        "spec": spec,
        "benchmarks": {},
        "laws": {},
        "popsparse_law": POPSPARSE,
        "break_even": {},
    }


def save_results(results: Results, file: Path) -> None:
    """Write the JSON file, whole or not at all; figures are rounded to what means something."""
    atomic_write_text(file, json.dumps(_rounded(results), indent=1, allow_nan=False) + "\n")


def load_results(file: Path) -> Results:
    """Read what `save_results` wrote.

    Raises:
        ValueError: another format or version, or parts are missing.
        OSError: the file cannot be read.
    """
    try:
        data = parse_json(file.read_bytes())
    except LimitError as error:
        raise ValueError(f"{file}: {error}") from None
    except ValueError:
        raise ValueError(f"{file}: expected JSON written by dynsparse bench, got none") from None
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise ValueError(f"{file}: expected JSON written by dynsparse bench, got another")
    if data.get("version") != _VERSION:
        raise ValueError(
            f"{file}: expected version {_VERSION}, got {shortened(data.get('version'))}: measure "
            "anew"
        )
    missing = [key for key in _NEEDED if not isinstance(data.get(key), (dict, str))]
    if missing:
        raise ValueError(f"{file}: expected the entry {missing[0]!r}, got none: measure anew")
    return data


def merge_cells(
    before: dict[str, Any], measured: dict[str, Any], order: list[Cell]
) -> dict[str, Any]:
    """A benchmark's entry of `measured`, with the cells of `before` that it has not measured.

    Args:
        order: the cells of the benchmark as the file has them; others are left out.
    """
    if "cells" not in measured:
        return measured
    cells = {_key(cell): cell for cell in [*before.get("cells", ()), *measured["cells"]]}
    keys = [(one.layer, one.batch, one.density, one.block, one.threads, one.dtype) for one in order]
    return {**measured, "cells": [cells[key] for key in keys if key in cells]}


def _key(cell: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(cell[name] for name in ("layer", "batch", "density", "block", "threads", "dtype"))


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return value


def points(results: Results, contender: str, threads: int) -> Iterator[Point]:
    """The speed-up over `contender` of every float32 layer's training step in the results.

    A cell that several benchmarks measured counts once, as measured last.
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


def summarise(results: Results) -> None:
    """Fit the laws and find the break-even densities of all cells; they become part of results.

    Laws are those of the largest number of threads that was measured, over layers of 256 features
    or more, batches of 128 or more and densities up to 0.3.
    """
    steps = [b for b in results["benchmarks"].values() if b.get("measure") == "step"]
    threads = sorted({cell["threads"] for benchmark in steps for cell in benchmark["cells"]})
    results["laws"], results["break_even"] = {}, {}
    for contender in ("masked", "dense"):
        cells = points(results, contender, threads[-1]) if threads else ()
        law = fit([point for point in cells if _is_in_law(point)])
        if law is not None:
            results["laws"][contender] = {"threads": threads[-1], **asdict(law)}
    for count in threads:
        crossings = break_even(list(points(results, "dense", count)))
        results["break_even"][str(count)] = [asdict(crossing) for crossing in crossings]
