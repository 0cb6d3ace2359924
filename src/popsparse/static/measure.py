"""Static products run on the simulated machine, and what they took, as plain figures: the
counterpart of `measure` for known patterns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from dynsparse.pattern import SparsePattern
from popsparse.machine import Engine, Graph
from popsparse.machine import Sequence as Program
from popsparse.static.layout import StaticPlan
from popsparse.static.memory import tile_memory
from popsparse.static.params import MatmulParams
from popsparse.static.planner import make_plan
from popsparse.static.program import add_product as add_static_product
from popsparse.static.program import add_values, dense_operand
from popsparse.timing.run import Run, relative_error, run_figures


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


def run_passes(
    plans: dict[str, StaticPlan], *, seed: int = 0, ignore_data: bool = False
) -> dict[str, Run]:
    """Run each pass on the simulated machine, with random values and operands.

    Args:
        plans: as `plan_passes` makes them.
        seed: of the values, uniform in [-1, 1).
        ignore_data: compute no numbers.

    Raises:
        ValueError: a plan that does not fit the tiles, code included.
    """
    for name, plan in plans.items():
        memory = tile_memory(plan)
        if not memory.fits:
            raise ValueError(
                f"the static plan of {name} needs {memory.needed} bytes a tile, the target has "
                f"{memory.available}: use a smaller batch, a lower available_memory_proportion or "
                "more tiles"
            )
    return {name: _run(plan, seed, numerics=not ignore_data) for name, plan in plans.items()}


def static_figures(plans: dict[str, StaticPlan], runs: dict[str, Run]) -> dict[str, Any]:
    """The figures of what `run_passes` ran, as of `run_figures`; products are 2 x non-zeros x
    batch."""
    return run_figures(runs, {name: plan.products for name, plan in plans.items()})


def _run(plan: StaticPlan, seed: int, *, numerics: bool) -> Run:
    graph, program = Graph(plan.target), Program()
    values = add_values(graph, plan, "values")
    dense = dense_operand(graph, plan, "operand")
    graph.add_handle("result", add_static_product(graph, plan, values, dense, program, "product"))
    engine = Engine(graph, program, numerics=numerics)
    if not numerics:
        return Run(engine.run(), None)
    rng, pattern = np.random.default_rng(seed), plan.pattern
    kind = np.dtype(plan.dtype.name)
    block = pattern.block_size
    blocks = rng.uniform(-1, 1, (pattern.nnz, block, block)).astype(kind)
    operand = rng.uniform(-1, 1, (plan.params.k, plan.params.n)).astype(kind)
    engine.write(values, blocks[plan.order].reshape(-1))
    engine.write(dense, operand[None])
    profile = engine.run()
    weights = np.zeros((*pattern.grid, block, block))
    weights[pattern.rows.numpy(), pattern.cols.numpy()] = blocks
    wanted = weights.transpose(0, 2, 1, 3).reshape(pattern.shape) @ operand.astype(np.float64)
    return Run(profile, relative_error(engine.read("result")[0], wanted))
