"""`dynsparse matmul --method static`: the pattern is known when the product is planned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["static_product"]


def static_product(given: dict[str, Any]) -> dict[str, Any] | None:
    """The figures of the product, or None when a plan was printed instead.

    `given` holds the checked arguments of `matmul` by name, and "further", the object that
    --options gave.
    """
    from dynsparse.popsparse.measure import draw_pattern
    from dynsparse.popsparse.product.data_types import data_type
    from dynsparse.popsparse.static.measure import plan_figures, plan_passes, static_figures
    from dynsparse.popsparse.static.report import plan_report, plan_text

    for flag, default in (("oversize", 0.3), ("plan_constraints", "{}")):
        if given[flag] != default:
            name = flag.replace("_", "-")
            raise ValueError(f"--{name} does not apply to --method static: leave it out")
    partials = given["partials_type"]
    if partials is not None and data_type(partials) is not data_type(given["dtype"]):
        raise ValueError(
            f"--partials-type: static products add in the type of the data, {given['dtype']}, "
            f"got {partials}"
        )
    options = {"available_memory_proportion": given["available_memory_proportion"]}
    options |= given["further"]
    shape = given["rows"], given["cols"]
    runs, plans_of = [], []
    for seed in range(given["seed"], given["seed"] + given["seeds"]):
        pattern = draw_pattern(shape, given["density"], given["block_size"], seed, given["area"])
        where = (given["batch"], given["dtype"], given["machine"], given["names"])
        try:
            plans = plan_passes(pattern, *where, options)
        except TypeError as error:  # A value of --options of the wrong kind.
            raise ValueError(str(error)) from error
        plans_of.append(plans)
        if given["plan_only"]:
            break
        figures = static_figures(plans, seed=seed, ignore_data=given["ignore_data"])
        runs.append({"seed": seed, **figures})
    plans = plans_of[0]
    first = next(iter(plans.values()))
    estimated = {name: plan.cycles for name, plan in plans.items()}
    if given["plan_only"] and given["report"] is not None:
        _write_page(given, plans, {"estimated_cycles": estimated})
    if given["plan_only"] and given["as_json"]:
        return {
            "plan": plan_figures(first),
            "estimated_cycles": estimated,
            "report": {name: plan_report(plan) for name, plan in plans.items()},
        }
    if given["plan_only"] or given["report_plan"]:
        print("\n\n".join(plan_text(plan) for plan in plans.values()))
    if given["plan_only"]:
        return None
    order = sorted(range(len(runs)), key=lambda i: sum(runs[i]["cycles"].values()))
    middle = order[(len(runs) - 1) // 2]
    chosen = next(iter(plans_of[middle].values()))
    found = {k: v for k, v in runs[middle].items() if k != "seed"}
    found = {"plan": plan_figures(chosen), **found}
    if not given["ignore_data"]:
        found["max_relative_error"] = max(run["max_relative_error"] for run in runs)
    if len(runs) > 1:
        found["seeds"] = runs
        cycles = {name: [run["cycles"][name] for run in runs] for name in given["names"]}
        found["spread"] = {
            name: {"min": min(all_), "mean": sum(all_) / len(all_), "max": max(all_)}
            for name, all_ in cycles.items()
        }
    if given["report"] is not None:
        figures = {
            k: v for k, v in runs[middle].items() if k not in ("propagation_steps", "spilled")
        }
        _write_page(given, plans_of[middle], figures)
    return found


def _write_page(given: dict[str, Any], plans: dict[str, Any], figures: dict[str, Any]) -> Path:
    """The profile report of static plans: the plan, its estimate and the predicted steps."""
    from dynsparse.popsparse.static.report import plan_report
    from dynsparse.report.machine import write_report

    sizes = {k: given[k] for k in ("rows", "cols", "batch", "density", "block_size", "dtype")}
    machine = given["machine"]
    summary = sizes | {"target": machine.name, "tiles": machine.tiles} | figures
    reports = {name: plan_report(plan) for name, plan in plans.items()}
    return write_report(
        given["report"],
        title="Static product {rows:,} × {cols:,} by {batch:,} on {target}".format(**summary),
        summary=summary,
        plan=reports,
        predicted={name: one["predicted"] for name, one in reports.items()},
    )
