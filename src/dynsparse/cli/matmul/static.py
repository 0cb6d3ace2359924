"""`dynsparse matmul --method static`: the pattern is known when the product is planned."""

from __future__ import annotations

from typing import Any

from dynsparse.cli.matmul.figures import median, show, summarise
from dynsparse.cli.matmul.pages import write
from dynsparse.cli.matmul.request import Request
from popsparse.measure import (
    plan_passes,
    run_passes,
    static_figures,
    static_plan_figures,
)
from popsparse.planning.params import data_type
from popsparse.static.layout import StaticPlan
from popsparse.static.model import plan_report, plan_text
from popsparse.timing import Run


def run(request: Request) -> None:
    """Plan each pass for one pattern a seed, run it, and say what it took."""
    partials = request.partials_type
    if partials is not None and data_type(partials) is not data_type(request.dtype):
        raise ValueError(
            f"--partials-type: static products add in the type of the data, {request.dtype}, "
            f"got {partials}"
        )
    plans = _plans(request, request.seed)
    if request.plan_only:
        estimated = {name: plan.cycles for name, plan in plans.items()}
        write(request, lambda: _page(request, plans, {"estimated_cycles": estimated}))
        if request.as_json:
            report = {name: plan_report(plan) for name, plan in plans.items()}
            chosen = static_plan_figures(next(iter(plans.values())))
            show({"plan": chosen, "estimated_cycles": estimated, "report": report}, request)
    runs: list[dict[str, Any]] = []
    plans_of, ran = [], []
    for seed in range(request.seed, request.seed + request.seeds * (not request.plan_only)):
        plans_of.append(plans if seed == request.seed else _plans(request, seed))
        ran.append(run_passes(plans_of[-1], seed=seed, ignore_data=request.ignore_data))
        runs.append({"seed": seed, **static_figures(plans_of[-1], ran[-1])})
    if request.report_plan or (request.plan_only and not request.as_json):
        print("\n\n".join(plan_text(plan) for plan in plans.values()))
    if request.plan_only:
        return
    middle = median(runs)
    chosen = static_plan_figures(next(iter(plans_of[middle].values())))
    figures = {k: v for k, v in runs[middle].items() if k not in ("propagation_steps", "spilled")}
    write(request, lambda: _page(request, plans_of[middle], figures, ran[middle]))
    show(summarise(request, chosen, runs), request)


def _plans(request: Request, seed: int) -> dict[str, StaticPlan]:
    options = {"available_memory_proportion": request.available_memory_proportion}
    options |= request.json_object("options")
    where = (request.batch, request.dtype, request.machine, request.names)
    try:
        return plan_passes(request.draw(seed), *where, options)
    except TypeError as error:  # A value of --options of the wrong kind.
        raise ValueError(str(error)) from error


def _page(
    request: Request,
    plans: dict[str, StaticPlan],
    figures: dict[str, Any],
    ran: dict[str, Run] | None = None,
) -> dict[str, Any]:
    """The profile report of static plans: the plan, its estimate, the run and what was predicted of
    it."""
    names = ("rows", "cols", "batch", "density", "block_size", "dtype")
    summary = {name: getattr(request, name) for name in names}
    summary |= {"target": request.machine.name, "tiles": request.machine.tiles} | figures
    reports = {name: plan_report(plan) for name, plan in plans.items()}
    return {
        "title": "Static product {rows:,} × {cols:,} by {batch:,} on {target}".format(**summary),
        "summary": summary,
        "plan": reports,
        "profile": {name: run.profile for name, run in ran.items()} if ran else None,
        "predicted": {name: one["predicted"] for name, one in reports.items()},
    }
