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

Of figures that somebody noted down by hand a spread may be a median alone, "times" empty, DATE
words, and the machine's "python" null. "note", which may be missing, is what else a page says of
them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dynsparse.bench.cells import Cell
from dynsparse.bench.host import describe_host
from dynsparse.bench.law import POPSPARSE, Point, break_even, fit
from dynsparse.files.json_text import parse_json
from dynsparse.files.limits import LimitError
from dynsparse.files.shorten import shortened
from dynsparse.files.whole import write_text_whole

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
    write_text_whole(file, json.dumps(_rounded(results), indent=1, allow_nan=False) + "\n")


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


def merged(before: dict[str, Any], found: dict[str, Any], order: list[Cell]) -> dict[str, Any]:
    """A benchmark's entry of `found`, with the cells of `before` that it has not measured.

    Args:
        order: the cells of the benchmark as the file has them; others are left out.
    """
    if "cells" not in found:
        return found
    cells = {_key(cell): cell for cell in [*before.get("cells", ()), *found["cells"]]}
    keys = [(one.layer, one.batch, one.density, one.block, one.threads, one.dtype) for one in order]
    return {**found, "cells": [cells[key] for key in keys if key in cells]}


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
    found: dict[tuple[Any, ...], Point] = {}
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
                found[key] = Point(n, *key[2:], ratio["median"])
    yield from found.values()


def _is_lawful(point: Point) -> bool:
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
        law = fit([point for point in cells if _is_lawful(point)])
        if law is not None:
            results["laws"][contender] = {"threads": threads[-1], **asdict(law)}
    for count in threads:
        found = break_even(list(points(results, "dense", count)))
        results["break_even"][str(count)] = [asdict(one) for one in found]
