"""Products by their method: planned, run, shown and reported."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from dynsparse.cli.matmul.request import Request
from popsparse.estimates import UpdateEstimate
from popsparse.layer import Layer
from popsparse.machine.dtypes import OutOfMemoryError
from popsparse.measure import (
    Run,
    dense_plans,
    plan_figures,
    run_figures,
    run_plans,
    sparse_figures,
    static_plans,
)
from popsparse.planning.dense import DensePlan
from popsparse.planning.params import data_type
from popsparse.planning.plan import Plan
from popsparse.planning.search import plan as make_plan
from popsparse.planning.static_layout import StaticPlan
from popsparse.plans import plan_report, plan_text


def median(runs: list[dict[str, Any]]) -> int:
    """Which of the runs has the median of cycles over all its passes."""
    order = sorted(range(len(runs)), key=lambda i: sum(runs[i]["cycles"].values()))
    return order[(len(runs) - 1) // 2]


def summarise(request: Request, plan: dict[str, Any], runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of the median run, with its plan's, the largest error and the spread of all."""
    middle = runs[median(runs)]
    figures = {"plan": plan, **{key: value for key, value in middle.items() if key != "seed"}}
    if not request.ignore_data:
        figures["max_relative_error"] = max(run["max_relative_error"] for run in runs)
    if len(runs) > 1:
        figures["seeds"] = runs
        figures["spread"] = {name: _spread(runs, name) for name in request.names}
    return figures


def _spread(runs: list[dict[str, Any]], name: str) -> dict[str, float]:
    cycles = [run["cycles"][name] for run in runs]
    return {"min": min(cycles), "mean": sum(cycles) / len(cycles), "max": max(cycles)}


def show(figures: dict[str, Any], request: Request) -> None:
    """Print figures, as JSON or for a person."""
    if request.json:
        print(json.dumps(figures))
        return
    target, plan = request.machine, figures["plan"]
    print(f"plan: x={plan['x']} y={plan['y']} z={plan['z']}, {plan['method']}")
    for name, cycles in figures.get("cycles", figures.get("estimated_cycles", {})).items():
        line = f"{name}: {cycles:,.0f} cycles, {target.seconds(cycles) * 1e6:,.1f} us"
        if "tflops" in figures:
            line += f", {figures['tflops'][name]:.2f} TFLOP/s"
        if spread := figures.get("spread"):
            line += f" ({spread[name]['min']:,.0f} to {spread[name]['max']:,.0f} cycles)"
        print(line)
    if "max_tile_bytes" in figures:
        print(f"fullest tile: {figures['max_tile_bytes']:,} of {target.bytes_per_tile:,} bytes")
        print(
            f"spilled blocks: {figures['spilled']:,}, "
            f"propagation steps: {figures['propagation_steps']:,}"
        )
    if update := figures.get("update"):
        print(
            f"update: {update['cycles']:,.0f} cycles, {update['seconds'] * 1e6:,.1f} us, "
            f"{update['to_host_bytes']:,} bytes to the host and {update['from_host_bytes']:,} back"
        )
        for name, cycles in update["parts"].items():
            print(f"  {name}: {cycles:,.0f} cycles")
    if figures.get("max_relative_error") is not None:
        print(f"largest relative error: {figures['max_relative_error']:.2e}")


def write(request: Request, contents: Callable[[], dict[str, Any]]) -> None:
    """Write what was asked for of a page's `contents`, which are made if anything was."""
    if request.report is None and request.profile is None:
        return
    from popsparse.report import save_profile, write_report

    page = contents()
    if request.report is not None:
        write_report(request.report, **page)
    if request.profile is not None:
        save_profile(request.profile, **page)


def run_dynamic(request: Request) -> None:
    """Plan, build the program, and run it on one pattern a seed."""
    plan = _dynamic_plan(request)
    if request.plan_only and request.json:
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
        figures_of_run = sparse_figures(
            layer, request.draw(seed), request.names, seed=seed, ignore_data=request.ignore_data
        )
        runs.append({"seed": seed, **figures_of_run})
    figures = summarise(request, plan_figures(plan), runs)
    if request.update is not None:
        figures["update"] = vars(_update(request, plan, runs[median(runs)]["seed"]))
    show(figures, request)
    write(request, lambda: _dynamic_page(request, layer, figures, runs[median(runs)]["seed"]))


