"""The figures of a product: of several patterns, and as they are shown."""

from __future__ import annotations

import json
from typing import Any

from dynsparse.cli.matmul.request import Request


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
    if request.as_json:
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
