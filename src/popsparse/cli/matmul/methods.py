"""The methods of `dynsparse matmul`: plan, run, show and report."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from popsparse.cli.matmul.request import Request
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
from popsparse.planning.options import translate_names
from popsparse.planning.params import data_type
from popsparse.planning.plan import Plan
from popsparse.planning.search import plan as make_plan
from popsparse.plans import plan_report, plan_text


def median_index(runs: list[dict[str, Any]]) -> int:
    """The index of the run with the median total cycles."""
    order = sorted(range(len(runs)), key=lambda i: sum(runs[i]["cycles"].values()))
    return order[(len(runs) - 1) // 2]


def summarise(request: Request, plan: dict[str, Any], runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of the median run and its plan, the largest error and the spread of all runs."""
    middle = runs[median_index(runs)]
    figures = {"plan": plan, **{key: value for key, value in middle.items() if key != "seed"}}
    if not request.ignore_data:
        figures["max_relative_error"] = max(run["max_relative_error"] for run in runs)
    if request.check is not None:
        figures["rounding"] = float(np.finfo(request.dtype).eps) / 2
    if len(runs) > 1:
        figures["seeds"] = runs
        figures["spread"] = {name: _spread(runs, name) for name in request.names}
    return figures


def _spread(runs: list[dict[str, Any]], name: str) -> dict[str, float]:
    cycles = [run["cycles"][name] for run in runs]
    return {"min": min(cycles), "mean": sum(cycles) / len(cycles), "max": max(cycles)}


def print_figures(figures: dict[str, Any], request: Request) -> None:
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
        line = f"largest relative error: {figures['max_relative_error']:.2e}"
        if "rounding" in figures:
            line += f"; {request.dtype} rounds a number by up to {figures['rounding']:.2e} of it"
        print(line)


def write_files(request: Request, contents: Callable[[], dict[str, Any]]) -> None:
    """Write the requested files from a page's `contents`, which are only made if needed."""
    if request.report is None and request.profile is None:
        return
    from popsparse.report import save_profile, write_report

    page = contents()
    if request.report is not None:
        write_report(request.report, **page)
    if request.profile is not None:
        save_profile(request.profile, **page)


def print_plan(request: Request, plans: Plan | dict[str, Any]) -> None:
    """Print the plan before anything runs."""
    each = list(plans.values()) if isinstance(plans, dict) else [plans]
    if not request.json:
        print("\n\n".join(plan_text(plan) for plan in each))
    elif request.plan_only:
        figures = {"plan": plan_figures(each[0]), "estimated_cycles": _estimate(plans)}
        print_figures(figures | {"report": _reports(plans)}, request)


def _estimate(plans: Plan | dict[str, Any]) -> dict[str, float]:
    costs = plans if isinstance(plans, dict) else plans.costs
    return {name: cost.cycles for name, cost in costs.items()}


def _reports(plans: Plan | dict[str, Any]) -> dict[str, Any]:
    if isinstance(plans, dict):
        return {name: plan_report(plan) for name, plan in plans.items()}
    return plan_report(plans)


def run_dynamic(request: Request) -> None:
    """Plan, build the program, and run it on one pattern per seed."""
    plan = _dynamic_plan(request)
    if request.plan_only or request.report_plan:
        print_plan(request, plan)
    if request.plan_only:
        write_files(request, lambda: _plan_page(request, plan))
        return
    layer = _layer(request, plan)
    runs: list[dict[str, Any]] = []
    for seed in range(request.seed, request.seed + request.seeds):
        figures_of_run = sparse_figures(
            layer,
            request.draw(seed),
            request.names,
            seed=seed,
            ignore_data=request.ignore_data,
            normal=request.check is not None,
        )
        runs.append({"seed": seed, **figures_of_run})
    figures = summarise(request, plan_figures(plan), runs)
    seed = runs[median_index(runs)]["seed"]
    if request.update is not None:
        updated = _layer(request, plan, update=request.update, numerics=False)
        figures["update"] = vars(UpdateEstimate.of(updated, request.draw(seed)))
    print_figures(figures, request)
    write_files(request, lambda: _dynamic_page(request, layer, figures, seed))


def _dynamic_plan(request: Request) -> Plan:
    names = ["forward", "grad_input", *(["grad_weight"] if "grad_weight" in request.names else [])]
    options = translate_names(request.options)
    for name in ("do_grad_a_pass", "do_grad_w_pass"):
        if name in options:
            raise ValueError(f"--options: {name} follows from --passes: leave it out")
    settings = {
        "available_memory_proportion": request.available_memory_proportion,
        **({} if request.partials_type is None else {"partials_type": request.partials_type}),
        "meta_info_bucket_oversize_proportion": request.oversize,
        "plan_constraints": request.plan_constraints,
        **options,
    }
    sizes = (*request.shape, request.batch, request.density, request.block_size)
    try:
        plan = make_plan(*sizes, request.dtype, request.machine, passes=names, options=settings)
    except TypeError as error:  # A value of --options or --plan-constraints of the wrong kind.
        raise ValueError(str(error)) from error
    _check_supported(request, plan, settings)
    if plan.use_dense:
        raise ValueError("use_dense is a plan of dense weights: use --method dense")
    return plan


