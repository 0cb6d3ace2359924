import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynsparse.machine import (
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
    Ragged,
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


def scale_by(cycles, runs_on="worker"):
    def compute(v):
        v.out[...] = v.a * np.float32(2)

    return Codelet("scale", {"a": In(FLOAT), "out": Out(FLOAT)}, compute, cycles, runs_on)


def counter(graph):
    """A whole number on tile 0, with compute sets that step it and test it."""
    value = graph.add_variable(INT, [], "value", tiles=0)
    going = graph.add_variable(BOOL, [], "going", tiles=0)
    sets = {}
    for name, codelet, fields in (
        ("down", codelets.DECREMENT, {"value": value}),
        ("up", codelets.INCREMENT, {"value": value}),
        ("test", codelets.NOT_ZERO, {"value": value, "out": going}),
        ("ended", codelets.EQUAL_ZERO, {"value": value, "out": going}),
        ("flip", codelets.TOGGLE, {"value": value}),
    ):
        compute_set = graph.add_compute_set(name)
        graph.add_vertex(compute_set, codelet, 0, fields)
        sets[name] = Execute(compute_set)
    return value, going, sets


@pytest.mark.parametrize(
    ("vertices", "runs_on", "expected"),
    [
        # Seven vertices of 10 cycles on 6 workers: one worker runs two, and each issues every 6th.
        (7, "worker", 2 * 10 * 6),
        (6, "worker", 60),
        (1, "worker", 60),
        (7, "workers", 7 * 10 * 6),
        (7, "supervisor", 70),
    ],
)
def test_worker_scheduling(vertices, runs_on, expected):
    graph = Graph(SMALL)
    a = graph.add_variable(FLOAT, [vertices], "a", tiles=1)
    out = graph.add_variable(FLOAT, [vertices], "out", tiles=1)
    both = graph.add_compute_set("scale")
    tiles = np.full(vertices, 1)
    graph.add_vertices(both, scale_by(10, runs_on), tiles, {"a": a, "out": out})
    engine = Engine(graph, Execute(both))
    engine.write("a", np.arange(vertices))
    profile = engine.run()
    assert engine.read("out").tolist() == [2.0 * i for i in range(vertices)]
    assert profile.cycles == profile.step("scale").compute == expected
    assert profile.tile_cycles.tolist() == [0, expected, 0, 0]
    assert profile.codelets["scale"].vertices == vertices
    assert profile.codelets["scale"].cycles == 10 * vertices


def test_unequal_vertices_are_dealt_in_turn():
    graph = Graph(SMALL)
    spans = np.array([1, 2, 3, 4, 5, 6, 7, 8])
    a = graph.add_variable(FLOAT, [8], "a", tiles=[0] * 8)
    out = graph.add_variable(FLOAT, [8], "out", tiles=[0] * 8)
    one = graph.add_compute_set("one")
    graph.add_vertices(one, scale_by(lambda v: spans), np.zeros(8, int), {"a": a, "out": out})
    # Worker 0 runs vertices 0 and 6 (1 + 7), worker 1 runs 1 and 7 (2 + 8), worker 5 one of 6.
    assert Engine(graph, Execute(one)).run().cycles == 6 * (2 + 8)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["worker", "worker", "workers", "supervisor"]),
            st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), min_size=1, max_size=12),
        ),
        min_size=1,
        max_size=4,
    ),
    st.integers(1, 6),
)
def test_scheduling_one_vertex_at_a_time(sets, workers):
    graph = Graph(Target(tiles=3, workers=workers))
    one = graph.add_compute_set("one")
    lanes = [[0] * workers for _ in range(3)]
    dealt, alone = [0] * 3, [0] * 3
    for mode, vertices in sets:
        tiles, cycles = (np.array(c) for c in zip(*vertices, strict=True))
        codelet = Codelet(mode, {}, lambda v: None, lambda v, c=cycles: c, mode)
        graph.add_vertices(one, codelet, tiles, {})
        for tile, spent in vertices:
            if mode == "worker":
                lanes[tile][dealt[tile] % workers] += spent
                dealt[tile] += 1
            else:
                alone[tile] += spent * (workers if mode == "workers" else 1)
    profile = Engine(graph, Execute(one, name="first")).run()
    expected = [workers * max(lane) + rest for lane, rest in zip(lanes, alone, strict=True)]
    assert profile.tile_cycles.tolist() == expected
    assert profile.step("first").compute == max(expected)


def test_the_slowest_tile_counts():
    graph = Graph(SMALL)
    a = graph.add_variable(FLOAT, [3, 5], "a", tiles=[0, 1, 3])
    out = graph.add_variable(FLOAT, [3, 5], "out", tiles=[0, 1, 3])
    one = graph.add_compute_set("one")
    cycles = lambda v: 10 + v.tiles  # noqa: E731
    graph.add_vertices(one, scale_by(cycles), np.array([0, 1, 3]), {"a": a, "out": out})
    profile = Engine(graph, Execute(one)).run()
    assert profile.tile_cycles.tolist() == [60, 66, 0, 78]
    assert profile.cycles == 78
    assert profile.steps[0].balance == pytest.approx((60 + 66 + 78) / 4 / 78)


