import json

import numpy as np
import pytest

from popsparse.machine import (
    FLOAT,
    Copy,
    Engine,
    Execute,
    Graph,
    Profile,
    Repeat,
    Sequence,
    Target,
    codelets,
)


def small_run():
    graph = Graph(Target(tiles=3, sync_cycles=10, exchange_fragment_cycles=0))
    a = graph.add_variable(FLOAT, [3, 4], "a", tiles=range(3))
    b = graph.add_variable(FLOAT, [3, 4], "b", tiles=[1, 2, 0])
    fill = graph.add_compute_set("fill")
    graph.add_vertices(fill, codelets.FILL, np.arange(3), {"out": a, "value": 1.0})
    body = Sequence(Execute(fill), Copy(a, b, name="rotate"), name="body")
    return Engine(graph, Repeat(2, body)).run()


def test_totals_steps_and_timeline():
    profile = small_run()
    fill, rotate = profile.step("fill"), profile.step("body/rotate")
    assert [s.name for s in profile.steps] == ["body/fill", "body/rotate"]
    # Filling: two words of 64 bits, 6 x (12 + 1). Rotating: 16 bytes, a sync.
    assert (fill.runs, fill.compute) == (2, 156)
    assert (rotate.runs, rotate.exchange, rotate.sync) == (2, 8, 20)
    assert profile.cycles == fill.cycles + rotate.cycles == 184
    assert profile.seconds == pytest.approx(184 / 1.33e9)
    assert rotate.received_bytes.tolist() == [32] * 3
    assert rotate.sent_bytes.tolist() == [32] * 3
    assert fill.balance == 1
    assert [(row.step, row.start) for row in profile.timeline] == [
        (0, 0),
        (1, 78),
        (0, 92),
        (1, 170),
    ]
    with pytest.raises(KeyError, match="0 steps are named 'other'"):
        profile.step("other")


def test_plain_data():
    profile = small_run()
    plain = json.loads(json.dumps(profile.to_dict()))
    assert plain["cycles"] == {
        "total": 184, "sync": 20, "exchange": 8, "compute": 156, "host": 0
    }  # fmt: skip
    assert [s["kind"] for s in plain["steps"]] == ["compute", "exchange"]
    assert plain["steps"][1]["received_bytes"] == 96
    assert plain["steps"][1]["max_received_bytes"] == 32
    assert plain["tiles"]["bytes"] == [int(n) for n in profile.memory.per_tile]
    assert plain["tiles"]["cycles"] == [156] * 3
    assert plain["timeline"][1] == [1, 78, 10, 4, 0, 0]
    assert plain["codelets"]["fill"] == {"vertices": 6, "cycles": 78}
    assert plain["memory"]["max_tile_bytes"] == profile.memory.max_tile_bytes
    assert plain["target"]["tiles"] == 3
    assert plain["tiles"]["exchange"] == [8] * 3
    assert plain["counts"] == {
        "tiles used": 3,
        "variables": 2,
        "compute steps": 1,
        "vertices": 3,
        "edges": 3,
        "exchanges": 1,
    }
    assert plain["timeline_is_whole"] is True


def test_long_timelines_are_truncated(monkeypatch):
    monkeypatch.setattr("popsparse.machine.profile._TIMELINE_ROWS", 3)
    profile = small_run()
    assert len(profile.timeline) == 3
    assert not profile.timeline_is_whole
    assert profile.cycles == 184


def test_summary():
    text = small_run().summary()
    assert "3 tiles of 638,976 bytes" in text
    assert "Cycles: 184" in text
    assert "body/rotate" in text
    assert "1 more steps, 28 cycles" in small_run().summary(max_steps=1)


def test_summary_of_a_stored_profile():
    graph = Graph(Target(tiles=3))
    a = graph.add_variable(FLOAT, [3, 500], "a", tiles=range(3))
    stream = graph.add_stream("data", FLOAT, 1500, to_device=True)
    engine = Engine(graph, Copy(stream, a, name="load"))
    engine.connect("data", np.zeros(1500))
    profile = engine.run()
    stored = Profile.from_dict(json.loads(json.dumps(profile.to_dict())))
    assert "Host link: 0 bytes to the host, 6,000 back" in stored.summary()
    assert stored.summary() == profile.summary()
