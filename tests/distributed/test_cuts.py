"""Balanced shards, compared with all possible cuts and with slices of dense matrices."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dynsparse import SparsePattern
from dynsparse.distributed.placement import balance, balance_features, slice_pattern


def largest(loads, borders):
    return max(sum(loads[a:b]) for a, b in pairwise(borders))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.data())
def test_balance_minimizes_the_largest_part(loads, data):
    parts = data.draw(st.integers(1, len(loads)))
    borders = balance(loads, parts)
    assert borders[0] == 0
    assert borders[-1] == len(loads)
    assert len(borders) == parts + 1
    assert all(a < b for a, b in pairwise(borders))
    ways = combinations(range(1, len(loads)), parts - 1)
    if any(loads):
        assert largest(loads, borders) == min(largest(loads, (0, *w, len(loads))) for w in ways)


@pytest.mark.parametrize(
    ("loads", "parts", "borders"),
    [
        ([1] * 10, 4, (0, 3, 5, 8, 10)),
        ([5, 1, 1, 1, 1, 1], 2, (0, 1, 6)),
        ([0, 0, 0], 2, (0, 2, 3)),
        ([1, 1, 1, 100], 3, (0, 2, 3, 4)),
        ([7], 1, (0, 1)),
    ],
)
def test_balance_examples(loads, parts, borders):
    assert balance(loads, parts) == borders


@pytest.mark.parametrize("wrong", [([1], 2), ([], 1), ([1, 2], 0), ([1, -1], 1)])
def test_balance_rejects_bad_arguments(wrong):
    with pytest.raises(ValueError, match=r"cannot cut|parts must|loads must"):
        balance(*wrong)


@given(st.integers(1, 4), st.integers(1, 4), st.sampled_from([1, 2, 4]), st.integers(0, 2**16))
def test_slice_pattern_equals_dense_slices(x, y, b, seed):
    generator = torch.Generator().manual_seed(seed)
    pattern = SparsePattern.random((8 * b, 6 * b), 0.4, block_size=b, generator=generator)
    values = torch.rand(pattern.values_shape, generator=generator) + 1
    dense = pattern.to_dense(values)
    rows, cols = balance_features([pattern], [], x), balance_features([], [pattern], y)
    slots = []
    for top, bottom in pairwise(rows):
        for left, right in pairwise(cols):
            part, own = slice_pattern(pattern, (top, bottom), (left, right))
            assert torch.equal(part.to_dense(values[own]), dense[top:bottom, left:right])
            slots.append(own)
    assert torch.equal(torch.cat(slots).sort().values, torch.arange(pattern.nnz))


def test_borders_balance_both_layers_of_a_pair():
    # The first layer writes feature 0 with 6 elements, the second reads feature 3 with 6.
    up = SparsePattern([0] * 6 + [1, 2, 3], [*range(6), 0, 0, 0], shape=(4, 6))
    down = SparsePattern([*range(6), 0, 0, 0], [3] * 6 + [0, 1, 2], shape=(6, 4))
    assert balance_features([up], [], 2) == (0, 1, 4)
    assert balance_features([], [down], 2) == (0, 3, 4)
    assert balance_features([up], [down], 2) == (0, 2, 4)
    wide = SparsePattern.random((6, 4), 0.5, block_size=2)
    assert balance_features([up], [wide], 2) == (0, 2, 4)  # where blocks end
    with pytest.raises(ValueError, match="cannot cut 4 features into 2 shards at multiples of 4"):
        balance_features([up], [], 2, unit=4)
