"""Ranks of all stages as one: what they add up and hear is that of everybody."""

from __future__ import annotations

import pytest
import torch
from grids import on_grid

from dynsparse.ranks import ALONE, StackedRanks, collective_errors, select_over_ranks


def joint_of(grid):
    """x lies inside a stage, z along the stages."""
    return StackedRanks(grid.x, grid.z)


def test_moves_are_those_of_everybody():
    def work(grid):
        joint = joint_of(grid)
        assert joint.size == 6
        own = torch.tensor([1, joint.rank])
        assert joint.sum(own.clone()).tolist() == [6, 15]
        assert joint.max(own.clone()).tolist() == [1, 5]
        sizes = [part.tolist() for part in joint.all_gather(torch.arange(joint.rank))]
        assert sizes == [list(range(rank)) for rank in range(6)]
        assert joint.broadcast(torch.tensor([joint.rank]), 4).tolist() == [4]
        scores = torch.arange(4.0) * 6 + joint.rank
        (found,) = select_over_ranks(joint, [scores], [torch.arange(4) * 6 + joint.rank], [7])

        def fails_on_one():
            with collective_errors(joint):
                if joint.rank == 4:
                    raise ValueError("bad")

        with pytest.raises(ValueError, match="rank 4: bad"):
            fails_on_one()
        with pytest.raises(TypeError, match="pipeline stages have no all_to_all"):
            joint.all_to_all(torch.zeros(6))
        return scores[found].tolist()

    found = on_grid((3, 1, 2), work)
    assert sorted(one for own in found.values() for one in own) == list(range(17, 24))


def test_one_rank_in_each_stage():
    def work(grid):
        joint = StackedRanks(ALONE, grid.z)
        return joint.rank, joint.sum(torch.ones(1)).item()

    assert on_grid((1, 1, 2), work) == {(0, 0, 0): (0, 2.0), (0, 0, 1): (1, 2.0)}
