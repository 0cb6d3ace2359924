"""Gradient and random growth, called as by the trainer."""

import pytest
import torch

from dynsparse import SparsePattern
from dynsparse.ranks import GrowRequest
from dynsparse.training import GradientGrowth, RandomGrowth

PATTERN = SparsePattern([0, 1], [0, 2], shape=(2, 3))


def test_gradient_growth_selects_the_largest():
    x, dy = torch.eye(3), torch.tensor([[1.0, 3.0], [-4.0, 0.0], [2.0, -5.0]])
    growth = GradientGrowth()
    assert growth.needs_gradients
    (chosen,) = growth.choose([GrowRequest("fc", [(x, dy)], PATTERN, 2)], 1)
    assert chosen.tolist() == [1, 3]


def test_random_growth_stays_outside_and_resumes():
    growth = RandomGrowth(seed=4)
    assert not growth.needs_gradients
    request = GrowRequest("fc", [], PATTERN, 2)
    state = growth.state_dict()
    first = [growth.choose([request], step)[0].tolist() for step in range(20)]
    assert all(set(c) <= {1, 2, 3, 4} and len(set(c)) == 2 for c in first)
    again = RandomGrowth(seed=99)
    again.load_state_dict(state)
    assert [again.choose([request], step)[0].tolist() for step in range(20)] == first


def test_state_without_a_seed_raises():
    state = RandomGrowth(seed=4).state_dict()
    del state["seed"]
    with pytest.raises(ValueError, match="must hold an integer as its seed, got None"):
        RandomGrowth(seed=4).check_state(state)


def test_random_growth_without_a_seed_uses_the_global_generator():
    torch.manual_seed(7)
    first = RandomGrowth().seed
    torch.manual_seed(7)
    assert RandomGrowth().seed == first
    assert RandomGrowth().seed != first