def _check_supported(request: Request, plan: Plan, settings: dict[str, Any]) -> None:
    """Raise ValueError for an option that the product does not support."""
    requested, actual = settings.get("partials_type"), plan.options.partials_type
    if requested is not None and data_type(requested) is not actual:
        what = "elements" if request.block_size == 1 else str(plan.dtype)
        raise ValueError(
            f"--partials-type: dynamic products of {what} add in {actual}, got {requested}: "
            "leave it out"
        )
    if str(settings.get("shared_buckets")).lower() == "false" and request.block_size > 1:
        raise ValueError(
            "--options: shared_buckets is for elements, got blocks, which always share them: leave "
            "it out"
        )


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
            f"{error.__cause__}; use a smaller --batch, a lower --available-memory-proportion or "
            "more --tiles, or run anyway with --ignore-memory"
        ) from error


def _dynamic_page(
    request: Request, layer: Layer, figures: dict[str, Any], seed: int
) -> dict[str, Any]:
    from popsparse.report import layer_page

    pattern = request.draw(seed)
    more = {"max_relative_error": figures["max_relative_error"], "seed": seed}
    if request.seeds > 1:
        # The layer holds the last pattern: run the one of the page again.
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


def run_by_pass(request: Request) -> None:
    """Plan and run each pass of a static product, for one pattern per seed, or of a dense one."""
    plans = _plans_by_pass(request, request.seed)
    if request.plan_only or request.report_plan:
        print_plan(request, plans)
    if request.plan_only:
        estimated = {"estimated_cycles": _estimate(plans)}
        write_files(request, lambda: _page_by_pass(request, plans, estimated, {}))
        return
    results: list[tuple[dict[str, Any], dict[str, Run]]] = []
    figures: list[dict[str, Any]] = []
    for seed in range(request.seed, request.seed + request.seeds):
        if seed > request.seed:
            plans = _plans_by_pass(request, seed)
        try:
            runs = run_plans(
                plans,
                seed=seed,
                ignore_data=request.ignore_data,
                normal=request.check is not None,
            )
        except OutOfMemoryError as error:
            raise ValueError(f"{error}; use a smaller --batch or more --tiles") from error
        results.append((plans, runs))
        figures.append({"seed": seed, **run_figures(plans, runs)})
    middle = median_index(figures)
    plans, runs = results[middle]
    print_figures(summarise(request, plan_figures(next(iter(plans.values()))), figures), request)
    write_files(request, lambda: _page_by_pass(request, plans, figures[middle], runs))


def _plans_by_pass(request: Request, seed: int) -> dict[str, Any]:
    where = (request.batch, request.dtype, request.machine, request.names)
    memory = request.available_memory_proportion
    partials = request.partials_type
    if request.method == "dense":
        rows, cols = request.shape
        return dense_plans(
            rows, cols, *where, partials=partials, available_memory_proportion=memory
        )
    if partials not in (None, request.dtype):
        raise ValueError(
            f"--partials-type: static products add in the type of the data, {request.dtype}, "
            f"got {partials}"
        )
    options = translate_names(request.options)
    settings = {"available_memory_proportion": memory} | options
    try:
        return static_plans(request.draw(seed), *where, settings)
    except TypeError as error:  # A value of --options of the wrong kind.
        raise ValueError(str(error)) from error


def _page_by_pass(
    request: Request, plans: dict[str, Any], figures: dict[str, Any], runs: dict[str, Run]
) -> dict[str, Any]:
    """The profile report: the plans, their estimates, the runs, and a static plan's prediction."""
    sparse = ("density", "block_size") if request.method == "static" else ()
    summary = {name: getattr(request, name) for name in ("rows", "cols", "batch", "dtype", *sparse)}
    summary |= {"target": request.machine.name, "tiles": request.machine.tiles}
    summary |= {k: v for k, v in figures.items() if k not in ("propagation_steps", "spilled")}
    reports = _reports(plans)
    title = "{method} product {rows:,} × {cols:,} by {batch:,} on {target}"
    page = {
        "title": title.format(method=request.method.capitalize(), **summary),
        "summary": summary,
        "plan": reports,
        "profile": {name: run.profile for name, run in runs.items()} or None,
    }
    if request.method == "static":
        page["predicted"] = {name: report["predicted"] for name, report in reports.items()}
    return page


METHODS: dict[str, Callable[[Request], None]] = {
    "dynamic": run_dynamic,
    "static": run_by_pass,
    "dense": run_by_pass,
}
