"""Programs in an engine: loops, branches, host access, runs without numerics."""

import numpy as np
import pytest

from popsparse.machine import (
    BOOL,
    FLOAT,
    HALF,
    INT,
    UNSIGNED_SHORT,
    Call,
    Codelet,
    Copy,
    Engine,
    Execute,
    Graph,
    If,
    In,
    InOut,
    Out,
    ProgramError,
    Repeat,
    RepeatWhileFalse,
    RepeatWhileTrue,
    Sequence,
    Switch,
    Sync,
    Target,
    codelets,
)

SMALL = Target(tiles=4, bytes_per_tile=4096, sync_cycles=100)


def is_zero(v):
    v.out[...] = v.value == 0


def flip(v):
    v.value[...] = 1 - v.value


ENDED = Codelet("equal zero", {"value": In(INT), "out": Out(BOOL)}, is_zero, 6)
FLIP = Codelet("flip", {"value": InOut(INT)}, flip, 6)


def counter(graph):
    """Make an integer on tile 0, with compute sets that increment and test it."""
    value = graph.add_variable(INT, [], "value", tiles=0)
    going = graph.add_variable(BOOL, [], "going", tiles=0)
    sets = {}
    for name, codelet, fields in (
        ("down", codelets.DECREMENT, {"value": value}),
        ("up", codelets.INCREMENT, {"value": value}),
        ("test", codelets.NOT_ZERO, {"value": value, "out": going}),
        ("ended", ENDED, {"value": value, "out": going}),
        ("flip", FLIP, {"value": value}),
    ):
        compute_set = graph.add_compute_set(name)
        graph.add_vertex(compute_set, codelet, 0, fields)
        sets[name] = Execute(compute_set)
    return value, going, sets


def test_loops_and_branches():
    graph = Graph(SMALL)
    value, going, sets = counter(graph)
    log = graph.add_variable(INT, [], "log", tiles=0)
    seen = graph.add_compute_set("seen")
    graph.add_vertex(seen, codelets.INCREMENT, 0, {"value": log})
    body = Sequence(sets["down"], Execute(seen))
    programs = {
        "while": RepeatWhileTrue(sets["test"], going, body),
        "until": RepeatWhileFalse(sets["ended"], going, body),
        "five": Repeat(5, Execute(seen)),
        "none": Repeat(0, Execute(seen)),
        "if": If(going, Execute(seen), sets["up"]),
        "lone if": If(going, Execute(seen)),
        "switch": Switch(value, {0: Execute(seen), 3: Repeat(10, Execute(seen))}, sets["down"]),
        "plain switch": Switch(value, [Execute(seen)]),
        "flip": sets["flip"],
        "sync": Sync(),
        "twice": Sequence(Call(body), Call(body)),
    }
    engine = Engine(graph, programs, max_iterations=50)

    def run(name, value=0, going=False):
        engine.write("value", value)
        engine.write("going", going)
        engine.write("log", 0)
        profile = engine.run(name)
        return engine.read("value").item(), engine.read("log").item(), profile

    assert run("while", 4)[:2] == (0, 4)
    assert run("while", 0)[:2] == (0, 0)
    assert run("until", 3)[:2] == (0, 3)
    assert run("five")[1] == 5
    assert run("none")[1] == 0
    assert run("if", 7, True)[:2] == (7, 1)
    assert run("if", 7, False)[:2] == (8, 0)
    assert run("lone if", 7, False)[:2] == (7, 0)
    assert run("switch", 0)[1] == 1
    assert run("switch", 3)[1] == 10
    assert run("switch", 9)[:2] == (8, 0)
    assert run("plain switch", 9)[:2] == (9, 0)
    assert run("flip", 0)[0] == 1
    assert run("flip", 1)[0] == 0
    assert run("twice", 5)[:2] == (3, 2)
    assert run("sync")[2].cycles == 100
    with pytest.raises(ProgramError, match=r"ran 50 times .*max_iterations"):
        run("while", -1)
    with pytest.raises(ProgramError, match="say which program"):
        engine.run()
    with pytest.raises(ProgramError, match="no program 'nine'"):
        engine.run("nine")

    # Each test: a sync and one word to all tiles. Each small vertex: (3 + 3) x 6 cycles.
    profile = run("while", 2)[2]
    assert profile.cycles == 3 * (36 + 101) + 2 * (36 + 36)
    test = profile.step("while/predicate")
    assert (test.kind, test.runs, test.sync, test.exchange) == ("control", 3, 300, 3)
    kinds = [profile.steps[row.step].kind for row in profile.timeline[:4]]
    assert kinds == ["compute", "control", "compute", "compute"]
    starts = [row.start for row in profile.timeline[:4]]
    assert starts == [0, 36, 137, 173]


