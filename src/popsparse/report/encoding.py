"""The buckets of an encoded pattern as plain data for the machine report."""

from __future__ import annotations

from typing import Any

import numpy as np

from dynsparse.checks import check_kind


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
    from popsparse.encoding.encoded import Encoded, EncodedPattern
    from popsparse.encoding.partitioner import Partitioner
    from popsparse.encoding.reader import read_buckets

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
