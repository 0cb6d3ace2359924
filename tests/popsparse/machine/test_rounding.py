"""Stochastic rounding is unbiased, exact for representable numbers, and off by default."""

import numpy as np
import pytest

from popsparse.machine import FLOAT, HALF, Codelet, Engine, Execute, Graph, In, InOut, Out, Target
from popsparse.machine.vertex import round_at_random

VALUES = [1.0003, -2.7e-6, 65503.0, 1e-9, -0.3333, 1e-5]


def rounded(value, count=200_000, seed=0):
    values = np.full(count, value, np.float32)
    return round_at_random(values, np.random.default_rng(seed)).astype(np.float64)


@pytest.mark.parametrize("value", VALUES)
def test_mean_equals_the_value(value):
    results = rounded(value)
    low, high = np.unique(results)
    assert low < np.float32(value) < high
    assert high == np.nextafter(np.float16(low), np.float16(np.inf))
    error = 5 * results.std() / np.sqrt(len(results))
    assert results.mean() == pytest.approx(np.float32(value), rel=0, abs=error)


@pytest.mark.parametrize("value", [0.0, 3.0, -65504.0, 2.0**-24, np.inf, -np.inf, np.nan])
def test_float16_numbers_are_exact(value):
    assert np.array_equal(rounded(value, 50), np.full(50, value), equal_nan=True)


def test_overflow_gives_infinity():
    with np.errstate(over="ignore"):
        assert np.isinf(rounded(65_530.0, 50)).all()
    assert (rounded(65_519.0, 50) == 65_504).all()


def engine(**options):
    """Make a vertex on each of two tiles: y = x / 3, total += y / 7, in float16; one is strided."""
    graph = Graph(Target.mk2(tiles=2))
    tiles = np.arange(2)
    x = graph.add_variable(FLOAT, [2, 1000], "x", tiles=tiles)
    y = graph.add_variable(HALF, [2, 1000], "y", tiles=tiles)
    total = graph.add_variable(HALF, [2, 2000], "total", tiles=tiles)

    def compute(v):
        v.y[...] = v.x / np.float32(3)
        v.total[...] = v.total + v.x / np.float32(7)

    fields = {"x": In(FLOAT), "y": Out(HALF), "total": InOut(HALF)}
    codelet = Codelet("thirds", fields, compute, cycles=lambda v: v.y.itemsize * v.y.shape[-1])
    step = graph.add_compute_set("step")
    graph.add_vertices(step, codelet, tiles, {"x": x, "y": y, "total": total[:, ::2]})
    made = Engine(graph, Execute(step), **options)
    made.write("x", np.linspace(1, 2, 2000, dtype=np.float32).reshape(2, 1000))
    made.write("total", 0)
    return made


def test_vertices_round_their_outputs():
    plain, exact = engine(), np.linspace(1, 2, 2000, dtype=np.float32).reshape(2, 1000)
    cycles = plain.run().cycles
    assert np.array_equal(plain.read("y"), (exact / 3).astype(np.float16))
    assert np.array_equal(plain.read("total")[:, ::2], (exact / 7).astype(np.float16))
    drawn, again = engine(stochastic_rounding=3), engine(stochastic_rounding=3)
    for made in (drawn, again):
        assert made.run().cycles == cycles
    for name in ("y", "total"):
        assert np.array_equal(drawn.read(name), again.read(name))
    for values, divisor in ((drawn.read("y"), 3), (drawn.read("total")[:, ::2], 7)):
        errors = (values - exact / divisor) / np.spacing(values)
        assert np.abs(errors).max() <= 1
        assert (np.abs(errors) > 0.5).any()
        assert abs(errors.mean()) < 4 * errors.std() / np.sqrt(errors.size)
    assert not drawn.read("total")[:, 1::2].any()  # what no vertex writes
    first = drawn.read("y")
    drawn.run()
    assert not np.array_equal(drawn.read("y"), first)


def test_seed_must_be_an_integer():
    with pytest.raises(ValueError, match="stochastic_rounding must be an integer of at least 0"):
        engine(stochastic_rounding=-1)