def test_vertices_added_by_hand_run_as_one_call():
    graph = Graph(SMALL)
    calls = []

    def compute(v):
        calls.append(v.count)
        v.out[...] = v.a + v.by

    plus = Codelet("plus", {"a": In(FLOAT), "out": Out(FLOAT)}, compute, 5, scalars=("by",))
    a = graph.add_variable(FLOAT, [8, 3], "a")
    out = graph.add_variable(FLOAT, [8, 3], "out")
    one = graph.add_compute_set("one")
    for i in range(8):
        for v in (a, out):
            graph.set_tile_mapping(v[i], i % 4)
        graph.add_vertex(one, plus, i % 4, {"a": a[i], "out": out[i], "by": 2})
    # Unevenly spaced, so gathered; another value of the scalar, so another call.
    extra = graph.add_variable(FLOAT, [9], "extra", tiles=2)
    for i in (0, 1, 5):
        graph.add_vertex(one, plus, 2, {"a": extra[i][None], "out": extra[i + 2][None], "by": 3})
    engine = Engine(graph, Execute(one))
    engine.write("a", np.arange(24).reshape(8, 3))
    engine.write("extra", np.arange(9))
    engine.run()
    assert sorted(calls) == [3, 8]
    np.testing.assert_array_equal(engine.read("out"), np.arange(24).reshape(8, 3) + 2)
    assert engine.read("extra").tolist() == [0, 1, 3, 4, 4, 5, 6, 8, 8]


def test_grids_of_vertices_share_operands():
    graph = Graph(SMALL)
    x = graph.add_variable(FLOAT, [2, 3], "x", tiles=[0, 1])
    w = graph.add_variable(FLOAT, [2, 4, 3], "w", tiles=[0, 1])
    out = graph.add_variable(FLOAT, [2, 4], "out", tiles=[0, 1])
    grid = np.broadcast_to(np.array([[0], [1]]), (2, 4))
    products = graph.add_compute_set("products")
    shared = x.expand_dims(1).broadcast_to(2, 4, 3)
    assert shared.is_regular
    graph.add_vertices(products, codelets.DOT, grid, {"a": w, "b": shared, "out": out})
    scaled = graph.add_compute_set("scaled")
    scale = np.arange(8.0).reshape(2, 4)
    graph.add_vertices(
        scaled, codelets.ADD_SCALED, grid, {"a": out[..., None], "b": w[..., :1], "scale": scale}
    )
    engine = Engine(graph, Sequence(Execute(products), Execute(scaled)))
    rng = np.random.default_rng(0)
    values = {"x": rng.normal(size=(2, 3)), "w": rng.normal(size=(2, 4, 3))}
    for name, value in values.items():
        engine.write(name, value)
    profile = engine.run()
    expected = np.einsum("twn,tn->tw", values["w"], values["x"]) + scale * values["w"][..., 0]
    np.testing.assert_allclose(engine.read("out"), expected, rtol=1e-5, atol=1e-5)
    # Four vertices of 7 cycles, each on its own worker; then four that take all workers.
    assert profile.step("products").compute == 6 * 7
    assert profile.step("scaled").compute == 4 * 6 * (60 + 3)
    one = graph.add_compute_set("one")
    with pytest.raises(ValueError, match="each of 2 x 4 vertices"):
        graph.add_vertices(one, codelets.DOT, grid, {"a": w, "b": x, "out": out})


def test_ragged_edges():
    graph = Graph(SMALL)

    def compute(v):
        v.out[...] = np.add.reduceat(v.a.values, v.a.offsets[:-1])

    total = Codelet("total", {"a": In(FLOAT), "out": Out(FLOAT)}, compute, lambda v: v.a.lengths)
    a = graph.add_variable(FLOAT, [6], "a")
    for i, tile in enumerate([0, 1, 1, 2, 2, 2]):
        graph.set_tile_mapping(a[i], tile)
    out = graph.add_variable(FLOAT, [3], "out", tiles=[0, 1, 2])
    one = graph.add_compute_set("one")
    edges = {"a": Ragged(a, [0, 1, 3, 6]), "out": out}
    graph.add_vertices(one, total, np.arange(3), edges)
    turned = graph.add_compute_set("gathered")
    edges = {"a": Ragged(a[::-1], [0, 3, 5, 6]), "out": out[::-1]}
    graph.add_vertices(turned, total, np.array([2, 1, 0]), edges)
    engine = Engine(graph, {"forward": Execute(one), "reverse": Execute(turned)})
    engine.write("a", [1, 2, 3, 4, 5, 6])
    profile = engine.run("forward")
    assert engine.read("out").tolist() == [1, 5, 15]
    assert profile.tile_cycles.tolist() == [6, 12, 18, 0]
    engine.write("out", 0)
    engine.run("reverse")
    assert engine.read("out").tolist() == [1, 5, 15]
    with pytest.raises(ValueError, match="offsets must ascend"):
        Ragged(a, [0, 3, 2])
    with pytest.raises(ValueError, match=r"takes a tensor \[n\]"):
        Ragged(a.reshape(2, 3), [0, 3])


