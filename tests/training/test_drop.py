"""Drop scores and the selection of dropped blocks."""

import pytest
import torch

from dynsparse.pattern import SparsePattern
from dynsparse.ranks import ALONE
from dynsparse.training import lowest, magnitude
from dynsparse.training.drop import lowest_over_ranks


def test_magnitude_of_elements_and_blocks():
    assert magnitude(torch.tensor([-3.0, 1.0, 0.0])).tolist() == [3, 1, 0]
    blocks = torch.tensor([[[1.0, -1.0], [1.0, -1.0]], [[3.0, 0.0], [0.0, 0.0]]])
    assert magnitude(blocks).tolist() == [4, 3]
    assert not magnitude(torch.ones(2, requires_grad=True)).requires_grad


def test_reference_case():
    # Of 10, 20, 30, 40, 50 the two smallest leave, whatever the signs.
    assert lowest(magnitude(torch.tensor([10.0, 20, 30, 40, 50])), 2).tolist() == [0, 1]
    assert lowest(magnitude(torch.tensor([50.0, -10, 30, -40, 20])), 3).tolist() == [1, 2, 4]


def test_all_none_and_ties():
    scores = torch.tensor([2.0, 1.0, 1.0, 3.0, 1.0])
    assert lowest(scores, 0).tolist() == []
    assert lowest(scores, 2).tolist() == [1, 2]
    assert lowest(scores, 5).tolist() == [0, 1, 2, 3, 4]
    assert lowest(torch.zeros(6), 3).tolist() == [0, 1, 2]


def test_bad_input():
    with pytest.raises(ValueError, match=r"one drop score per block, \[nnz\], got \[2, 2\]"):
        lowest(torch.ones(2, 2), 1)
    with pytest.raises(ValueError, match="cannot drop 4 of 3 blocks"):
        lowest(torch.ones(3), 4)
    with pytest.raises(ValueError, match="drop scores hold NaN"):
        lowest(torch.tensor([1.0, float("nan")]), 1)


@pytest.mark.parametrize("scores", [[3.0, 1, 2, 1, 1, 5], [6.0, 5, 4, 3, 2, 1], [0.0] * 6])
@pytest.mark.parametrize("count", [0, 1, 2, 4, 6])
def test_ties_are_dropped_by_position(scores, count):
    rows, cols = torch.tensor([2, 0, 1, 0, 2, 1]), torch.tensor([1, 2, 0, 0, 0, 2])
    pattern = SparsePattern._from_slot_coordinates(rows, cols, shape=(3, 3), block_size=1)
    slots = sorted(range(6), key=lambda i: (scores[i], rows[i], cols[i]))[:count]
    (leave,) = lowest_over_ranks(ALONE, [torch.tensor(scores)], [count], [pattern], [None])
    assert leave.tolist() == sorted(slots)
