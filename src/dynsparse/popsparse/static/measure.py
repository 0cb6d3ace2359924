"""What static products take, as plain figures: the counterpart of `measure` for known patterns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from dynsparse.pattern import SparsePattern
from dynsparse.popsparse.static.kernel import multiply
from dynsparse.popsparse.static.layout import StaticPlan
from dynsparse.popsparse.static.model import predict, tile_memory
from dynsparse.popsparse.static.params import MatmulParams
from dynsparse.popsparse.static.planner import make_plan

__all__ = ["plan_figures", "plan_passes", "static_figures"]


def plan_passes(
    pattern: SparsePattern,
    batch: int,
    dtype: Any,
    target: Any,
    passes: Iterable[str] = ("forward",),
    options: Any = None,
) -> dict[str, StaticPlan]:
    """A plan for each pass of a layer with a fixed pattern [out, in].

    forward is sparse [out, in] x dense [in, batch]; grad_input is dense [batch, out] x the sparse
    matrix. They are planned apart, each with its own copy of the values.

    Raises:
        ValueError: grad_weight, which has no static product; as `make_plan`.
    """
    out, in_ = pattern.shape
    found = {}
    for name in passes:
        if name == "forward":
            params = MatmulParams.create_for_sparse_dense(1, out, in_, batch)
        elif name == "grad_input":
            params = MatmulParams.create_for_dense_sparse(1, batch, out, in_)
        else:
            raise ValueError(
                f"static products do forward and grad_input, got {name!r}: use the dynamic method"
            )
        found[name] = make_plan(target, dtype, params, pattern, options)
    return found


def plan_figures(plan: StaticPlan) -> dict[str, Any]:
    """The cut in the words of the dynamic plan: x tiles share a band's rows (of the band with most
    tiles in use), y column bands, z parts of the batch."""
    bands = [plan.pieces(part).band for part in range(plan.n_split)]
    return {
        "x": max(int(np.bincount(band, minlength=1).max()) for band in bands),
        "y": plan.num_bands,
        "z": plan.n_split,
        "method": "static",
        "tiles": plan.tiles_used,
    }


def static_figures(
    plans: dict[str, StaticPlan], *, seed: int = 0, ignore_data: bool = False
) -> dict[str, Any]:
    """The figures of some passes, with random values and operands.

    Cycles are the execution model's; numbers are computed with the machine's arithmetic.

    Args:
        plans: as `plan_passes` makes them.
        seed: of the values, uniform in [-1, 1).
        ignore_data: compute no numbers.

    Returns:
        "cycles", "tflops" by pass, "max_tile_bytes", "propagation_steps" and "spilled" (always 0),
        "max_relative_error" (largest difference from the float64 product over its largest element;
        None without numbers).

    Raises:
        ValueError: a plan that does not fit the tiles.
    """
    times = {}
    for name, plan in plans.items():
        memory = tile_memory(plan)
        if not memory.fits:
            raise ValueError(
                f"the static plan of {name} needs {memory.needed} bytes a tile, the target has "
                f"{memory.available}: use a smaller batch, a lower available_memory_proportion or "
                "more tiles"
            )
        times[name] = predict(plan)
    errors = [] if ignore_data else [_error(plan, seed) for plan in plans.values()]
    return {
        "cycles": {name: time.cycles for name, time in times.items()},
        "tflops": {name: time.tflops for name, time in times.items()},
        "max_tile_bytes": max(tile_memory(plan).needed for plan in plans.values()),
        "propagation_steps": 0,
        "spilled": 0,
        "max_relative_error": max(errors, default=None),
    }


def _error(plan: StaticPlan, seed: int) -> float:
    rng, pattern = np.random.default_rng(seed), plan.pattern
    kind = np.dtype(plan.dtype.name)
    block = pattern.block_size
    values = rng.uniform(-1, 1, (pattern.nnz, block, block)).astype(kind)
    operand = rng.uniform(-1, 1, (plan.params.k, plan.params.n)).astype(kind)
    weights = np.zeros((*pattern.grid, block, block))
    weights[pattern.rows.numpy(), pattern.cols.numpy()] = values
    wanted = weights.transpose(0, 2, 1, 3).reshape(pattern.shape) @ operand.astype(np.float64)
    off = np.abs(multiply(plan, values, operand) - wanted).max()
    return float(off / (np.abs(wanted).max() or 1.0))
