"""Sparse layers whose values are sharded by `fully_shard` equal those of one process."""

import pytest
import sharded_runs as runs
from processes import on_ranks


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_static_training_equals_one_process(size):
    for found in on_ranks(size, runs.compare_static_training):
        assert max(found.values()) < 1e-10, found


def test_mixed_precision_gradients_within_bfloat16_error():
    for found in on_ranks(2, runs.compare_mixed_precision):
        assert max(found.values()) < 0.03, found


def test_pairs_of_every_pass_are_captured():
    assert all(on_ranks(2, runs.check_captured_pairs))


def test_state_dicts_and_operations_on_full_values():
    assert all(on_ranks(2, runs.check_states_and_errors))
