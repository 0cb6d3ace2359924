"""Patterns that change while `fully_shard` shares out the values: as in one process."""

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


def test_every_algorithm_of_fixed_capacity():
    for found in on_ranks(2, work.compared, work.FIXED, 6):
        check(found, 6)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("optimizer", "block_size", "options"),
    [
        ("adam", 4, {}),
        pytest.param(*("adagrad", 1, {"reshard_after_forward": False}), marks=pytest.mark.slow),
    ],
)
def test_optimizers_blocks_and_ways_to_shard(optimizer, block_size, options):
    names = ["rigl", "set", "mest"]
    for found in on_ranks(2, work.compared_with, names, 6, optimizer, block_size, options):
        check(found, 6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "block_size", "names"),
    [
        ("adam", 1, work.FIXED),
        ("sgd", 4, ["rigl", "set", "mest"]),
        ("adagrad", 1, ["rigl-step", "deepr", "topkast"]),
    ],
)
def test_four_ranks(optimizer, block_size, names):
    options = {"reshard_after_forward": block_size == 1}
    for found in on_ranks(4, work.compared_with, names, 8, optimizer, block_size, options):
        check(found, 8, block_size == 1)


@pytest.mark.slow
def test_replicas_of_shards():
    for found in on_ranks(4, work.replicated_shards, ["rigl", "set"], 6):
        for against in found.values():
            assert all(same and off <= 1e-10 for same, off in against), against


def test_micro_batches_count_once_each():
    for found in on_ranks(2, work.micro_batches):
        assert all(same and off <= 1e-10 for same, off in found), found


def test_mixed_precision_leaves_ranks_alike():
    first, second = on_ranks(2, work.lower_precision)
    assert all(torch.equal(flat, second[name]) for name, flat in first.items())


def test_what_shards_cannot_follow():
    first, second = on_ranks(2, work.refused)
    assert first == second
