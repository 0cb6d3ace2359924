"""Splits of work over workers: everything once, no worker empty."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from popsparse.planning.cycles import even_split, grid_split, grid_splits, split_rows


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 8))
def test_grid_covers_everything_once(rows, grains, workers):
    pieces = grid_split(rows, grains, workers)
    covered = np.zeros((rows, grains), int)
    for row, height, grain, width in pieces:
        assert height >= 1
        assert width >= 1
        covered[row : row + height, grain : grain + width] += 1
    assert (covered == 1).all()
    assert len(pieces) <= workers


def test_grids_of_many_rectangles():
    rows, grains = np.array([3, 12, 3]), np.array([5, 1, 5])
    heights, widths = grid_splits(rows, grains, 6)
    for i in range(3):
        _, height, _, width = zip(*grid_split(int(rows[i]), int(grains[i]), 6), strict=True)
        assert heights[:, i].tolist() == list(height)
        assert widths[:, i].tolist() == list(width)
    # One row of two grains: four of six workers have nothing, and repeat the first.
    assert [a.T.tolist() for a in grid_splits(np.array([1]), np.array([2]), 6)] == [[[1] * 6]] * 2


def test_grid_by_hand():
    # Six workers, one row of four grains: only four can work.
    assert grid_split(1, 4, 6) == tuple((0, 1, z, 1) for z in range(4))
    # Twelve rows of one grain: two rows each.
    assert grid_split(12, 1, 6) == tuple((x, 2, 0, 1) for x in range(0, 12, 2))


@settings(deadline=None, max_examples=100)
@given(st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=60), max_size=6),
       st.integers(1, 5), st.integers(1, 6))  # fmt: skip
def test_rows_are_split_completely(groups, grains, workers):
    rows = np.array([len(group) for group in groups], np.int64)
    lengths = np.array([n for group in groups for n in group], np.int64)
    pieces = split_rows(rows, lengths, grains, workers)
    covered = [np.zeros((n, grains), int) for n in rows]
    used = np.zeros(len(groups), int)
    for group, number, row, height, grain, width in zip(*pieces, strict=True):
        assert number == used[group]
        assert height >= 1
        used[group] += 1
        covered[group][row : row + height, grain : grain + width] += 1
    assert all((c == 1).all() for c in covered)
    assert (used <= workers).all()


def test_many_rows_are_split_by_nonzeros():
    lengths = np.array([10] * 2 + [1] * 20)
    pieces = split_rows(np.array([22]), lengths, 3, 2)
    # 40 non-zeros: the first two rows are half the work.
    assert pieces.row.tolist() == [0, 2]
    assert pieces.rows.tolist() == [2, 20]
    assert pieces.grains.tolist() == [3, 3]


@pytest.mark.parametrize(("count", "sizes"), [(13, [2, 2, 2, 2, 2, 3]), (2, [1, 1]), (0, [])])
def test_even_split(count, sizes):
    group, begin, size = even_split(np.array([count]), 6)
    assert size.tolist() == sizes
    assert begin.tolist() == [sum(sizes[:i]) for i in range(len(sizes))]
    assert group.tolist() == [0] * len(sizes)
