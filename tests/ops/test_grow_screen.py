"""Growth that looks at a gradient in bfloat16 first: what float64 says is what must come out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from dynsparse import SparsePattern, native
from dynsparse.ops.grow import in_rows, screen, topk_outside
from dynsparse.ops.grow.naive import topk_outside_naive

pytestmark = pytest.mark.skipif(
    native.bfloat16_unit() == "float32" or not screen.bfloat16_products(),
    reason="no fast products of bfloat16",
)

SHAPE = (210, 330)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small layers are screened, in pieces of 64 rows."""
    monkeypatch.setattr(screen, "_WORTHWHILE", 0)
    monkeypatch.setattr(screen, "_CHUNK_BYTES", 64 * 2 * SHAPE[1])
    monkeypatch.setattr(in_rows, "_SAMPLE_FROM", 0)


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


@pytest.mark.parametrize("batches", [(7,), (64,), (300,), (20, 33, 1)])
@pytest.mark.parametrize("threads", [1, 2])
def test_the_same_choice(batches, threads, generator, monkeypatch):
    calls = []
    made = screen.candidates
    monkeypatch.setattr(screen, "candidates", lambda *a: calls.append(made(*a)) or calls[-1])
    pairs = pairs_of(generator, *batches)
    pattern = SparsePattern.random(SHAPE, 0.2, generator=generator)
    exclude = SparsePattern.random(SHAPE, 0.01, generator=generator).flat
    exclude = exclude[~pattern.contains(exclude)]
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    found = topk_outside(pairs, pattern, 500, exclude=exclude)
    assert len(calls) == 1
    assert calls[0] is not None
    assert not torch.isin(found.flat, exclude).any()
    assert not pattern.contains(found.flat).any()
    exact = gradient(pairs).flatten()
    assert_close(found.scores.double(), exact[found.flat], rtol=1e-5, atol=1e-5)
    exact[exclude] = 0
    exact[pattern.flat] = 0
    assert_close(found.scores.double(), exact.topk(500).values, rtol=1e-5, atol=1e-5)


def test_errors_that_all_point_the_same_way(monkeypatch):
    # Just short of the middle between two neighbours: bfloat16 takes every factor for 1, and so
    # every product for one 0.8 % smaller than it is, where the last column is exact.
    short = 1 + 2.0**-8 - 2.0**-12
    x = torch.full((100, SHAPE[1]), short)
    dy = torch.full((100, SHAPE[0]), short)
    x[:, -1] = 1.0
    pattern = SparsePattern([], [], shape=SHAPE)
    nothing = torch.zeros(0, dtype=torch.int64)
    # Above what bfloat16 says of all, below what is true of all but the last column.
    threshold = 100 * short * short * 0.999
    monkeypatch.setattr(screen, "MOST", 1)
    found = screen.candidates([(x, dy)], pattern, nothing, threshold)
    assert found is not None
    expected = (gradient([(x, dy)]) > threshold).flatten().nonzero().flatten()
    assert torch.equal(found[0][found[1] > threshold], expected)
    assert len(expected) == SHAPE[0] * (SHAPE[1] - 1)


def test_too_many_candidates_are_left_to_float32(generator, monkeypatch):
    pairs = pairs_of(generator, 40)
    pattern = SparsePattern.random(SHAPE, 0.1, generator=generator)
    nothing = torch.zeros(0, dtype=torch.int64)
    assert screen.candidates(pairs, pattern, nothing, 1e-3) is None
    found = topk_outside(pairs, pattern, pattern.total // 2)
    flat, scores = topk_outside_naive(pairs, pattern, pattern.total // 2)
    assert torch.equal(found.flat, flat)
    assert torch.equal(found.scores, scores)


def test_only_where_the_bound_holds(generator):
    ((x, dy),) = pairs_of(generator, 30)
    assert screen.serves([(x, dy)], 1.0)
    assert not screen.serves([(x * 1e20, dy)], 1.0)  # may overflow
    assert not screen.serves([(x * 1e-20, dy)], 1e-20)  # squares of x underflow
    assert not screen.serves([(x.double(), dy.double())], 1.0)
    assert not screen.serves([(x.bfloat16(), dy.bfloat16())], 1.0)
