"""Loops found in a timeline, against what was rolled out; and loops of programs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from popsparse.machine import (
    FLOAT,
    Copy,
    Engine,
    Execute,
    Graph,
    Repeat,
    Sequence,
    Target,
    codelets,
)
from popsparse.report.data import read_profiles
from popsparse.report.steps import Run, fold, merge_numbered_steps, timeline_data


def unrolled(runs: list[Run], order: list[int]) -> list[int]:
    """The steps that folded runs stand for, taken from the first time each ran."""
    out: list[int] = []
    for run in runs:
        inner = unrolled(run.body, order) if run.body else [order[run.first]]
        out += inner * run.count
        assert run.length == len(inner) * run.count
    return out


def shape(runs: list[Run], order: list[int]):
    """Folded runs as nested tuples."""
    return [(run.count, shape(run.body, order)) if run.body else order[run.first] for run in runs]


@given(st.lists(st.integers(0, 3), max_size=60))
@settings(deadline=None, max_examples=200)
def test_folding_loses_nothing(order):
    runs = fold(order)
    assert unrolled(runs, order) == order
    assert [run.first for run in runs] == np.cumsum([0, *(r.length for r in runs)])[:-1].tolist()


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ([], []),
        ([0, 1, 2], [0, 1, 2]),
        ([7, 7, 7], [(3, [7])]),
        ([5, 0, 1, 0, 1, 0, 1, 6], [5, (3, [0, 1]), 6]),
        ([0, 0, 1] * 4, [(4, [(2, [0]), 1])]),
        (([0, 1] * 50 + [2]) * 30 + [3], [(30, [(50, [0, 1]), 2]), 3]),
        ((([0] * 9 + [1]) * 8 + [2]) * 7, [(7, [(8, [(9, [0]), 1]), 2])]),
    ],
)
def test_loops_by_hand(order, expected):
    assert shape(fold(order), order) == expected


def test_the_loops_of_a_program():
    graph = Graph(Target(tiles=2, sync_cycles=10))
    a = graph.add_variable(FLOAT, [2, 4], "a", tiles=[0, 1])
    b = graph.add_variable(FLOAT, [2, 4], "b", tiles=[1, 0])
    fill = graph.add_compute_set("fill")
    graph.add_vertices(fill, codelets.FILL, np.arange(2), {"out": a, "value": 1.0})
    turn = Sequence(Execute(fill), Copy(a, b, name="pass on 0"), Copy(b, a, name="pass on 1"))
    rows = Sequence(Repeat(40, turn), Copy(a, b, name="next row"))
    profile = Engine(graph, Sequence(Repeat(25, rows), name="run")).run()
    (data,) = read_profiles(profile)
    order, names = merge_numbered_steps(data)
    assert names == ["fill", "pass on", "next row"]
    (outer,) = fold(order)
    assert (outer.count, outer.length) == (25, 25 * 121)
    inner, last = outer.body
    assert (inner.count, len(inner.body), last.length) == (40, 2, 1)
    spans = timeline_data(data, [outer])["loops"]
    assert spans[0] == [0, 3025, 25, 0]
    # Each time the inner loop ran has its own place, and the two copies in it are a loop, too.
    assert spans[1:26] == [[121 * i, 121 * i + 120, 40, 1] for i in range(25)]
    assert spans[26:] == [
        [121 * i + 3 * j + 1, 121 * i + 3 * j + 3, 2, 2] for i in range(25) for j in range(40)
    ]
