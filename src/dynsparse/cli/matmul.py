"""`dynsparse matmul`: a sparse or dense product on the tile machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from dynsparse.cli.values import integer, number

__all__ = ["matmul"]

_METHODS = ("dynamic", "static", "dense")
_PRODUCT, _MACHINE, _PATTERN, _OUTPUT = "Product", "Machine and plan", "Pattern", "Output"


def _option(panel: str, help: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, **more)


def _int(panel: str, help: str, *names: str, **more: Any) -> Any:
    return _option(panel, help, *names, parser=integer, metavar="<int>", **more)


def _float(panel: str, help: str, *names: str, **more: Any) -> Any:
    return _option(panel, help, *names, parser=number, metavar="<float>", **more)


def matmul(
    rows: Annotated[int, _int(_PRODUCT, "Rows of the sparse matrix: output features.")],
    cols: Annotated[int, _int(_PRODUCT, "Its columns: input features.")],
    batch: Annotated[int, _int(_PRODUCT, "Columns of the dense operand.")],
    density: Annotated[float, _float(_PRODUCT, "Present blocks over all blocks.")] = 0.1,
    block_size: Annotated[int, _int(_PRODUCT, "Edge of the blocks.")] = 1,
    dtype: Annotated[
        str, _option(_PRODUCT, "Of values and operands.", metavar="float16|float32")
    ] = "float16",
    method: Annotated[
        str,
        _option(
            _PRODUCT,
            "dynamic: the pattern may change at run time; static: it is known when planning; "
            "dense: the same product with all elements. Static and dense times are their cost "
            "models'.",
            metavar="|".join(_METHODS),
        ),
    ] = "dynamic",
    passes: Annotated[
        str,
        _option(
            _PRODUCT,
            "Which products run, comma-separated: forward, grad_input, grad_weight.",
            metavar="<names>",
        ),
    ] = "forward",
    target: Annotated[str, _option(_MACHINE, "The machine.", metavar="bow|mk2")] = "bow",
    tiles: Annotated[
        int | None, _int(_MACHINE, "Use this many tiles.", show_default="1472")
    ] = None,
    partials_type: Annotated[
        str | None,
        _option(
            _MACHINE,
            "Of partial sums.",
            metavar="float16|float32",
            show_default="float32; dense: as the data",
        ),
    ] = None,
    available_memory_proportion: Annotated[
        float, _float(_MACHINE, "Part of a tile's memory for temporary data.")
    ] = 0.6,
    oversize: Annotated[float, _float(_MACHINE, "Spare room of the buckets.")] = 0.3,
    options: Annotated[
        str,
        _option(
            _MACHINE,
            'Further options as JSON, such as {"shared_buckets": false}.',
            metavar="<json>",
        ),
    ] = "{}",
    plan_constraints: Annotated[
        str,
        _option(
            _MACHINE,
            'Fix parts of the plan, as JSON such as {"partition": {"z": 1}}.',
            metavar="<json>",
        ),
    ] = "{}",
    seed: Annotated[int, _int(_PATTERN, "Of the pattern and the values.")] = 0,
    seeds: Annotated[
        int,
        _int(
            _PATTERN,
            "Run this many patterns and report the spread; the figures are those of the run with "
            "the median of cycles.",
        ),
    ] = 1,
    weighted_area_begin: Annotated[
        list[int] | None,
        _int(_PATTERN, "First row and column of a denser area.", show_default="none"),
    ] = None,
    weighted_area_end: Annotated[
        list[int] | None, _int(_PATTERN, "Row and column after its last.", show_default="none")
    ] = None,
    weighted_area_weighting: Annotated[
        float, _float(_PATTERN, "How much denser the area is.")
    ] = 1.0,
    ignore_data: Annotated[
        bool, _option(_PATTERN, "Count cycles without computing numbers.", "--ignore-data")
    ] = False,
    ignore_memory: Annotated[
        bool,
        _option(_MACHINE, "Run also if the product does not fit the tiles.", "--ignore-memory"),
    ] = False,
    plan_only: Annotated[
        bool, _option(_OUTPUT, "Plan, and stop before running.", "--plan-only")
    ] = False,
    report_plan: Annotated[
        bool, _option(_OUTPUT, "Show why the plan was chosen.", "--report-plan")
    ] = False,
    as_json: Annotated[bool, _option(_OUTPUT, "Print the figures as JSON.", "--json")] = False,
    report: Annotated[
        Path | None,
        _option(
            _OUTPUT,
            "Write a page about plan, run, tiles and buckets: one HTML file.",
            metavar="<file.html>",
        ),
    ] = None,
) -> None:
    """A sparse x dense product on the tile machine: plan, cycles, memory, propagation.

    The plan serves forward and grad_input jointly, whatever runs; grad_weight too where asked for.
    """
    from dynsparse.machine.target import Target
    from dynsparse.popsparse.planner.planning import parse_passes

    if method not in _METHODS:
        raise ValueError(f"--method must be one of {', '.join(_METHODS)}, got {method!r}")
    asked = [name.strip() for name in passes.split(",")]
    names = [name for name in parse_passes(asked) if name in asked]
    for flag, value in (
        ("rows", rows), ("cols", cols), ("batch", batch), ("block-size", block_size),
        ("seeds", seeds),
    ):  # fmt: skip
        if value < 1:
            raise ValueError(f"--{flag} must be at least 1, got {value}")
    for flag, value in (("rows", rows), ("cols", cols)):
        if method != "dense" and value % block_size:
            raise ValueError(
                f"--{flag} must be a multiple of --block-size {block_size}, got {value}: use "
                f"{-(-value // block_size) * block_size} or another block size"
            )
    if not 0 <= density <= 1:
        raise ValueError(f"--density must be in [0, 1], got {density:g}")
    if report_plan and as_json and not plan_only:
        raise ValueError("--report-plan is text; with --json use --plan-only --json")
    if report is not None and (report.is_dir() or not report.parent.is_dir()):
        raise ValueError(f"--report: expected a file in a folder that exists, got {report}")
    machine = Target.named(target, **({} if tiles is None else {"tiles": tiles}))
    area = _area(weighted_area_begin, weighted_area_end, weighted_area_weighting)
    common = {
        "available_memory_proportion": available_memory_proportion,
        **({} if partials_type is None else {"partials_type": partials_type}),
    }
    if method == "dense":
        _dense(locals())
        return
    if method == "static":
        if ignore_memory:
            raise ValueError("--ignore-memory does not apply to --method static: leave it out")
        from dynsparse.cli.matmul_static import static_product

        further = _json_object("options", options)
        if found := static_product({**locals(), "further": further}):
            _show(found, as_json, machine)
        return
    settings = {
        **common,
        "meta_info_bucket_oversize_proportion": oversize,
        "plan_constraints": _json_object("plan-constraints", plan_constraints),
        **_json_object("options", options),
    }
    from dynsparse.popsparse.planner.planning import plan as make

    everything = ["forward", "grad_input", *(["grad_weight"] if "grad_weight" in names else [])]
    sizes = (rows, cols, batch, density, block_size, dtype, machine)
    try:
        chosen = make(*sizes, passes=everything, options=settings)
    except TypeError as error:  # A value of --options or --plan-constraints of the wrong kind.
        raise ValueError(str(error)) from error
    if chosen.use_dense:
        raise ValueError("use_dense is a plan of dense weights: use --method dense")
    if plan_only or report_plan:
        _show_plan(chosen, as_json)
    if plan_only:
        if report is not None:
            _report_plan(report, chosen, density)
        return
    shape = rows, cols
    from dynsparse.machine.errors import OutOfMemoryError
    from dynsparse.popsparse.layer import Layer

    try:
        layer = Layer(
            chosen, passes=names, numerics=not ignore_data, check_memory=not ignore_memory
        )
    except OutOfMemoryError as error:
        raise ValueError(
            f"{error}; use a smaller --batch, a lower --available-memory-proportion or more "
            "--tiles, or see the figures all the same with --ignore-memory"
        ) from error
    _run(layer, names, shape, density, block_size, seed, seeds, area, ignore_data, as_json, report)


def _json_object(flag: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"--{flag}: expected a JSON object, got {text!r}")
    return value


def _area(begin: list[int] | None, end: list[int] | None, weighting: float) -> Any:
    if begin is None and end is None:
        if weighting != 1.0:
            raise ValueError(
                "--weighted-area-weighting needs --weighted-area-begin and --weighted-area-end"
            )
        return None
    for name, corner in (("begin", begin), ("end", end)):
        if corner is None or len(corner) != 2:
            raise ValueError(f"--weighted-area-{name}: expected a row and a column, got {corner}")
    if weighting < 0:
        raise ValueError(f"--weighted-area-weighting must be at least 0, got {weighting}")
    assert begin is not None
    assert end is not None
    return (begin[0], begin[1]), (end[0], end[1]), weighting


def _show_plan(plan: Any, as_json: bool) -> None:
    from dynsparse.popsparse.measure import plan_figures
    from dynsparse.popsparse.planner.report import plan_report, plan_text

    if as_json:
        estimated = {name: cost.cycles for name, cost in plan.costs.items()}
        print(
            json.dumps(
                {
                    "plan": plan_figures(plan),
                    "estimated_cycles": estimated,
                    "report": plan_report(plan),
                }
            )
        )
    else:
        print(plan_text(plan))


def _run(
    layer: Any,
    names: list[str],
    shape: tuple[int, int],
    density: float,
    block_size: int,
    seed: int,
    seeds: int,
    area: Any,
    ignore_data: bool,
    as_json: bool,
    report: Path | None,
) -> None:
    from dynsparse.popsparse.measure import draw_pattern, plan_figures, sparse_figures

    plan = layer.plan
    runs = []
    for one in range(seed, seed + seeds):
        pattern = draw_pattern(shape, density, block_size, one, area)
        figures = sparse_figures(layer, pattern, names, seed=one, ignore_data=ignore_data)
        runs.append({"seed": one, **figures})
    middle = sorted(runs, key=lambda run: sum(run["cycles"].values()))[(seeds - 1) // 2]
    figures = {"plan": plan_figures(plan), **{k: v for k, v in middle.items() if k != "seed"}}
    if not ignore_data:
        figures["max_relative_error"] = max(run["max_relative_error"] for run in runs)
    if seeds > 1:
        figures["seeds"] = runs
        figures["spread"] = {name: _spread(runs, name) for name in names}
    _show(figures, as_json, plan.target)
    if report is not None:
        from dynsparse.report.machine import write_layer_report

        pattern = draw_pattern(shape, density, block_size, middle["seed"], area)
        if seeds > 1:  # The layer holds the last one.
            sparse_figures(layer, pattern, names, ignore_data=True)
        more = {"max_relative_error": figures["max_relative_error"], "seed": middle["seed"]}
        if seeds > 1:
            more["patterns"] = f"{seeds}; this page is about the one of median cycles"
            more |= {f"{name} cycles, spread": s for name, s in figures["spread"].items()}
        write_layer_report(report, layer, pattern=pattern, summary=more)


def _spread(runs: list[dict[str, Any]], name: str) -> dict[str, float]:
    cycles = [run["cycles"][name] for run in runs]
    return {"min": min(cycles), "mean": sum(cycles) / len(cycles), "max": max(cycles)}


def _report_plan(report: Path, plan: Any, density: float) -> None:
    from dynsparse.popsparse.planner.report import plan_report
    from dynsparse.report.machine import write_report
    from dynsparse.report.machine.layer import plan_summary

    summary = plan_summary(plan) | {
        "density": density,
        "estimated_cycles": {name: cost.cycles for name, cost in plan.costs.items()},
    }
    sizes = f"{summary['rows']:,} × {summary['cols']:,} by {summary['batch']:,}"
    title = f"Plan of a sparse product {sizes} on {plan.target.name}"
    write_report(report, title=title, summary=summary, plan=plan_report(plan))


def _report_dense(given: dict[str, Any], figures: dict[str, Any], plans: dict[str, Any]) -> None:
    from dynsparse.report.machine import write_report

    sizes = {key: given[key] for key in ("rows", "cols", "batch", "dtype")}
    summary = sizes | {"target": given["machine"].name, "tiles": given["machine"].tiles}
    keys = ("cycles", "estimated_cycles", "tflops", "max_tile_bytes")
    summary |= {key: figures[key] for key in keys if key in figures}
    title = "Dense product {rows:,} × {cols:,} by {batch:,} on {target}".format(**summary)
    found = {name: plan.to_dict() for name, plan in plans.items()}
    write_report(given["report"], title=title, summary=summary, plan=found)


def _dense(given: dict[str, Any]) -> None:
    from dynsparse.popsparse.measure import dense_figures, dense_plans

    for flag, default in (("seeds", 1), ("area", None), ("ignore_data", False),
                          ("report_plan", False), ("ignore_memory", False), ("options", "{}"),
                          ("plan_constraints", "{}"), ("oversize", 0.3), ("seed", 0)):  # fmt: skip
        if given[flag] != default:
            name = "weighted-area-begin" if flag == "area" else flag.replace("_", "-")
            raise ValueError(f"--{name} does not apply to --method dense: leave it out")
    sizes = [given[key] for key in ("rows", "cols", "batch", "dtype", "machine", "names")]
    more = {
        "partials": given["partials_type"],
        "available_memory_proportion": given["available_memory_proportion"],
    }
    figures = dense_figures(*sizes, **more)
    if given["plan_only"]:
        figures = {"plan": figures["plan"], "estimated_cycles": figures["cycles"]}
    _show(figures, given["as_json"], given["machine"])
    if given["report"] is not None:
        _report_dense(given, figures, dense_plans(*sizes, **more))


def _show(figures: dict[str, Any], as_json: bool, target: Any) -> None:
    if as_json:
        print(json.dumps(figures))
        return
    plan = figures["plan"]
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
    if figures.get("max_relative_error") is not None:
        print(f"largest relative error: {figures['max_relative_error']:.2e}")