def test_host_streams():
    graph = Graph(SMALL.with_(clock_hz=1e9, host_read_bytes_per_second=1e9))
    v = graph.add_variable(HALF, [2, 2], "v", tiles=[0, 1])
    inputs = graph.add_stream("in", HALF, 4, to_device=True)
    outputs = graph.add_stream("out", HALF, 4, to_device=False)
    engine = Engine(graph, Repeat(3, Sequence(Copy(inputs, v, name="load"), Copy(v, outputs))))
    with pytest.raises(ProgramError, match="'in' is not connected"):
        engine.run()
    found = []
    engine.connect("in", np.arange(8).reshape(2, 4))
    engine.connect("out", lambda values: found.append(values.tolist()))
    profile = engine.run()
    assert found == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]
    # 8 bytes at one a cycle.
    assert profile.step("load").host == 3 * 8
    assert profile.step("load").kind == "host"
    assert (profile.step("load").from_host_bytes, profile.step("load").to_host_bytes) == (24, 0)
    assert (profile.from_host_bytes, profile.to_host_bytes) == (24, 24)
    assert "Host link: 24 bytes to the host, 24 back" in profile.summary()
    assert profile.to_dict()["steps"][0]["from_host_bytes"] == 24
    buffer = np.zeros((2, 4), np.float32)
    engine.connect("out", buffer)
    engine.connect("in", lambda: [1, 2, 3, 4])
    engine.run()
    assert buffer.tolist() == [[1, 2, 3, 4]] * 2
    with pytest.raises(ValueError, match=r"needs \[4\]"):
        engine.connect("in", np.zeros(3))
    with pytest.raises(KeyError, match="no stream"):
        engine.connect("other", np.zeros(4))
    with pytest.raises(ProgramError, match="goes to the machine"):
        Copy(v, inputs)
    with pytest.raises(ProgramError, match="in its own Copy"):
        Copy([(v, outputs), (v, outputs)])
    with pytest.raises(ValueError, match="exists already"):
        graph.add_stream("in", HALF, 4, to_device=True)


def test_reading_and_writing():
    graph = Graph(SMALL)
    v = graph.add_variable(UNSIGNED_SHORT, [2, 3], "v", tiles=0)
    graph.add_variable(FLOAT, [1], "same", tiles=0)
    graph.add_variable(HALF, [1], "same", tiles=0)
    graph.add_handle("column", v[:, 1])
    graph.add_handle("picked", v[[1, 0], 2])
    graph.set_initial_value(v, 7)
    engine = Engine(graph, Sequence())
    assert engine.read("v").tolist() == [[7] * 3] * 2
    engine.write("column", [1, 2])
    engine.write("picked", np.array([5, 6], np.int64))
    assert engine.read(v).tolist() == [[7, 1, 6], [7, 2, 5]]
    assert engine.read("picked").tolist() == [5, 6]
    with pytest.raises(ValueError, match=r"expected \[2\], got \[3\]"):
        engine.write("column", [1, 2, 3])
    with pytest.raises(ValueError, match="uint16 holds 0 to 65535, got 1 to 65536"):
        engine.write("column", [1, 65536])
    with pytest.raises(TypeError, match="expected integers"):
        engine.write("column", [1.5, 2])
    with pytest.raises(KeyError, match="no handle or variable"):
        engine.read("other")
    with pytest.raises(KeyError, match="several variables"):
        engine.read("same")
    with pytest.raises(ValueError, match="exists already"):
        graph.add_handle("column", v)


def test_profile_is_equal_without_numerics():
    graph = Graph(SMALL)
    _, going, sets = counter(graph)
    tiles = np.arange(4)
    x = graph.add_variable(HALF, [4, 3], "x", tiles=tiles)
    y = graph.add_variable(HALF, [4, 3], "y", tiles=tiles)
    lengths = graph.add_variable(INT, [4], "lengths", tiles=tiles)
    moved = graph.add_variable(INT, [4], "moved", tiles=tiles)
    graph.set_initial_value(x, 1.0)
    calls = []

    def compute(v):
        calls.append(1)
        v.x[...] += 1

    work = Codelet(
        "work",
        {"x": InOut(HALF), "n": In(INT)},
        compute,
        lambda v: v.n,
        data_dependent=True,
    )
    one = graph.add_compute_set("work")
    graph.add_vertices(one, work, tiles, {"x": x, "n": lengths})
    pairs = [(x[1:], y[:-1]), (x[:1], y[3:]), (lengths[::-1], moved)]
    body = Sequence(Execute(one), Copy(pairs, name="both"), sets["down"])
    program = RepeatWhileTrue(sets["test"], going, body)
    profiles = []
    for numerics in (True, False):
        engine = Engine(graph, program, numerics=numerics)
        engine.write("value", 3)
        engine.write("lengths", [4, 3, 2, 1])
        profiles.append(engine.run().to_dict())
        assert engine.read("moved").tolist() == [1, 2, 3, 4]
    assert profiles[0] == profiles[1]
    assert len(calls) == 3
    with pytest.raises(ProgramError, match="'x' is float16, which an engine with numerics=False"):
        engine.read("x")
    with pytest.raises(ProgramError, match="numerics=False"):
        engine.write("x", 1.0)
    count = Codelet("count", {"x": In(HALF), "n": Out(INT)}, compute, 1)
    bad = graph.add_compute_set("bad")
    graph.add_vertices(bad, count, tiles, {"x": x, "n": lengths})
    with pytest.raises(ProgramError, match="'count' makes integers from floating-point"):
        Engine(graph, Execute(bad), numerics=False)


def test_streams_without_numerics():
    graph = Graph(SMALL)
    v = graph.add_variable(HALF, [4], "v", tiles=0)
    stream = graph.add_stream("in", HALF, 4, to_device=True)
    profile = Engine(graph, Copy(stream, v, name="load"), numerics=False).run()
    assert profile.step("load").host > 0