def test_data_dependent_cycles_are_asked_at_every_run():
    graph = Graph(SMALL)
    a = graph.add_variable(INT, [2], "a", tiles=[0, 1])
    work = Codelet("work", {"a": InOut(INT)}, lambda v: None, lambda v: v.a, data_dependent=True)
    one = graph.add_compute_set("one")
    graph.add_vertices(one, work, np.arange(2), {"a": a})
    engine = Engine(graph, Execute(one))
    for values, expected in (([3, 5], 30), ([10, 2], 60)):
        engine.write("a", values)
        assert engine.run().cycles == expected
    engine.write("a", [-1, 2])
    with pytest.raises(ProgramError, match="negative"):
        engine.run()


def test_half_rounds_as_half():
    graph = Graph(SMALL)
    a = graph.add_variable(HALF, [4], "a", tiles=0)
    b = graph.add_variable(FLOAT, [4], "b", tiles=0)
    out = graph.add_variable(HALF, [4], "out", tiles=0)
    add = graph.add_compute_set("add")
    graph.add_vertex(add, codelets.ADD, 0, {"a": a, "b": b, "out": out})
    engine = Engine(graph, Execute(add))
    assert np.isnan(engine.read("out")).all()
    engine.write("a", [2048, 1 / 3, 65504, 1])
    engine.write("b", [1, 0, 65504, 2.0**-12])
    engine.run()
    # 2049 lies between halves and rounds to even; 131008 overflows; 1 + 2^-12 rounds to 1.
    third = float(np.float16(1 / 3))
    assert engine.read("a").tolist() == [2048, third, 65504, 1]
    assert engine.read("out").tolist() == [2048, third, np.inf, 1]


def test_kernels_cannot_write_inputs():
    graph = Graph(SMALL)
    a = graph.add_variable(FLOAT, [2], "a", tiles=0)

    def compute(v):
        v.a[...] = 0

    one = graph.add_compute_set("one")
    graph.add_vertex(one, Codelet("bad", {"a": In(FLOAT)}, compute, 1), 0, {"a": a})
    with pytest.raises(ValueError, match="read-only"):
        Engine(graph, Execute(one)).run()


def test_kernels_may_use_torch():
    graph = Graph(SMALL)
    a = graph.add_variable(HALF, [2, 3], "a", tiles=[0, 1])
    out = graph.add_variable(HALF, [2, 3], "out", tiles=[0, 1])

    def compute(v):
        v.torch("out").copy_(v.torch("a").float() * 3)

    triple = Codelet("triple", {"a": In(HALF), "out": Out(HALF)}, compute, 1)
    one = graph.add_compute_set("one")
    graph.add_vertices(one, triple, np.arange(2), {"a": a, "out": out})
    engine = Engine(graph, Execute(one))
    engine.write("a", np.ones((2, 3)))
    engine.run()
    assert (engine.read("out") == 3).all()


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
    with pytest.raises(ValueError, match="unsigned short holds 0 to 65535, got 1 to 65536"):
        engine.write("column", [1, 65536])
    with pytest.raises(TypeError, match="expected integers"):
        engine.write("column", [1.5, 2])
    with pytest.raises(KeyError, match="no handle or variable"):
        engine.read("other")
    with pytest.raises(KeyError, match="several variables"):
        engine.read("same")
    with pytest.raises(ValueError, match="exists already"):
        graph.add_handle("column", v)


def test_without_numerics_the_profile_is_the_same():
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
    with pytest.raises(ProgramError, match="'x' is half, which an engine with numerics=False"):
        engine.read("x")
    with pytest.raises(ProgramError, match="numerics=False"):
        engine.write("x", 1.0)
    count = Codelet("count", {"x": In(HALF), "n": Out(INT)}, compute, 1)
    bad = graph.add_compute_set("bad")
    graph.add_vertices(bad, count, tiles, {"x": x, "n": lengths})
    with pytest.raises(ProgramError, match="'count' makes whole numbers from floating-point"):
        Engine(graph, Execute(bad), numerics=False)


def test_streams_without_numerics():
    graph = Graph(SMALL)
    v = graph.add_variable(HALF, [4], "v", tiles=0)
    stream = graph.add_stream("in", HALF, 4, to_device=True)
    profile = Engine(graph, Copy(stream, v, name="load"), numerics=False).run()
    assert profile.step("load").host > 0
