"""Pattern updates of values sharded by `fully_shard` equal those of one process."""

import pytest
import sharded_training as work
import torch
from processes import on_ranks


def check(found, steps, changes=True):
    for name, (same, weights, state, changed) in found.items():
        assert same == steps, (name, same)
        assert weights <= 1e-10, (name, weights)
        assert state <= 1e-10, (name, state)
        assert changed or not changes, name


def test_every_algorithm_of_fixed_capacity_equals_one_process():
    for found in on_ranks(2, work.compare_algorithms, work.FIXED, 6):
        check(found, 6)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("optimizer", "block_size", "options"),
    [
        ("adam", 4, {}),
        pytest.param(*("adagrad", 1, {"reshard_after_forward": False}), marks=pytest.mark.slow),
    ],
)
def test_optimizers_block_sizes_and_resharding(optimizer, block_size, options):
    names = ["rigl", "set", "mest"]
    for found in on_ranks(2, work.compare_with_options, names, 6, optimizer, block_size, options):
        check(found, 6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "block_size", "names"),
    [("adam", 1, work.FIXED), ("sgd", 4, ["rigl", "rigl-global", "set", "topkast"])],
)
def test_four_ranks_equal_one_process(optimizer, block_size, names):
    options = {"reshard_after_forward": block_size == 1}
    for found in on_ranks(4, work.compare_with_options, names, 8, optimizer, block_size, options):
        check(found, 8, block_size == 1)


@pytest.mark.slow
def test_hybrid_sharding_equals_one_process():
    for found in on_ranks(4, work.compare_hybrid_sharding, ["rigl", "set"], 6):
        for against in found.values():
            assert all(same and off <= 1e-10 for same, off in against), against


def test_gradient_accumulation_equals_one_process():
    for found in on_ranks(2, work.compare_micro_batches):
        assert all(same and off <= 1e-10 for same, off in found), found


def test_mixed_precision_keeps_patterns_equal_on_all_ranks():
    first, second = on_ranks(2, work.train_in_mixed_precision)
    assert all(torch.equal(flat, second[name]) for name, flat in first.items())


@pytest.mark.quick
def test_gradients_set_to_zero_in_place_are_new():
    assert on_ranks(2, work.step_in_turn) == [3, 3]


def test_unsupported_operations_raise_the_same_error_on_all_ranks():
    first, second = on_ranks(2, work.check_unsupported)
    assert first == second
