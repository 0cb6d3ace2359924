import numpy as np
import pytest

from popsparse.machine import FLOAT, HALF, UNSIGNED_INT, Engine, Execute, Graph, Target, codelets

TARGET = Target(tiles=2, bytes_per_tile=64 * 1024, sync_cycles=0)


def run(codelet, scalars=(), **arrays):
    """Run one vertex on tile 1 with {field: (dtype, values)}; return (engine, cycles)."""
    graph = Graph(TARGET)
    fields = {}
    for name, (dtype, values) in arrays.items():
        fields[name] = graph.add_variable(dtype, np.shape(values), name, tiles=1)
    one = graph.add_compute_set("one")
    graph.add_vertex(one, codelet, 1, {**fields, **dict(scalars)})
    engine = Engine(graph, Execute(one))
    for name, (_, values) in arrays.items():
        engine.write(name, values)
    return engine, engine.run().cycles


def blank(*shape):
    return np.zeros(shape)


def test_fill():
    # 100 halves are 25 words of 64 bits, 5 for the busiest of 6 workers.
    engine, cycles = run(codelets.FILL, {"value": 3}, out=(HALF, blank(10, 10)))
    assert (engine.read("out") == 3).all()
    assert cycles == 6 * (12 + 5)


@pytest.mark.parametrize(
    ("src", "out", "cycles"),
    # Values for 1,000 elements; formulas in section 3.4 of docs/popsparse-formulas.md.
    [(FLOAT, HALF, 660), (HALF, HALF, 408)],
)
def test_cast(src, out, cycles):
    values = np.linspace(-3, 3, 1000)
    engine, found = run(codelets.CAST, src=(src, values), out=(out, blank(1000)))
    assert found == cycles
    expected = values.astype(src.numpy).astype(out.numpy)
    np.testing.assert_array_equal(engine.read("out"), expected)


def test_arithmetic():
    a, b = np.arange(6), np.arange(6)[::-1]
    engine, cycles = run(codelets.ADD, a=(FLOAT, a), b=(HALF, b), out=(FLOAT, blank(6)))
    assert engine.read("out").tolist() == [5] * 6
    assert cycles == 6 * (60 + 3)
    engine, _ = run(codelets.ADD_SCALED, {"scale": 0.5}, a=(HALF, a), b=(FLOAT, b))
    assert engine.read("a").tolist() == (a + 0.5 * b).tolist()


def test_scales_may_differ_by_vertex():
    graph = Graph(TARGET)
    a = graph.add_variable(FLOAT, [2, 3], "a", tiles=[0, 1])
    b = graph.add_constant(FLOAT, [2, 3], 1, "b", tiles=[0, 1])
    one = graph.add_compute_set("one")
    scale = np.array([2.0, 3.0])
    graph.add_vertices(one, codelets.ADD_SCALED, np.arange(2), {"a": a, "b": b, "scale": scale})
    graph.set_initial_value(a, 10)
    engine = Engine(graph, Execute(one))
    engine.run()
    assert engine.read("a").tolist() == [[12] * 3, [13] * 3]


@pytest.mark.parametrize(
    ("dtype", "n", "cycles"), [(FLOAT, 143, 77), (FLOAT, 8, 9), (HALF, 143, 41)]
)
def test_dot(dtype, n, cycles):
    rng = np.random.default_rng(1)
    a, b = rng.normal(size=n), rng.normal(size=n)
    engine, found = run(codelets.DOT, a=(dtype, a), b=(dtype, b), out=(FLOAT, 0.0))
    assert found == 6 * cycles
    a, b = a.astype(dtype.numpy).astype(float), b.astype(dtype.numpy).astype(float)
    assert engine.read("out") == pytest.approx(a @ b, rel=1e-5, abs=1e-5)


def test_control():
    engine, cycles = run(codelets.DECREMENT, value=(UNSIGNED_INT, np.array([5, 1])))
    assert engine.read("value").tolist() == [4, 0]
    assert cycles == 6 * 9
