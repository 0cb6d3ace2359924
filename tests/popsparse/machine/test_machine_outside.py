"""Remote buffers, printed messages, and programs that stop themselves."""

import io
import math

import numpy as np
import pytest

from popsparse.machine import (
    BOOL,
    FLOAT,
    HALF,
    UNSIGNED_INT,
    Abort,
    AbortError,
    AbortOnCondition,
    Copy,
    Engine,
    ErrorProgram,
    Execute,
    Graph,
    PrintTensor,
    ProgramError,
    Repeat,
    Sequence,
    Target,
    codelets,
)

SMALL = Target(
    tiles=4, clock_hz=1e9, remote_read_bytes_per_second=1e9, remote_write_bytes_per_second=2e9
)


def test_rows_of_a_remote_buffer():
    graph = Graph(SMALL)
    buffer = graph.add_remote_buffer("beside", HALF, 6, rows=3)
    x = graph.add_variable(HALF, [2, 3], "x", tiles=[0, 1])
    y = graph.add_variable(HALF, [6], "y", tiles=2)
    row = graph.add_variable(UNSIGNED_INT, [1], "row", tiles=0)
    next_row = graph.add_compute_set("next row")
    graph.add_vertices(next_row, codelets.INCREMENT, [0], {"value": row.expand_dims(0)})
    body = Sequence(
        Copy(x, buffer, index=row, name="out"),
        Copy(buffer, y, index=row, name="in"),
        Execute(next_row),
    )
    engine = Engine(graph, {"run": Repeat(2, body), "in": Copy(buffer, y, index=row)})
    engine.write("x", np.arange(6).reshape(2, 3))
    engine.write("row", [1])
    profile = engine.run("run")
    wanted = [[0] * 6, [*range(6)], [*range(6)]]
    assert engine.remote("beside").tolist() == wanted
    assert engine.read("y").tolist() == [*range(6)]
    out, back = (profile.step(f"run/{name}") for name in ("out", "in"))
    assert (out.kind, out.runs, out.host, out.sync) == ("remote", 2, 2 * 6, 2 * 311)
    assert (out.to_remote_bytes, out.from_remote_bytes) == (24, 0)
    assert (back.host, back.from_remote_bytes) == (2 * 12, 24)
    assert "Remote buffers: 24 bytes to them, 24 back" in profile.summary()
    engine.remote("beside")[0] = 9
    engine.write("row", [0])
    engine.run("in")
    assert engine.read("y").tolist() == [9] * 6
    engine.write("row", [3])
    with pytest.raises(ProgramError, match="'beside' has rows 0 to 2, got 3"):
        engine.run("in")
    with pytest.raises(KeyError, match="no remote buffer named 'besides'; there are: 'beside'"):
        engine.remote("besides")


def test_bad_remote_buffers():
    graph = Graph(Target.pod(2, tiles=4))
    buffer = graph.add_remote_buffer("beside", HALF, 4, rows=2)
    one = graph.add_remote_buffer("one", HALF, 4)
    x = graph.add_variable(HALF, [4], "x", tiles=0)
    far = graph.add_variable(HALF, [4], "far", tiles=4)
    both = graph.add_variable(HALF, [2, 2], "both", tiles=[0, 4])
    wide = graph.add_variable(FLOAT, [4], "wide", tiles=0)
    other = Graph(SMALL).add_remote_buffer("one", HALF, 4)
    for make, line in (
        (lambda: Copy(x, buffer), "has 2 rows: say which"),
        (lambda: Copy(x, far, index=x), "index= is for remote buffers"),
        (lambda: Copy(x, buffer, index=x), "must be one bool or integer"),
        (lambda: Copy([(x, one), (x, far)]), "in its own Copy"),
        (lambda: Copy(both[0], one), "Copy of 2 elements"),
        (lambda: graph.add_remote_buffer("one", HALF, 4), "'one' exists already"),
        (lambda: graph.add_remote_buffer("big", HALF, 2**27), "at most 134,217,728 bytes"),
        (lambda: Engine(graph, Copy(both, one)), "is beside one processor"),
        (lambda: Engine(graph, Sequence(Copy(x, one), Copy(one, far))), "is beside one processor"),
        (lambda: Engine(graph, Copy(x, other)), "belongs to another graph"),
    ):
        with pytest.raises(ValueError, match=line):
            make()
    with pytest.raises(TypeError, match="cast first"):
        Copy(wide, one)


def test_each_replica_has_its_remote_buffer():
    graph = Graph(Target.pod(2, tiles=2), replicas=2)
    buffer = graph.add_remote_buffer("beside", FLOAT, 3)
    x = graph.add_variable(FLOAT, [3], "x", tiles=0)
    engine = Engine(graph, Copy(x, buffer))
    for replica in (0, 1):
        engine.write("x", replica, replica)
    profile = engine.run()
    assert [engine.remote("beside", r).tolist() for r in (0, 1)] == [[[0] * 3], [[1] * 3]]
    assert profile.steps[0].host == math.ceil(12 / 3.75e9 * 1.85e9)
    assert profile.steps[0].to_remote_bytes == 24


def test_prints():
    graph = Graph(SMALL)
    x = graph.add_variable(FLOAT, [2, 2], "x", tiles=[0, 1])
    engine = Engine(graph, PrintTensor(x[1], "second row"), print_to=(said := io.StringIO()))
    engine.write("x", [[1, 2], [3, 4.5]])
    profile = engine.run()
    assert said.getvalue() == "second row: [3.  4.5]\n"
    assert profile.to_host_bytes == 8
    quiet = Engine(graph, PrintTensor(x), print_to=(said := io.StringIO()), numerics=False)
    assert quiet.run().to_host_bytes == 16
    assert said.getvalue() == "'x': not computed\n"


def test_programs_that_stop_themselves():
    graph = Graph(SMALL)
    bad = graph.add_variable(BOOL, [1], "bad", tiles=0)
    x = graph.add_variable(FLOAT, [2], "x", tiles=0)
    graph.set_initial_value(x, [1, 2])
    engine = Engine(
        graph,
        {
            "abort": Sequence(Abort("no way"), name="here"),
            "check": Sequence(AbortOnCondition(bad, "x is bad"), Copy(x[:1], x[1:], name="go on")),
            "error": ErrorProgram("x was", x),
        },
    )
    with pytest.raises(AbortError, match=r"no way \(after 0 cycles, at abort/here\)"):
        engine.run("abort")
    with pytest.raises(AbortError, match=r"x was: \[1\. 2\.\]"):
        engine.run("error")
    engine.write("bad", [False])
    assert engine.run("check").step("go on").runs == 1
    engine.write("bad", [True])
    with pytest.raises(AbortError, match="x is bad"):
        engine.run("check")
    with pytest.raises(TypeError, match="message must be a text"):
        Abort(3)
    with pytest.raises(TypeError, match="tensor must be a Tensor"):
        PrintTensor("x")
