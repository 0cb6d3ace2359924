"""`dynsparse matmul --method dynamic`: the pattern may change at run time."""

from __future__ import annotations

from typing import Any

from dynsparse.cli.matmul.figures import median, show, summarise
from dynsparse.cli.matmul.pages import write
from dynsparse.cli.matmul.request import Request
from popsparse.estimates import UpdateEstimate
from popsparse.layer import Layer
from popsparse.machine.dtypes import OutOfMemoryError
from popsparse.measure import plan_figures, sparse_figures
from popsparse.planning.params import data_type
from popsparse.planning.plan import Plan
from popsparse.planning.report import plan_report, plan_text
from popsparse.planning.search import plan as make_plan


def run(request: Request) -> None:
    """Plan, build the program, and run it on one pattern a seed."""
    plan = _plan(request)
    if request.plan_only and request.as_json:
        estimated = {name: cost.cycles for name, cost in plan.costs.items()}
        shown = {"estimated_cycles": estimated, "report": plan_report(plan)}
        show({"plan": plan_figures(plan), **shown}, request)
    elif request.plan_only or request.report_plan:
        print(plan_text(plan))
    if request.plan_only:
        write(request, lambda: _plan_page(request, plan))
        return
    layer = _layer(request, plan)
    runs: list[dict[str, Any]] = []
    for seed in range(request.seed, request.seed + request.seeds):
        found = sparse_figures(
            layer, request.draw(seed), request.names, seed=seed, ignore_data=request.ignore_data
        )
        runs.append({"seed": seed, **found})
    figures = summarise(request, plan_figures(plan), runs)
    if request.update is not None:
        figures["update"] = vars(_update(request, plan, runs[median(runs)]["seed"]))
    show(figures, request)
    write(request, lambda: _page(request, layer, figures, runs[median(runs)]["seed"]))


def _plan(request: Request) -> Plan:
    names = ["forward", "grad_input", *(["grad_weight"] if "grad_weight" in request.names else [])]
    asked = request.json_object("options")
    for name in ("do_grad_a_pass", "do_grad_w_pass"):
        if name in asked:
            raise ValueError(f"--options: {name} follows from --passes: leave it out")
    settings = {
        "available_memory_proportion": request.available_memory_proportion,
        **({} if request.partials_type is None else {"partials_type": request.partials_type}),
        "meta_info_bucket_oversize_proportion": request.oversize,
        "plan_constraints": request.json_object("plan_constraints"),
        **asked,
    }
    sizes = (*request.shape, request.batch, request.density, request.block_size)
    try:
        plan = make_plan(*sizes, request.dtype, request.machine, passes=names, options=settings)
    except TypeError as error:  # A value of --options or --plan-constraints of the wrong kind.
        raise ValueError(str(error)) from error
    _check_carried_out(request, plan, settings)
    if plan.use_dense:
        raise ValueError("use_dense is a plan of dense weights: use --method dense")
    return plan


def _check_carried_out(request: Request, plan: Plan, settings: dict[str, Any]) -> None:
    """Raise ValueError for an option that the product cannot follow."""
    wanted, carried = settings.get("partials_type"), plan.options.partials_type
    if wanted is not None and data_type(wanted) is not carried:
        what = "elements" if request.block_size == 1 else str(plan.dtype)
        raise ValueError(
            f"--partials-type: dynamic products of {what} add in {carried}, got {wanted}: leave it "
            "out"
        )
    if settings.get("shared_buckets") is False and request.block_size > 1:
        raise ValueError(
            "--options: shared_buckets is for elements, got blocks, which always share them: leave "
            "it out"
        )


def _update(request: Request, plan: Plan, seed: int) -> UpdateEstimate:
    layer = _layer(request, plan, update=request.update, numerics=False)
    return UpdateEstimate.of(layer, request.draw(seed))


def _layer(
    request: Request, plan: Plan, *, update: str | None = None, numerics: bool = True
) -> Layer:
    try:
        return Layer(
            plan,
            passes=request.names,
            update=None if update is None else {"pooling": update},
            numerics=numerics and not request.ignore_data,
            check_memory=not request.ignore_memory,
        )
    except OutOfMemoryError as error:
        raise ValueError(
            f"{error}; use a smaller --batch, a lower --available-memory-proportion or more "
            "--tiles, or see the figures all the same with --ignore-memory"
        ) from error


def _page(request: Request, layer: Layer, figures: dict[str, Any], seed: int) -> dict[str, Any]:
    from popsparse.report import layer_page

    pattern = request.draw(seed)
    more = {"max_relative_error": figures["max_relative_error"], "seed": seed}
    if request.seeds > 1:
        # The layer holds the last one.
        sparse_figures(layer, pattern, request.names, ignore_data=True)
        more["patterns"] = f"{request.seeds}; this page is about the one of median cycles"
        more |= {f"{name} cycles, spread": s for name, s in figures["spread"].items()}
    return layer_page(layer, pattern=pattern, summary=more)


def _plan_page(request: Request, plan: Plan) -> dict[str, Any]:
    from popsparse.report.layer import plan_summary

    summary = plan_summary(plan) | {
        "density": request.density,
        "estimated_cycles": {name: cost.cycles for name, cost in plan.costs.items()},
    }
    sizes = f"{summary['rows']:,} × {summary['cols']:,} by {summary['batch']:,}"
    title = f"Plan of a sparse product {sizes} on {plan.target.name}"
    return {"title": title, "summary": summary, "plan": plan_report(plan)}
