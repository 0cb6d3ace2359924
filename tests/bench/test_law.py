"""The fitted scaling law and the break-even density, on cells with known results."""

import itertools
import math

import pytest
from bench_laws import POPSPARSE, Law, Point, break_even, fit, fit_laws, most_threads, points
from hypothesis import given
from hypothesis import strategies as st

SIZES = list(itertools.product((256, 1024, 4096), (0.01, 0.1, 0.3), (1, 4, 16)))


def follow(c, a, b, e, noise=(1.0,)):
    return [
        Point(n, 128, d, block, c * n**a * d**b * block**e * factor)
        for (n, d, block), factor in zip(SIZES, itertools.cycle(noise), strict=False)
    ]


@given(
    st.floats(1e-4, 10), st.floats(-1, 1), st.floats(-1, 1), st.floats(-1, 1)
)  # fmt: skip
def test_fit_recovers_known_exponents(c, a, b, e):
    law = fit(follow(c, a, b, e))
    assert law.c == pytest.approx(c, rel=1e-6)
    assert (law.a, law.b, law.e) == pytest.approx((a, b, e), abs=1e-8)
    assert law.factor == pytest.approx(1, abs=1e-6)
    assert law.cells == len(SIZES)
    assert law(512, 0.2, 8) == pytest.approx(c * 512**a * 0.2**b * 8**e, rel=1e-6)


def test_fit_recovers_the_published_law():
    law = fit(follow(*POPSPARSE.values()))
    assert (law.c, law.a, law.b, law.e) == pytest.approx((0.0013, 0.59, -0.54, 0.50))


def test_spread_reflects_the_noise():
    law = fit(follow(1.0, 0.5, -0.5, 0.5, noise=(1.1, 1 / 1.1)))
    assert 1.05 < law.factor < 1.15
    assert 1.05 < law.worst < 1.25


def test_constant_size_has_no_exponent():
    points = [p for p in follow(2.0, 0.5, -0.5, 0.5) if p.block == 4]
    law = fit(points)
    assert law.e is None
    assert (law.a, law.b) == pytest.approx((0.5, -0.5))
    assert law.c == pytest.approx(2.0 * 4**0.5)
    alone = fit(points[:1])
    assert (alone.a, alone.b, alone.e) == (None, None, None)
    assert alone.c == pytest.approx(points[0].speedup)
    assert alone(1, 0.1, 1) == pytest.approx(points[0].speedup)


def test_too_few_cells_give_no_law():
    assert fit([]) is None
    points = [Point(256, 1, 0.1, 1, 2.0), Point(512, 1, 0.2, 4, 2.0)]
    assert fit(points) is None
    assert isinstance(fit([*points, Point(512, 1, 0.1, 1, 3), Point(256, 1, 0.2, 1, 4)]), Law)


def speedups(*pairs, block=1):
    return [Point(1024, 128, density, block, speedup) for density, speedup in pairs]


def test_break_even_is_interpolated_logarithmically():
    (found,) = break_even(speedups((0.8, 0.5), (0.2, 2.0), (0.1, 4.0)))
    assert found.crosses
    assert found.density == pytest.approx(math.sqrt(0.2 * 0.8))
    assert (found.densest, found.speedup_there) == (0.8, 0.5)


def test_break_even_out_of_reach():
    (above,) = break_even(speedups((0.1, 4.0), (0.9, 1.0)))
    assert (above.density, above.crosses) == (0.9, False)
    (below,) = break_even(speedups((0.1, 0.9), (0.5, 0.4)))
    assert (below.density, below.crosses) == (None, True)


def test_break_even_is_the_first_crossing_of_each_layer_and_block():
    cells = speedups((0.1, 2.0), (0.2, 0.5), (0.3, 1.5)) + speedups((0.1, 3.0), block=16)
    first, second = break_even(cells)
    assert (first.block, first.density) == (1, pytest.approx(math.sqrt(0.1 * 0.2)))
    assert (second.block, second.density) == (16, 0.1)
    assert break_even([]) == []


def test_law_ignores_small_batches_and_dense_layers():
    def cell(n, batch, density):
        return {"features": [n, n], "batch": batch, "density": density, "block": 1, "threads": 2,
                "dtype": "float32", "ratios": {"dense": {"median": n * density}}}  # fmt: skip

    sizes = [(n, 128, d) for n in (256, 512) for d in (0.1, 0.2)]
    cells = [cell(*size) for size in [*sizes, (64, 128, 0.1), (256, 1, 0.1), (256, 128, 0.5)]]
    results = {"benchmarks": {"a": {"measure": "step", "cells": cells}, "b": {"output": ""}}}
    assert most_threads(results) == 2
    assert len(list(points(results, "dense", 2))) == 7
    assert list(points(results, "dense", 1)) == list(points(results, "masked", 2)) == []
    laws = fit_laws(results)
    assert laws.keys() == {"dense"}
    assert laws["dense"].cells == 4
