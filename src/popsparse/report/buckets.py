"""How the pattern fills the buckets, what spilled, and what the propagation phase does about it."""

from __future__ import annotations

from typing import Any

import numpy as np

from popsparse.report.data import BucketData
from popsparse.report.figures import histogram
from popsparse.report.format import cell, legend, number, percent, say, table
from popsparse.report.maps import grid_map, offsets_map


def _grid(data: BucketData, values: np.ndarray) -> np.ndarray:
    """Figures of rectangles as [groups * x, y]."""
    return values.reshape(data.groups * data.partition[0], data.partition[1])


def bucket_maps(data: BucketData) -> list[tuple[str, str, str, np.ndarray, float | None]]:
    """The maps there are data for: (id, title, unit, values [groups * x, y], capacity)."""
    parts_z = data.partition[2]

    def by_rectangle(values: np.ndarray) -> np.ndarray:
        return values.reshape(-1, parts_z)

    found: list[tuple[str, str, str, np.ndarray, float | None]] = []
    if data.wanted is not None and data.nz_capacity:
        share = 100 * data.wanted / (data.nz_capacity * parts_z)
        title = "Asked for: values that belong to a rectangle, of what its buckets hold"
        found.append(("map-wanted", title, "%", _grid(data, share), 100.0))
    if data.nz_capacity:
        share = 100 * by_rectangle(data.nz_used).mean(1) / data.nz_capacity
        title = "Held: fill of a rectangle's buckets with values"
        found.append(("map-held", title, "%", _grid(data, share), 100.0))
    if data.words_capacity:
        share = 100 * by_rectangle(data.words_used).max(1) / data.words_capacity
        title = "Meta-info of the fullest bucket of a rectangle"
        found.append(("map-words", title, "%", _grid(data, share), 100.0))
    if data.foreign is not None and data.foreign.any():
        title = "Guests: values in a rectangle's buckets that belong elsewhere"
        values = by_rectangle(data.foreign).sum(1)
        found.append(("map-guests", title, "values", _grid(data, values), None))
    return found


def buckets_section(data: BucketData) -> str:
    """Fill by kind of content, maps over the X/Y grid, and the spread over the buckets."""
    buckets = len(data.nz_used)
    kinds = [("values", data.nz_used, data.nz_capacity)]
    kinds.append(("meta-info, words", data.words_used, data.words_capacity))
    if data.grad_a_words_used is not None:
        used = data.grad_a_words_used
        kinds.append(("meta-info of grad input, words", used, data.grad_a_words_capacity))
    rows = [
        cell(say(name))
        + cell(number(capacity), "n")
        + cell(number(float(used.mean())), "n")
        + cell(percent(float(used.mean()), capacity), "n")
        + cell(number(float(used.max())), "n")
        + cell(percent(float(used.max()), capacity), "n")
        for name, used, capacity in kinds
    ]
    head = [
        ("content of a bucket", ""),
        ("room", "n"),
        ("mean", "n"),
        ("fill", "n"),
        ("fullest", "n"),
        ("fill", "n"),
    ]
    x, y, z = data.partition
    groups = f" in each of {data.groups:,} groups" if data.groups > 1 else ""
    out = [
        f"<p>{buckets:,} buckets: {x:,} × {y:,} rectangles with {z:,} each{groups}. "
        f"<b>{data.spilled:,}</b> blocks left the bucket they began in, "
        f"<b>{data.propagated:,}</b> of the pattern's blocks lie in another rectangle's.</p>",
        table(head, rows),
    ]
    axes = ("group, X" if data.groups > 1 else "X", "Y")
    maps = [
        f"<figure><figcaption>{say(title)}</figcaption>"
        f"{grid_map(values, identity=name, axes=axes, unit=unit, capacity=capacity)}</figure>"
        for name, title, unit, values, capacity in bucket_maps(data)
    ]
    out.append('<h3>Over the X/Y grid</h3><div class="maps">' + "".join(maps) + "</div>")
    spread = [
        f"<figure><figcaption>Fill with {say(name)}</figcaption>"
        + histogram(100 * used / capacity, unit="% of the bucket", of="buckets")
        + "</figure>"
        for name, used, capacity in kinds
        if capacity
    ]
    if data.sub_groups is not None:
        spread.append(
            "<figure><figcaption>Sub-groups of a bucket</figcaption>"
            + histogram(data.sub_groups, unit="sub-groups", of="buckets")
            + "</figure>"
        )
    out.append('<h3>Over the buckets</h3><div class="maps">' + "".join(spread) + "</div>")
    return "".join(out)


def buckets_sections(encoding: Any) -> tuple[str, str, dict[str, np.ndarray]]:
    """The sections about buckets and their propagation, and the values of the maps by id.

    Raises:
        TypeError, ValueError: as of `BucketData.read`.
    """
    data = BucketData.read(encoding)
    maps = {name: values for name, _, _, values, _ in bucket_maps(data)}
    return buckets_section(data), propagation_section(data), maps


def propagation_section(data: BucketData) -> str:
    """Steps of the propagation phase, and the distances it visits."""
    z = data.partition[2]
    if not data.propagation_steps:
        return (
            "<p><b>None.</b> Every bucket holds only what belongs to its own rectangle, so the "
            "distribution phase computes everything.</p>"
        )
    out = [
        f"<p><b>{data.propagation_steps:,} steps</b>"
        + (f": {len(data.offsets):,} distances × {z:,} partners in Z" if data.offsets else "")
        + ". In each, buckets move on and every tile computes what belongs to it.</p>"
    ]
    if data.ends and data.offsets:
        out.append(offsets_map(data.partition, data.offsets, data.ends))
        out.append(
            legend(
                [
                    ("home", "at home: the distribution phase"),
                    ("visited", "visited"),
                    ("passed", "passed by, no computing"),
                    ("never", "not reached: the loop ends before"),
                ]
            )
        )
    if data.travels:
        total = sum(data.travels.values())
        ranked = sorted(data.travels.items(), key=lambda item: -item[1])[:12]
        rows = [
            cell(f"{x:,}", "n") + cell(f"{y:,}", "n") + cell(number(v), "n")
            + cell(percent(v, total), "n")
            for (x, y), v in ranked
        ]  # fmt: skip
        head = [
            ("distance in X", "n"),
            ("in Y", "n"),
            ("values", "n"),
            ("of all that travel", "n"),
        ]
        out.append(
            "<h3>What lies at which distance from its rectangle</h3>" + table(head, rows, "narrow")
        )
        if len(data.travels) > len(ranked):
            out.append(f"<p>and {len(data.travels) - len(ranked):,} more distances.</p>")
    return "".join(out)
