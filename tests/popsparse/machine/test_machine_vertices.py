"""Vertices in an engine: scheduling over workers, edges, and cycles."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from popsparse.machine import (
    FLOAT,
    HALF,
    INT,
    Codelet,
    Engine,
    Execute,
    Graph,
    In,
    InOut,
    Out,
    ProgramError,
    Ragged,
    Sequence,
    Target,
    codelets,
)

SMALL = Target(tiles=4, bytes_per_tile=4096, sync_cycles=100)


def scale_by(cycles, runs_on="worker"):
    def compute(v):
        v.out[...] = v.a * np.float32(2)

    return Codelet("scale", {"a": In(FLOAT), "out": Out(FLOAT)}, compute, cycles, runs_on)


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


def test_slowest_tile_determines_the_time():
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


def test_separately_added_vertices_run_as_one_call():
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


def test_data_dependent_cycles_are_computed_at_every_run():
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


def test_float16_rounding():
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
