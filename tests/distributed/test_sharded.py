"""Sparse layers whose values `fully_shard` shares out among ranks, against one process."""

import pytest
import sharded_runs as runs
from processes import on_ranks


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_static_training_equals_one_process(size):
    for found in on_ranks(size, runs.static):
        assert max(found.values()) < 1e-10, found


def test_mixed_precision_is_as_near_as_bfloat16_is():
    for found in on_ranks(2, runs.lower_precision):
        assert max(found.values()) < 0.03, found


def test_pairs_of_every_pass_are_found():
    assert all(on_ranks(2, runs.captured))


def test_states_and_what_needs_all_values():
    assert all(on_ranks(2, runs.doors))
