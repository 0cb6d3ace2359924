"""Random positions outside a pattern."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dynsparse import SparsePattern
from dynsparse.ops.grow import random_outside


@given(st.integers(1, 12), st.integers(1, 12), st.data())
def test_free_distinct_and_sorted(height, width, data):
    total = height * width
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 100)))
    pattern = SparsePattern.random(
        (height, width), nnz=data.draw(st.integers(0, total)), generator=g
    )
    free = set(range(total)) - set(pattern.flat.tolist())
    k = data.draw(st.integers(0, len(free)))
    flat = random_outside(pattern, k, generator=g).tolist()
    assert flat == sorted(set(flat))
    assert len(flat) == k
    assert set(flat) <= free
    everything = random_outside(pattern, len(free), generator=g)
    assert everything.tolist() == sorted(free)


def test_positions_are_uniform(generator):
    pattern = SparsePattern([0, 0, 1, 2], [1, 2, 0, 2], shape=(3, 3))
    counts = torch.zeros(9)
    for _ in range(3000):
        counts[random_outside(pattern, 2, generator=generator)] += 1
    assert counts[pattern.flat].sum() == 0
    expected = 3000 * 2 / 5
    # Five standard deviations of a binomial count.
    deviation = (counts[counts > 0] - expected).abs()
    assert len(deviation) == 5
    assert deviation.max() < 5 * (expected * (1 - 2 / 5)) ** 0.5


def test_very_large_matrix(generator):
    pattern = SparsePattern.random((2**20, 2**20), nnz=1000, generator=generator)
    flat = random_outside(pattern, 1000, generator=generator)
    assert len(torch.unique(torch.cat([flat, pattern.flat]))) == 2000


def test_too_many_positions_raise():
    with pytest.raises(ValueError, match="cannot grow 2 positions: only 1 of 4 are free"):
        random_outside(SparsePattern([0, 0, 1], [0, 1, 0], shape=(2, 2)), 2)
