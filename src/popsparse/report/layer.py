"""The machine report of a layer that ran on the simulated machine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dynsparse.checks import check_kind
from dynsparse.typed import typed
from popsparse.report.encoding import encoding_data
from popsparse.report.format import number
from popsparse.report.report import write_report


def plan_summary(plan: Any) -> dict[str, Any]:
    """What a `popsparse.Plan` is for, as figures for the summary."""
    sizes = plan.sizes
    out = {
        "rows": sizes.x,
        "cols": sizes.y,
        "batch": sizes.z,
        "block_size": plan.params.sparsity_params.block_dimensions,
        "dtype": plan.dtype.name,
        "partials": plan.options.partials_type.name,
        "target": plan.target.name,
        "tiles": plan.target.tiles,
    }
    rows, cols = out["block_size"]
    if rows == cols:
        out["block_size"] = rows
    if sizes.groups > 1:
        out["groups"] = sizes.groups
    return out


@typed
def layer_page(
    layer: Any,
    *,
    title: str | None = None,
    pattern: Any = None,
    summary: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What `write_report` makes a page of, and `save_profile` a file, about the last run of each
    pass of a layer.

    Args:
        layer: a `popsparse.Layer` with a pattern, of which passes have run.
        title: by default the sizes of the product and the machine.
        pattern: the pattern it ran with; given, the page also has what the execution model
            predicts for it.
        summary: more figures, or better ones, for the head of the page.

    Raises:
        ValueError: a layer of which no pass has run, or one that keeps its weights dense.
    """
    from popsparse.encoding.partitioner import Partitioner
    from popsparse.layer import Layer
    from popsparse.planning.report import plan_report
    from popsparse.timing.model import predict

    check_kind("layer", layer, Layer, "a popsparse.Layer")
    plan, profiles, encoding = layer.plan, layer.profiles, layer.encoding
    if not profiles or encoding is None:
        raise ValueError("the layer has nothing to report: set a sparse pattern and run a pass")
    head = plan_summary(plan)
    values = len(encoding.positions) * plan.block_dimensions[0] * plan.block_dimensions[1]
    elements = head["rows"] * head["cols"] * plan.sizes.groups
    products = 2.0 * values * plan.sizes.z
    head |= {
        "density": values / elements,
        "nnz": values,
        "cycles": {name: profile.cycles for name, profile in profiles.items()},
        "seconds": {name: profile.seconds for name, profile in profiles.items()},
        "tflops": {name: products / p.seconds / 1e12 for name, p in profiles.items()},
        "max_tile_bytes": max(p.memory.max_tile_bytes for p in profiles.values()),
        "propagation_steps": encoding.info.propagation_steps,
        "spilled": encoding.info.spilled,
        "propagated": encoding.info.propagated,
    }
    sizes = f"{number(head['rows'])} × {number(head['cols'])} by {number(head['batch'])}"
    predicted = None
    if pattern is not None:
        predicted = {n: t.to_dict() for n, t in predict(plan, pattern).items() if n in profiles}
    return {
        "title": title or f"Sparse product {sizes} on {plan.target.name}",
        "summary": head | dict(summary or {}),
        "plan": plan_report(plan),
        "profile": dict(profiles),
        "predicted": predicted,
        "encoding": encoding_data(Partitioner(plan), encoding),
    }


def write_layer_report(path: str | Path, layer: Any, **more: Any) -> Path:
    """Write the page about the last run of each pass of a layer.

    Args:
        path: the file; its folder must exist.
        layer, more: as of `layer_page`, whose errors these are.

    Returns:
        The path.

    Raises:
        OSError: the file cannot be written.
    """
    return write_report(path, **layer_page(layer, **more))
