"""The page of a layer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dynsparse.checks import check_kind
from dynsparse.typed import typed
from popsparse.report.charts import number
from popsparse.report.page import write_report


def encoding_data(partitioner: Any, encoded: Any) -> dict[str, Any]:
    """Everything the report shows about the buckets, ready for JSON.

    What belongs where is read back from the meta-info itself, so the maps show what the machine
    would see.

    Args:
        partitioner: the `popsparse.Partitioner` that encoded.
        encoded: its `Encoded` or `EncodedPattern`.

    Returns:
        "partition" (x, y, z) and "groups". For each bucket, in the order of `Plan.bucket_index`:
        "nz_used" and "foreign" (values; those that belong to another rectangle), "words_used",
        "sub_groups", "grad_a_words_used" (only with buckets of grad_input's own). For each
        rectangle [groups, x, y]: "wanted", the values that belong there. "nz_capacity",
        "words_capacity", "grad_a_words_capacity". "spilled", "propagated" (blocks) and
        "propagation_steps". "ends": where the loops of the propagation end; "offsets": the (x, y)
        it visits; "travels": (x, y, values) that lie at a distance.

    Raises:
        TypeError: something else than these.
    """
    from popsparse.encoding.meta_info import read_buckets
    from popsparse.encoding.partitioner import Encoded, EncodedPattern, Partitioner

    check_kind("partitioner", partitioner, Partitioner, "a Partitioner")
    check_kind("encoded", encoded, (Encoded, EncodedPattern), "what a partitioner encoded")
    pattern = getattr(encoded, "pattern", encoded)
    layout, groups, info = partitioner.layout, partitioner.groups, pattern.info
    parts_x, parts_y, parts_z = layout.partition
    body = pattern.meta_info[layout.overflow_words :].reshape(groups, -1)
    wanted: list[np.ndarray] = []
    foreign: list[np.ndarray] = []
    travels = np.zeros((parts_x, parts_y), np.int64)
    for words in body:
        found = read_buckets(words, layout)
        home = found.bucket // parts_z
        far = home != found.rectangle
        wanted.append(np.bincount(found.rectangle, minlength=parts_x * parts_y))
        foreign.append(np.bincount(found.bucket[far], minlength=layout.buckets))
        away_x = (found.rectangle // parts_y - home // parts_y) % parts_x
        away_y = (found.rectangle - home) % parts_y
        np.add.at(travels, (away_x[far], away_y[far]), layout.area)
    overflow = info.overflow
    data = {
        "partition": [parts_x, parts_y, parts_z],
        "groups": groups,
        "nz_used": info.nz_used.tolist(),
        "nz_capacity": info.nz_capacity,
        "words_used": info.words_used.tolist(),
        "words_capacity": info.words_capacity,
        "sub_groups": info.sub_groups.tolist(),
        "spilled": info.spilled,
        "propagated": info.propagated,
        "propagation_steps": info.propagation_steps,
        "wanted": (np.concatenate(wanted) * layout.area).tolist(),
        "foreign": (np.concatenate(foreign) * layout.area).tolist(),
        "ends": [overflow.x, overflow.y, overflow.z],
        "offsets": [list(pair) for pair in overflow.kept_offsets],
        "travels": [[int(x), int(y), int(travels[x, y])] for x, y in np.argwhere(travels)],
    }
    if info.grad_a_words_used is not None:
        data["grad_a_words_used"] = info.grad_a_words_used.tolist()
        data["grad_a_words_capacity"] = info.grad_a_words_capacity
    return data


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
    from popsparse.timing import predict

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
