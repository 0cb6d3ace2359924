"""The results of a run of benchmarks: one JSON file.

```
{"format": "dynsparse-bench", "version": 1, "machine": {...}, "spec": "benchmarks.yml",
 "benchmarks": {NAME: {"about": .., "measure": .., "reference": .., "measured": DATE,
    "cells": [{"layer": "784x300", "features": [784, 300], "batch": .., "density": .., "block": ..,
       "threads": .., "dtype": .., "kernel": KERNEL, "times": {WHO: SPREAD},
       "ratios": {WHO: SPREAD}, "rounds": .., "foreign": .., "disturbed": ..}],
    "refused": [{"cell": .., "why": ..}]}}}
```

KERNEL names what computed the passes, as `SparseLinear.kernel` does: "sparse", or forward and
backward where they differ. SPREAD is {"median": .., "low": .., "high": ..}, low and high the
quartiles. Times are seconds per call; ratios are WHO's time over the reference's.

A command's benchmark has "figures" or "output" in place of cells.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dynsparse._core.checks import shorten
from dynsparse._core.files.atomic_write import atomic_write_text
from dynsparse._core.files.limits import LimitError, parse_json
from dynsparse.bench.cells import Cell
from dynsparse.bench.host import describe_host

Results = dict[str, Any]

_FORMAT, _VERSION = "dynsparse-bench", 1

_NEEDED = ("machine", "spec", "benchmarks")
_SIZES = ("layer", "batch", "density", "block", "threads", "dtype")


def empty_results(spec: str) -> Results:
    """Results of this machine, without any benchmark yet."""
    return {
        "format": _FORMAT,
        "version": _VERSION,
        "machine": describe_host(),
        "spec": spec,
        "benchmarks": {},
    }


def save_results(results: Results, file: Path) -> None:
    """Write the JSON file, atomically; numbers are rounded to four digits."""
    atomic_write_text(file, json.dumps(_round_floats(results), indent=1, allow_nan=False) + "\n")


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
            f"{file}: expected version {_VERSION}, got {shorten(data.get('version'))}: measure "
            "again"
        )
    missing = [key for key in _NEEDED if not isinstance(data.get(key), (dict, str))]
    if missing:
        raise ValueError(f"{file}: expected the entry {missing[0]!r}, got none: measure again")
    return data


def merge_cells(
    before: dict[str, Any], measured: dict[str, Any], order: list[Cell]
) -> dict[str, Any]:
    """The entry `measured` of a benchmark, with those cells of `before` that it has not.

    Args:
        order: the cells of the benchmark as the file has them; others are left out.
    """
    if "cells" not in measured:
        return measured
    cells = {
        tuple(cell[size] for size in _SIZES): cell
        for cell in [*before.get("cells", ()), *measured["cells"]]
    }
    keys = [tuple(getattr(cell, size) for size in _SIZES) for cell in order]
    return {**measured, "cells": [cells[key] for key in keys if key in cells]}


def _round_floats(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: _round_floats(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_round_floats(item) for item in value]
    return value
