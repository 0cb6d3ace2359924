"""Growth that screens the gradient with small-integer products first must equal float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from dynsparse import SparsePattern
from dynsparse._core import native
from dynsparse.ops.grow import search, topk_outside
from dynsparse.ops.grow.naive import topk_outside_naive
from dynsparse.ops.grow.topk import best_positions

pytestmark = pytest.mark.skipif(
    native.load() is None or not native.load().dynsparse_grow_screens(),
    reason="these kernels have no products of small integers",
)

SHAPE = (210, 330)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Screen small layers too."""
    monkeypatch.setattr(search, "_WORTHWHILE", 0)
    monkeypatch.setattr(search, "_SAMPLE_FROM", 0)


def pairs_of(generator: torch.Generator, *batches: int) -> list[tuple[Tensor, Tensor]]:
    return [
        (
            torch.randn(b, SHAPE[1], generator=generator),
            torch.randn(b, SHAPE[0], generator=generator),
        )
        for b in batches
    ]


def gradient(pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    return sum((dy.double().t() @ x.double() for x, dy in pairs), torch.zeros(())).abs()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Record the results of screens."""
    made, found = search.screen_positions, []
    monkeypatch.setattr(search, "screen_positions", lambda *a: found.append(made(*a)) or found[-1])
    return found


@pytest.mark.parametrize("batches", [(7,), (64,), (300,), (20, 33, 1), (5000,)])
@pytest.mark.parametrize("threads", [1, 2])
def test_equals_float64(batches, threads, generator, calls, monkeypatch):
    pairs = pairs_of(generator, *batches)
    pattern = SparsePattern.random(SHAPE, 0.2, generator=generator)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    found = topk_outside(pairs, pattern, 500)
    assert len(calls) == 1
    assert calls[0] is not None
    assert not pattern.contains(found.flat).any()
    exact = gradient(pairs).flatten()
    assert_close(found.scores.double(), exact[found.flat], rtol=1e-5, atol=1e-5)
    exact[pattern.flat] = 0
    assert_close(found.scores.double(), exact.topk(500).values, rtol=1e-5, atol=1e-5)
    exact = gradient(pairs).flatten()
    exact[pattern.flat] = 0
    positions = best_positions(pairs, pattern, 500)
    assert torch.equal(positions, exact.topk(500).indices.sort().values)
    assert len(calls) == 2
    opened, _, sure = calls[1]
    assert len(sure) > 300  # most need no scores
    assert len(opened) < 400


def screened(pairs, pattern, k, low, high=torch.inf):
    return search.screen_positions(pairs, pattern, k, low, high)


@pytest.mark.parametrize("side", [-1, 1])
def test_systematic_rounding_errors(side, monkeypatch):
    """Factors lie halfway between two integers, and one large number without a counterpart in dY
    makes the integers small, so sums have an error of 1.5 %."""
    scale = 32767 / 1000
    x, dy = torch.zeros(100, SHAPE[1]), torch.ones(100, SHAPE[0])
    x[0], dy[0] = 1000, 0
    x[1:] = (33 + side * 0.49) / scale
    exact = float(gradient([(x, dy)])[0, 0])
    monkeypatch.setattr(search, "_MOST", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # several share out the room evenly
    pattern = SparsePattern([], [], shape=SHAPE)
    _, flat, sure = screened([(x, dy)], pattern, pattern.total, 0.9999 * exact, 1.0001 * exact)
    assert len(flat) == pattern.total
    assert len(sure) == 0


@pytest.mark.parametrize("kind", ["integers", "rows of all sizes", "outliers", "zeros"])
@pytest.mark.parametrize("batch", [1, 2, 37, 4100])
def test_candidates_are_complete_and_certain_ones_correct(kind, batch, generator):
    x = torch.randn(batch, SHAPE[1], generator=generator)
    dy = torch.randn(batch, SHAPE[0], generator=generator)
    if kind == "integers":
        x, dy = (t.mul(2).round() for t in (x, dy))
    elif kind == "rows of all sizes":
        x *= torch.logspace(-6, 4, SHAPE[1])
        dy *= torch.logspace(5, -7, SHAPE[0])
    elif kind == "outliers":
        x[0] *= 100
        dy[-1] *= 300
    else:
        x[:, ::3], dy[:, 1::2] = 0, 0
    pattern = SparsePattern.random(SHAPE, 0.3, generator=generator)
    exact = gradient([(x, dy)]).flatten()
    exact[pattern.flat] = 0
    ranked = exact.sort(descending=True).values
    low, high = float(ranked[4000]), float(ranked[2000])
    scores, flat, sure = screened([(x, dy)], pattern, 8000, low, high)
    assert bool((flat[1:] > flat[:-1]).all())
    assert bool((sure[1:] > sure[:-1]).all())
    assert not torch.isin(flat, sure).any()
    there = torch.zeros(len(exact), dtype=torch.bool)
    there[flat], there[sure] = True, True
    assert there[exact > low].all()
    assert not there[pattern.flat].any()
    assert (exact[sure] > high).all()
    # In float32, whatever the integers say.
    assert_close(scores.double(), exact[flat], rtol=1e-4, atol=1e-4 * float(exact.max()))
    if kind not in ("integers", "outliers"):
        assert len(sure) > 1500


def test_more_certain_candidates_than_blocks_to_grow(generator, calls, monkeypatch):
    """Certain candidates are then ranked too."""
    pairs = pairs_of(generator, 40)
    pattern = SparsePattern.random(SHAPE, 0.1, generator=generator)
    own = search.guess_thresholds
    monkeypatch.setattr(search, "guess_thresholds", lambda *a: (own(*a)[0], 0.9 * own(*a)[0]))
    expected = topk_outside_naive(pairs, pattern, 500)[0].sort().values
    assert torch.equal(best_positions(pairs, pattern, 500), expected)
    assert len(calls) == 1


def test_too_many_candidates_fall_back_to_float32(generator):
    pairs = pairs_of(generator, 40)
    pattern = SparsePattern.random(SHAPE, 0.1, generator=generator)
    assert screened(pairs, pattern, 10, 1e-3) is None
    found = topk_outside(pairs, pattern, pattern.total // 2)
    flat, scores = topk_outside_naive(pairs, pattern, pattern.total // 2)
    assert torch.equal(found.flat, flat)
    assert torch.equal(found.scores, scores)


def test_screens_only_where_the_bound_holds(generator):
    ((x, dy),) = pairs_of(generator, 30)
    assert search.can_screen([(x, dy)], 1.0)
    assert not search.can_screen([(x * 1e20, dy)], 1.0)  # may overflow
    assert not search.can_screen([(x * 1e-20, dy)], 1e-20)  # squares of x underflow
    assert not search.can_screen([(x.double(), dy.double())], 1.0)
    assert not search.can_screen([(x.bfloat16(), dy.bfloat16())], 1.0)
