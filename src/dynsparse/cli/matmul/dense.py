"""`dynsparse matmul --method dense`: the same product with all elements."""

from __future__ import annotations

from typing import Any

from dynsparse.cli.matmul.figures import show
from dynsparse.cli.matmul.request import Request
from dynsparse.popsparse.dense.planner import DensePlan
from dynsparse.popsparse.measure import dense_figures, dense_plans

__all__ = ["run"]


def run(request: Request) -> None:
    """Plan each pass, and say what the plans take."""
    request.refuse(
        "seeds", "weighted_area_begin", "ignore_data", "report_plan", "ignore_memory", "options",
        "plan_constraints", "oversize", "seed",
    )  # fmt: skip
    plans = dense_plans(
        *request.shape,
        request.batch,
        request.dtype,
        request.machine,
        request.names,
        partials=request.partials_type,
        available_memory_proportion=request.available_memory_proportion,
    )
    figures = dense_figures(plans)
    if request.plan_only:
        figures = {"plan": figures["plan"], "estimated_cycles": figures["cycles"]}
    show(figures, request)
    _write_page(request, figures, plans)


def _write_page(request: Request, figures: dict[str, Any], plans: dict[str, DensePlan]) -> None:
    if request.report is None:
        return
    from dynsparse.report.machine import write_report

    summary = {name: getattr(request, name) for name in ("rows", "cols", "batch", "dtype")}
    summary |= {"target": request.machine.name, "tiles": request.machine.tiles}
    keys = ("cycles", "estimated_cycles", "tflops", "max_tile_bytes")
    summary |= {key: figures[key] for key in keys if key in figures}
    title = "Dense product {rows:,} × {cols:,} by {batch:,} on {target}".format(**summary)
    found = {name: plan.to_dict() for name, plan in plans.items()}
    write_report(request.report, title=title, summary=summary, plan=found)
