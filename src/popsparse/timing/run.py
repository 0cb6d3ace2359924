"""What one run of a pass gave: its profile, and how far its numbers are from the exact ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from popsparse.machine import Profile


class Run(NamedTuple):
    """One pass on the machine; `error` as of `relative_error`, None without numbers."""

    profile: Profile
    error: float | None


def relative_error(found: np.ndarray, wanted: np.ndarray) -> float:
    """The largest difference over the largest element of what is wanted, infinite for NaN."""
    if not wanted.size:
        return 0.0
    off = float(np.abs(found - wanted).max()) / (float(np.abs(wanted).max()) or 1.0)
    return off if np.isfinite(off) else float("inf")


def run_figures(runs: Mapping[str, Run], products: Mapping[str, float]) -> dict[str, Any]:
    """The figures of passes without buckets, in the words of dynamic products.

    Args:
        runs: by pass.
        products: 2 x multiplications of each.

    Returns:
        "cycles", "tflops" by pass (`products` over the pass's seconds at the target's clock),
        "max_tile_bytes", "propagation_steps" and "spilled" (always 0), "max_relative_error".
    """
    errors = [run.error for run in runs.values() if run.error is not None]
    return {
        "cycles": {name: run.profile.cycles for name, run in runs.items()},
        "tflops": {n: products[n] / run.profile.seconds / 1e12 for n, run in runs.items()},
        "max_tile_bytes": max(run.profile.memory.max_tile_bytes for run in runs.values()),
        "propagation_steps": 0,
        "spilled": 0,
        "max_relative_error": max(errors, default=None),
    }
