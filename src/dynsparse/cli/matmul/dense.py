"""`dynsparse matmul --method dense`: the same product with all elements."""

from __future__ import annotations

from typing import Any

from dynsparse.cli.matmul.figures import show
from dynsparse.cli.matmul.pages import write
from dynsparse.cli.matmul.request import Request
from popsparse.machine.dtypes import OutOfMemoryError
from popsparse.measure import dense_figures, dense_plan_figures, dense_plans, run_dense
from popsparse.planning.dense import DensePlan
from popsparse.timing import Run


def run(request: Request) -> None:
    """Plan each pass, run it, and say what it took."""
    plans = dense_plans(
        *request.shape,
        request.batch,
        request.dtype,
        request.machine,
        request.names,
        partials=request.partials_type,
        available_memory_proportion=request.available_memory_proportion,
    )
    if request.plan_only:
        chosen = dense_plan_figures(next(iter(plans.values())))
        estimated = {name: plan.cycles for name, plan in plans.items()}
        figures: dict[str, Any] = {"plan": chosen, "estimated_cycles": estimated}
        runs: dict[str, Run] = {}
    else:
        try:
            runs = run_dense(plans, seed=request.seed, ignore_data=request.ignore_data)
        except OutOfMemoryError as error:
            raise ValueError(f"{error}; use a smaller --batch or more --tiles") from error
        figures = dense_figures(plans, runs)
    show(figures, request)
    write(request, lambda: _page(request, figures, plans, runs))


def _page(
    request: Request,
    figures: dict[str, Any],
    plans: dict[str, DensePlan],
    runs: dict[str, Run],
) -> dict[str, Any]:
    summary = {name: getattr(request, name) for name in ("rows", "cols", "batch", "dtype")}
    summary |= {"target": request.machine.name, "tiles": request.machine.tiles}
    keys = ("cycles", "estimated_cycles", "tflops", "max_tile_bytes", "max_relative_error")
    summary |= {key: figures[key] for key in keys if key in figures}
    title = "Dense product {rows:,} × {cols:,} by {batch:,} on {target}".format(**summary)
    found = {name: plan.to_dict() for name, plan in plans.items()}
    profiles = {name: run.profile for name, run in runs.items()}
    return {"title": title, "summary": summary, "plan": found, "profile": profiles or None}
