"""How a pattern fills the buckets: the data, and the sections about buckets and propagation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dynsparse._core.checks import check_kind
from popsparse.report.charts import (
    esc,
    grid_map,
    histogram,
    legend,
    offsets_map,
    percent,
    table,
)
from popsparse.report.data import reading


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
        buckets = read_buckets(words, layout)
        home = buckets.bucket // parts_z
        far = home != buckets.rectangle
        wanted.append(np.bincount(buckets.rectangle, minlength=parts_x * parts_y))
        foreign.append(np.bincount(buckets.bucket[far], minlength=layout.buckets))
        away_x = (buckets.rectangle // parts_y - home // parts_y) % parts_x
        away_y = (buckets.rectangle - home) % parts_y
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


@dataclass(frozen=True)
class BucketData:
    """How a pattern fills the buckets; keys as of `encoding_data`."""

    partition: tuple[int, int, int]
    groups: int
    nz_used: np.ndarray
    nz_capacity: int
    words_used: np.ndarray
    words_capacity: int
    spilled: int
    propagated: int
    propagation_steps: int
    sub_groups: np.ndarray | None = None
    grad_a_words_used: np.ndarray | None = None
    grad_a_words_capacity: int = 0
    wanted: np.ndarray | None = None
    foreign: np.ndarray | None = None
    ends: tuple[int, int, int] | None = None
    offsets: list[tuple[int, int]] = field(default_factory=list)
    travels: dict[tuple[int, int], int] = field(default_factory=dict)

    @classmethod
    def read(cls, encoding: Any) -> BucketData:
        """From `encoding_data`.

        Raises:
            ValueError: something else, or lists whose length is not the partition's.
        """
        with reading("encoding"):
            entries = {key: encoding[key] for key in cls.__dataclass_fields__ if key in encoding}
            x, y, z = entries["partition"]
            rectangles = entries.setdefault("groups", 1) * x * y
            sizes = dict.fromkeys(_OF_BUCKETS, rectangles * z) | {"wanted": rectangles}
            for key, size in sizes.items():
                if entries.get(key) is not None:
                    entries[key] = np.asarray(entries[key], np.float64)
                    if entries[key].shape != (size,):
                        raise ValueError(f"{key} must be {size} numbers")
            entries["partition"] = (x, y, z)
            entries["offsets"] = [(x, y) for x, y in entries.get("offsets", ())]
            entries["travels"] = {(x, y): values for x, y, values in entries.get("travels", ())}
            return cls(**entries)


_OF_BUCKETS = ("nz_used", "words_used", "sub_groups", "grad_a_words_used", "foreign")


def _grid(data: BucketData, values: np.ndarray) -> np.ndarray:
    """Figures of rectangles as [groups * x, y]."""
    return values.reshape(data.groups * data.partition[0], data.partition[1])


def build_bucket_maps(data: BucketData) -> list[tuple[str, str, str, np.ndarray, float | None]]:
    """The maps there are data for: (id, title, unit, values [groups * x, y], capacity)."""
    parts_z = data.partition[2]

    def by_rectangle(values: np.ndarray) -> np.ndarray:
        return values.reshape(-1, parts_z)

    maps: list[tuple[str, str, str, np.ndarray, float | None]] = []
    if data.wanted is not None and data.nz_capacity:
        share = 100 * data.wanted / (data.nz_capacity * parts_z)
        title = "Asked for: values that belong to a rectangle, of what its buckets hold"
        maps.append(("map-wanted", title, "%", _grid(data, share), 100.0))
    if data.nz_capacity:
        share = 100 * by_rectangle(data.nz_used).mean(1) / data.nz_capacity
        title = "Held: fill of a rectangle's buckets with values"
        maps.append(("map-held", title, "%", _grid(data, share), 100.0))
    if data.words_capacity:
        share = 100 * by_rectangle(data.words_used).max(1) / data.words_capacity
        title = "Meta-info of the fullest bucket of a rectangle"
        maps.append(("map-words", title, "%", _grid(data, share), 100.0))
    if data.foreign is not None and data.foreign.any():
        title = "Guests: values in a rectangle's buckets that belong elsewhere"
        values = by_rectangle(data.foreign).sum(1)
        maps.append(("map-guests", title, "values", _grid(data, values), None))
    return maps


def render_buckets(data: BucketData) -> str:
    """Fill by kind of content, maps over the X/Y grid, and the spread over the buckets."""
    buckets = len(data.nz_used)
    kinds = [("values", data.nz_used, data.nz_capacity)]
    kinds.append(("meta-info, words", data.words_used, data.words_capacity))
    if data.grad_a_words_used is not None:
        used = data.grad_a_words_used
        kinds.append(("meta-info of grad input, words", used, data.grad_a_words_capacity))
    rows = []
    for name, used, capacity in kinds:
        mean, most = float(used.mean()), float(used.max())
        fill = percent(mean, capacity), percent(most, capacity)
        rows.append([esc(name), capacity, mean, fill[0], most, fill[1]])
    head = ["content of a bucket", "#room", "#mean", "#fill", "#fullest", "#fill"]
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
        f"<figure><figcaption>{esc(title)}</figcaption>"
        f"{grid_map(values, identity=name, axes=axes, unit=unit, capacity=capacity)}</figure>"
        for name, title, unit, values, capacity in build_bucket_maps(data)
    ]
    out.append('<h3>Over the X/Y grid</h3><div class="maps">' + "".join(maps) + "</div>")
    spread = [
        f"<figure><figcaption>Fill with {esc(name)}</figcaption>"
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


def render_encoding(encoding: Any) -> tuple[str, str, dict[str, np.ndarray]]:
    """The sections about buckets and their propagation, and the values of the maps by id.

    Raises:
        TypeError, ValueError: as of `BucketData.read`.
    """
    data = BucketData.read(encoding)
    maps = {name: values for name, _, _, values, _ in build_bucket_maps(data)}
    return render_buckets(data), render_propagation(data), maps


def render_propagation(data: BucketData) -> str:
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
        rows = [[x, y, v, percent(v, total)] for (x, y), v in ranked]
        head = ["#distance in X", "#in Y", "#values", "#of all that travel"]
        out.append(
            "<h3>What lies at which distance from its rectangle</h3>" + table(head, rows, "narrow")
        )
        if len(data.travels) > len(ranked):
            out.append(f"<p>and {len(data.travels) - len(ranked):,} more distances.</p>")
    return "".join(out)
