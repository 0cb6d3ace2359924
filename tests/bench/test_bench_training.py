"""Benchmark of small trainings on the synthetic task."""

import json
import sys
from pathlib import Path

import pytest
import torch

from dynsparse.bench.cells import Cell

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from whole_trainings import CLASSES, PIXELS, Settings, Task, make_task, train_side_by_side

CELL = Cell((PIXELS, 16, CLASSES), 8, 0.2)


@pytest.fixture(scope="module")
def task():
    return make_task(train=64, test=32, seed=1)


def test_task_has_the_shape_of_cifar_10():
    task = make_task(train=3000, test=500, signal=0.5)
    assert task.train.shape == (3000, 3072)
    assert (task.test.shape, task.test_labels.shape) == ((500, 3072), (500,))
    assert set(task.train_labels.tolist()) == set(range(10))
    assert abs(float(task.train.mean())) < 0.05
    assert float(task.train.var()) == pytest.approx(1, rel=0.05)
    # A class has no mean, so that hidden layers are needed to tell it.
    means = torch.stack([task.train[task.train_labels == k].mean(0) for k in range(10)])
    assert float(means.square().mean()) < 0.02


def test_seed_determines_the_task():
    one, same, other = (make_task(train=8, test=4, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(one.train, same.train)
    assert torch.equal(one.test_labels, same.test_labels)
    assert not torch.equal(one.train, other.train)


def test_sparse_and_masked_trainings_are_equal(task):
    options = Settings(accuracy=1.0, steps=6, interval=2, evaluate=2)
    before = torch.random.get_rng_state()
    found = train_side_by_side(CELL, options, 3, task=task, read=lambda: None)
    assert torch.equal(before, torch.random.get_rng_state())
    assert (found["seed"], found["accuracy"], found["foreign"]) == (3, 1.0, None)
    assert found["density"] == pytest.approx(0.2, abs=1e-3)
    own, other = (found["contenders"][name] for name in ("dynsparse", "masked"))
    assert own["steps"] is None or own["steps"] <= 6
    assert own["updates"] == other["updates"] == 2
    assert own["seconds"] is None or own["seconds"] > own["update_seconds"] > 0
    assert [point[0] for point in own["curve"]] == [2, 4, 6]
    # The same weights, patterns and batches: accuracies part by rounding alone.
    for (_, _, a), (_, _, b) in zip(own["curve"], other["curve"], strict=True):
        assert a == pytest.approx(b, abs=0.1)
    json.dumps(found)


def test_training_ends_when_both_reach_the_accuracy(task):
    easy = Task(task.train, torch.zeros_like(task.train_labels), task.test,
                torch.zeros_like(task.test_labels))  # fmt: skip
    options = Settings(accuracy=0.9, steps=200, interval=10, evaluate=5, learning_rate=0.1)
    found = train_side_by_side(CELL, options, task=easy, read=lambda: None)
    for run in found["contenders"].values():
        assert run["steps"] is not None
        assert run["steps"] < 200
        assert run["steps"] == run["curve"][-1][0]
        assert run["seconds"] == run["curve"][-1][1]


def test_blocks_are_used_where_they_divide_the_layer(task):
    cell = Cell((PIXELS, 32, 16, CLASSES), 8, 0.2, block=16)
    options = Settings(accuracy=1.0, steps=2, interval=1, evaluate=2)
    found = train_side_by_side(cell, options, task=task, read=lambda: None)
    assert 0.2 <= found["density"] < 0.22