def _dynamic_plan(request: Request) -> Plan:
    names = ["forward", "grad_input", *(["grad_weight"] if "grad_weight" in request.names else [])]
    asked = request.options
    for name in ("do_grad_a_pass", "do_grad_w_pass"):
        if name in asked:
            raise ValueError(f"--options: {name} follows from --passes: leave it out")
    settings = {
        "available_memory_proportion": request.available_memory_proportion,
        **({} if request.partials_type is None else {"partials_type": request.partials_type}),
        "meta_info_bucket_oversize_proportion": request.oversize,
        "plan_constraints": request.plan_constraints,
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
    requested, actual = settings.get("partials_type"), plan.options.partials_type
    if requested is not None and data_type(requested) is not actual:
        what = "elements" if request.block_size == 1 else str(plan.dtype)
        raise ValueError(
            f"--partials-type: dynamic products of {what} add in {actual}, got {requested}: "
            "leave it out"
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


def _dynamic_page(
    request: Request, layer: Layer, figures: dict[str, Any], seed: int
) -> dict[str, Any]:
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
    from popsparse.report.plan import plan_summary

    summary = plan_summary(plan) | {
        "density": request.density,
        "estimated_cycles": {name: cost.cycles for name, cost in plan.costs.items()},
    }
    sizes = f"{summary['rows']:,} × {summary['cols']:,} by {summary['batch']:,}"
    title = f"Plan of a sparse product {sizes} on {plan.target.name}"
    return {"title": title, "summary": summary, "plan": plan_report(plan)}


def run_static(request: Request) -> None:
    """Plan each pass for one pattern a seed, run it, and say what it took."""
    partials = request.partials_type
    if partials is not None and data_type(partials) is not data_type(request.dtype):
        raise ValueError(
            f"--partials-type: static products add in the type of the data, {request.dtype}, "
            f"got {partials}"
        )
    plans = _static_plans(request, request.seed)
    if request.plan_only:
        estimated = {name: plan.cycles for name, plan in plans.items()}
        write(request, lambda: _static_page(request, plans, {"estimated_cycles": estimated}))
        if request.json:
            report = {name: plan_report(plan) for name, plan in plans.items()}
            chosen = plan_figures(next(iter(plans.values())))
            show({"plan": chosen, "estimated_cycles": estimated, "report": report}, request)
    runs: list[dict[str, Any]] = []
    plans_of, ran = [], []
    for seed in range(request.seed, request.seed + request.seeds * (not request.plan_only)):
        plans_of.append(plans if seed == request.seed else _static_plans(request, seed))
        ran.append(run_plans(plans_of[-1], seed=seed, ignore_data=request.ignore_data))
        runs.append({"seed": seed, **run_figures(plans_of[-1], ran[-1])})
    if request.report_plan or (request.plan_only and not request.json):
        print("\n\n".join(plan_text(plan) for plan in plans.values()))
    if request.plan_only:
        return
    middle = median(runs)
    chosen = plan_figures(next(iter(plans_of[middle].values())))
    figures = {k: v for k, v in runs[middle].items() if k not in ("propagation_steps", "spilled")}
    write(request, lambda: _static_page(request, plans_of[middle], figures, ran[middle]))
    show(summarise(request, chosen, runs), request)


def _static_plans(request: Request, seed: int) -> dict[str, StaticPlan]:
    options = {"available_memory_proportion": request.available_memory_proportion}
    options |= request.options
    where = (request.batch, request.dtype, request.machine, request.names)
    try:
        return static_plans(request.draw(seed), *where, options)
    except TypeError as error:  # A value of --options of the wrong kind.
        raise ValueError(str(error)) from error


def _static_page(
    request: Request,
    plans: dict[str, StaticPlan],
    figures: dict[str, Any],
    ran: dict[str, Run] | None = None,
) -> dict[str, Any]:
    """The profile report of static plans: the plan, its estimate, the run, and the prediction."""
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


def run_dense_product(request: Request) -> None:
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
        chosen = plan_figures(next(iter(plans.values())))
        estimated = {name: plan.cycles for name, plan in plans.items()}
        figures: dict[str, Any] = {"plan": chosen, "estimated_cycles": estimated}
        runs: dict[str, Run] = {}
    else:
        try:
            runs = run_plans(plans, seed=request.seed, ignore_data=request.ignore_data)
        except OutOfMemoryError as error:
            raise ValueError(f"{error}; use a smaller --batch or more --tiles") from error
        chosen = plan_figures(next(iter(plans.values())))
        figures = {"plan": chosen, **run_figures(plans, runs)}
    show(figures, request)
    write(request, lambda: _dense_page(request, figures, plans, runs))


def _dense_page(
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
    reports = {name: plan.to_dict() for name, plan in plans.items()}
    profiles = {name: run.profile for name, run in runs.items()}
    return {"title": title, "summary": summary, "plan": reports, "profile": profiles or None}


METHODS: dict[str, Callable[[Request], None]] = {
    "dynamic": run_dynamic,
    "static": run_static,
    "dense": run_dense_product,
}
