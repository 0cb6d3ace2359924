"""Compiled growth equals plain torch, positions and scores bit for bit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernels_of import ISAS, with_library

from dynsparse import SparsePattern
from dynsparse.ops.grow import select, topk_outside
from dynsparse.ops.grow.search import RunningBest

pytestmark = pytest.mark.skipif(not ISAS, reason="no compiled kernels")


def assert_same(function):
    for threads in (1, 2):
        # The dense products underneath may round otherwise on another number of threads.
        plain = with_library(None, function, threads)
        for isa in ISAS:
            found = with_library(isa, function, threads)
            assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True)), (isa, threads)


@pytest.mark.parametrize("b", [1, 4])
@pytest.mark.parametrize("ties", [False, True])
def test_several_threads(b, ties, generator):
    n = 2100 * b
    x, dy = torch.randn(3, 260, generator=generator), torch.randn(3, n, generator=generator)
    if ties:
        x, dy = x.round(), dy.round()
    pattern = SparsePattern.random((n, 260), density=0.1, block_size=b, generator=generator)
    for k in (1, pattern.total // 10, pattern.total - pattern.nnz):
        assert_same(lambda k=k: topk_outside([(x, dy)], pattern, k, sort=False))


@pytest.mark.parametrize("k", [2000, 8000, 11_000])
def test_misleading_sample_for_the_threshold(k, generator):
    """The scan estimates the threshold from every 21st score, and exactly those are made large."""
    scores = torch.rand(300, 300, generator=generator)
    scores.view(-1)[::21] += 10
    pattern = SparsePattern.random((300, 300), density=0.01, generator=generator)

    def best():
        found = RunningBest(k, 90_000, -1.0, torch.float32, scores.device)
        found.add(scores.clone(), pattern, 0)
        found.compact()
        return found.flat[:k], found.scores[:k]

    assert_same(best)


@given(
    st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=300),
    st.booleans(),
    st.data(),
)
def test_select_any_floats(numbers, largest, data):
    scores = torch.tensor(numbers, dtype=torch.float32)  # infinities and both zeros among them
    k = data.draw(st.integers(0, len(numbers)))
    assert_same(lambda: (select(scores, k, largest=largest),))


@pytest.mark.parametrize("kind", ["normal", "few values", "zeros", "one magnitude"])
def test_select_of_many(kind, generator):
    scores = torch.randn(70_001, generator=generator)
    if kind == "few values":
        scores = (3 * scores).round()
    elif kind == "zeros":
        scores = scores * 0  # of both signs
    elif kind == "one magnitude":
        scores = 1 + scores.abs() * 1e-6
    for k in (1, 1000, 35_000, 70_000):
        for largest in (False, True):
            assert_same(lambda k=k, largest=largest: (select(scores, k, largest=largest),))
    every_other = scores[::2]  # not contiguous
    assert_same(lambda: (select(every_other, 9),))
