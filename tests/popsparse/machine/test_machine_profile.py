import json

import numpy as np
import pytest

from popsparse.machine import (
    FLOAT,
    HALF,
    INT,
    Copy,
    Engine,
    Execute,
    Graph,
    Repeat,
    Sequence,
    Target,
    codelets,
    rotation,
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


def test_long_timelines_are_cut(monkeypatch):
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


def test_all_tiles_of_a_mk2():
    graph = Graph(Target.mk2())
    tiles = np.arange(1472)
    x = graph.add_variable(HALF, [1472, 256], "x", tiles=tiles)
    y = graph.add_variable(HALF, [1472, 256], "y", tiles=tiles)
    total = graph.add_variable(FLOAT, [1472, 16], "total", tiles=tiles)
    count = graph.add_variable(INT, [1472], "count", tiles=tiles)
    work = graph.add_compute_set("work")
    graph.add_vertices(
        work, codelets.REDUCE, tiles, {"partials": x.reshape(1472, 16, 16), "out": total}
    )
    graph.add_vertices(work, codelets.INCREMENT, tiles, {"value": count})
    rotate = Copy(rotation(x, y, 1), name="rotate")
    program = Repeat(10, Sequence(Execute(work), rotate, Copy(y, x, name="back")))
    engine = Engine(graph, program)
    values = np.random.default_rng(0).normal(size=(1472, 256)).astype(np.float16)
    engine.write("x", values)
    engine.write("count", 0)
    profile = engine.run()
    np.testing.assert_array_equal(engine.read("x"), np.roll(values, -10, axis=0))
    assert (engine.read("count") == 10).all()
    expected = np.roll(values, -9, axis=0).reshape(1472, 16, 16).astype(np.float32).sum(1)
    np.testing.assert_allclose(engine.read("total"), expected, rtol=1e-5, atol=1e-4)
    assert profile.step("rotate").exchange == 10 * 512 / 4
    assert profile.step("rotate").received_bytes.sum() == 10 * 1472 * 512
    assert profile.step("back").sync == 0
    assert len(profile.timeline) == 30
