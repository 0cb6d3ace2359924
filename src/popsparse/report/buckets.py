"""The fill of the buckets: the data, and the sections about buckets and propagation."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from dynsparse._core.checks import check_kind
from popsparse.report.charts import (
    esc,
    grid_map,
    histogram,
    percent,
    table,
)
from popsparse.report.data import prefix_errors


def encoding_data(partitioner: Any, encoded: Any) -> dict[str, Any]:
    """The report's data about the buckets, ready for JSON.

    Positions are read back from the meta-info itself, so the maps show what the machine would see.

    Args:
        partitioner: the `popsparse.Partitioner` that encoded.
        encoded: its `Encoded` or `EncodedPattern`.

    Returns:
        "partition" (x, y, z) and "groups". For each bucket, in the host's order:
        "nz_used" and "foreign" (values; those of another rectangle), "words_used", "sub_groups",
        "grad_a_words_used" (None without grad_input's own buckets). For each rectangle
        [groups, x, y]: "demand", the values that belong to it. "nz_capacity", "words_capacity",
        "grad_a_words_capacity". "spilled", "propagated" (blocks) and "propagation_steps".
        "offsets": the (x, y) that the propagation visits; "travels": (x, y, values), the number of
        values at each distance.

    Raises:
        TypeError: arguments of other types.
    """
    from popsparse.encoding.buckets import distances_from_home
    from popsparse.encoding.meta_info import read_buckets
    from popsparse.encoding.partitioner import Encoded, EncodedPattern, Partitioner

    check_kind("partitioner", partitioner, Partitioner, "a Partitioner")
    check_kind("encoded", encoded, (Encoded, EncodedPattern), "what a partitioner encoded")
    pattern = getattr(encoded, "pattern", encoded)
    layout, groups, info = partitioner.layout, partitioner.groups, pattern.info
    parts_x, parts_y, parts_z = layout.partition
    body = pattern.meta_info[layout.overflow_words :].reshape(groups, -1)
    demand: list[np.ndarray] = []
    foreign: list[np.ndarray] = []
    travels = np.zeros((parts_x, parts_y), np.int64)
    for words in body:
        buckets = read_buckets(words, layout)
        far = buckets.bucket // parts_z != buckets.rectangle
        demand.append(np.bincount(buckets.rectangle, minlength=parts_x * parts_y))
        foreign.append(np.bincount(buckets.bucket[far], minlength=layout.buckets))
        far_x, far_y = distances_from_home(buckets.rectangle, buckets.bucket, layout.partition)
        np.add.at(travels, (far_x[far], far_y[far]), layout.area)
    grad_a = info.grad_a_words_used
    data = {
        "partition": [parts_x, parts_y, parts_z],
        "groups": groups,
        "nz_used": info.nz_used,
        "nz_capacity": info.nz_capacity,
        "words_used": info.words_used,
        "words_capacity": info.words_capacity,
        "grad_a_words_used": grad_a,
        "grad_a_words_capacity": 0 if grad_a is None else info.grad_a_words_capacity,
        "sub_groups": info.sub_groups,
        "spilled": info.spilled,
        "propagated": info.propagated,
        "propagation_steps": info.propagation_steps,
        "demand": np.concatenate(demand) * layout.area,
        "foreign": np.concatenate(foreign) * layout.area,
        "offsets": [list(pair) for pair in info.overflow.kept_offsets],
        "travels": [[int(x), int(y), int(travels[x, y])] for x, y in np.argwhere(travels)],
    }
    return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in data.items()}


_OF_BUCKETS = ("nz_used", "words_used", "sub_groups", "grad_a_words_used", "foreign")


def _read_encoding(encoding: Any) -> dict[str, Any]:
    """A copy of `encoding_data` with arrays; ValueError if their sizes do not fit the partition."""
    x, y, z = encoding["partition"]
    rectangles = encoding["groups"] * x * y
    data = dict(encoding)
    for key, size in {**dict.fromkeys(_OF_BUCKETS, rectangles * z), "demand": rectangles}.items():
        if encoding[key] is not None:
            data[key] = np.asarray(encoding[key], np.float64)
            if data[key].shape != (size,):
                raise ValueError(f"{key} must be {size} numbers")
    return data


class BucketMap(NamedTuple):
    """A figure of each rectangle, [groups * x, y], and its capacity, if there is one."""

    identity: str
    title: str
    unit: str
    values: np.ndarray
    capacity: float | None


def build_bucket_maps(data: dict[str, Any]) -> list[BucketMap]:
    """Maps of the buckets' demand, their content, and the part of it that belongs elsewhere."""
    parts_x, parts_y, parts_z = data["partition"]
    capacity = data["nz_capacity"] or 1

    def of_buckets(values: np.ndarray) -> np.ndarray:
        return values.reshape(data["groups"] * parts_x, parts_y, parts_z)

    demand = data["demand"].reshape(data["groups"] * parts_x, parts_y) / (capacity * parts_z)
    held = of_buckets(data["nz_used"]).mean(2) / capacity
    words_used = of_buckets(data["words_used"]).max(2) / data["words_capacity"]
    title = "Demand: values that belong to a rectangle, of what its buckets hold"
    maps = [BucketMap("map-demand", title, "%", 100 * demand, 100.0)]
    title = "Held: fill of a rectangle's buckets with values"
    maps.append(BucketMap("map-held", title, "%", 100 * held, 100.0))
    title = "Meta-info of the fullest bucket of a rectangle"
    maps.append(BucketMap("map-words", title, "%", 100 * words_used, 100.0))
    if data["foreign"].any():
        title = "Guests: values in a rectangle's buckets that belong elsewhere"
        guests = of_buckets(data["foreign"]).sum(2)
        maps.append(BucketMap("map-guests", title, "values", guests, None))
    return maps


def render_buckets(data: dict[str, Any], maps: list[BucketMap]) -> str:
    """Fill by kind of content, maps over the X/Y grid, and the spread over the buckets."""
    buckets = len(data["nz_used"])
    kinds = [("values", data["nz_used"], data["nz_capacity"])]
    kinds.append(("meta-info, words", data["words_used"], data["words_capacity"]))
    if data["grad_a_words_used"] is not None:
        used = data["grad_a_words_used"]
        kinds.append(("meta-info of grad input, words", used, data["grad_a_words_capacity"]))
    rows = []
    for name, used, capacity in kinds:
        mean, most = float(used.mean()), float(used.max())
        fill = percent(mean, capacity), percent(most, capacity)
        rows.append([esc(name), capacity, mean, fill[0], most, fill[1]])
    head = ["content of a bucket", "#capacity", "#mean", "#fill", "#fullest", "#fill"]
    x, y, z = data["partition"]
    groups = f" in each of {data['groups']:,} groups" if data["groups"] > 1 else ""
    out = [
        f"<p>The plan cuts the weight matrix into X × Y = {x:,} × {y:,} rectangles{groups}, and "
        f"gives each {z:,} buckets, one a tile, {buckets:,} in all. A bucket is memory of a fixed "
        "size for non-zero values and for their positions, the meta-info; the size stays when the "
        f"pattern changes. <b>{data['spilled']:,}</b> blocks left the bucket they began in because "
        f"it was full, and <b>{data['propagated']:,}</b> of the pattern's blocks lie in another "
        "rectangle's.</p>",
        table(head, rows),
    ]
    axes = ("group, X" if data["groups"] > 1 else "X", "Y")
    figures = (
        f"<figure><figcaption>{esc(title)}</figcaption>"
        f"{grid_map(values, identity=name, axes=axes, unit=unit, capacity=capacity)}</figure>"
        for name, title, unit, values, capacity in maps
    )
    out.append('<h3>Over the X/Y grid</h3><div class="maps">' + "".join(figures) + "</div>")
    spread = [
        (f"Fill with {name}", 100 * used / capacity, "% of the bucket")
        for name, used, capacity in kinds
        if capacity
    ]
    spread.append(("Sub-groups of a bucket", data["sub_groups"], "sub-groups"))
    histograms = (
        f"<figure><figcaption>{esc(title)}</figcaption>"
        f"{histogram(values, unit=unit, of='buckets')}</figure>"
        for title, values, unit in spread
    )
    out.append('<h3>Over the buckets</h3><div class="maps">' + "".join(histograms) + "</div>")
    return "".join(out)


def render_encoding(encoding: Any) -> tuple[str, str, dict[str, np.ndarray]]:
    """The sections about buckets and their propagation, and the values of the maps by id.

    Raises:
        ValueError: not the result of `encoding_data`.
    """
    with prefix_errors("encoding"):
        data = _read_encoding(encoding)
        maps = build_bucket_maps(data)
        by_id = {heat_map.identity: heat_map.values for heat_map in maps}
        return render_buckets(data, maps), render_propagation(data), by_id


def render_propagation(data: dict[str, Any]) -> str:
    """Steps of the propagation phase, and the distances it visits."""
    z = data["partition"][2]
    if not data["propagation_steps"]:
        return (
            "<p><b>None.</b> Blocks that do not fit into the buckets of their rectangle go to "
            "others, and propagation passes them on until all are computed. Here every bucket "
            "holds only what belongs to its own rectangle, so the step distribution computes "
            "everything.</p>"
        )
    out = [
        f"<p><b>{data['propagation_steps']:,} steps</b>"
        f": {len(data['offsets']):,} distances × {z:,} partners in Z. In each, buckets move on and "
        "every tile computes what belongs to it.</p>",
    ]
    if data["travels"]:
        total = sum(values for _, _, values in data["travels"])
        ranked = sorted(data["travels"], key=lambda item: -item[2])[:12]
        rows = [[x, y, v, percent(v, total)] for x, y, v in ranked]
        head = ["#distance in X", "#in Y", "#values", "#of all that travel"]
        out.append(
            "<h3>What lies at which distance from its rectangle</h3>" + table(head, rows, "narrow")
        )
        if len(data["travels"]) > len(ranked):
            out.append(f"<p>and {len(data['travels']) - len(ranked):,} more distances.</p>")
    return "".join(out)
