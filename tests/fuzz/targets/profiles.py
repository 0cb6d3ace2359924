"""Stored profiles of the tile machine: the file as it is, and one run within a right file."""

from __future__ import annotations

import json

import numpy as np

from popsparse.machine import (
    BOOL,
    FLOAT,
    Copy,
    Engine,
    Execute,
    Graph,
    If,
    Sequence,
    Target,
    codelets,
)
from popsparse.machine.profile_file import document
from popsparse.report import compare, load_profile, profile_text, report_html
from targets.common import folder, refused_as


def _profile() -> dict:
    graph = Graph(Target(tiles=3, sync_cycles=10))
    a, b = (graph.add_variable(FLOAT, [3, 2], name, tiles=range(3)) for name in "ab")
    flag = graph.add_constant(BOOL, [], True, "flag", tiles=0)
    fill = graph.add_compute_set("fill")
    graph.add_vertices(fill, codelets.FILL, np.arange(3), {"out": a, "value": 1.0})
    rare = If(flag, Copy(a, b, name="copy"))
    return Engine(graph, Sequence(Execute(fill), rare, name="all")).run().to_dict()


_RUN = _profile()
_WHOLE = document("A title", [("forward", _RUN)], summary={"rows": 3, "cycles": 7})

SEEDS = [b"\0" + json.dumps(_WHOLE).encode(), b"\1" + json.dumps(_RUN).encode()]


def run(data: bytes) -> None:
    way, content = data[0] % 2 if data else 0, data[1:]
    file = folder() / "profile.json"
    if way:
        head = json.dumps({**_WHOLE, "runs": []})[:-2].encode()
        content = head + b'{"program": "forward", ' + content[1:] + b"]}"
    file.write_bytes(content)
    with refused_as(ValueError):
        stored = load_profile(file)
        profile_text(stored.title, stored.profiles)
        compared = compare(stored, stored) if stored.profiles else None
        report_html(**stored.page, compared=compared)
