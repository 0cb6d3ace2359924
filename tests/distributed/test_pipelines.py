"""Training under torch's pipeline schedules equals training in one process."""

import pipelines as work
import pytest
from processes import on_ranks


def check(results, micro):
    for found in results:
        for way, (against, pairs, changed) in found.items():
            assert all(same for same, _ in against), way
            assert max(off for _, off in against) <= 1e-10, way
            assert pairs == ([micro] if "rigl" in way[1] else []), (way, pairs)
            assert changed


@pytest.mark.parametrize("algorithm", ["rigl", "set"])
def test_every_schedule_equals_one_process(algorithm):
    check(
        on_ranks(2, work.train_all_stages, [(s, algorithm) for s in work.SCHEDULES], 4), work.MICRO
    )


@pytest.mark.slow
def test_fully_sharded_stages():
    """Two stages, each sharded over two ranks with different samples."""
    ways = [("GPipe", "rigl"), ("1F1B", "set")]
    check(on_ranks(4, work.train_all_stages, ways, 4, 2, seconds=300), work.MICRO)


def test_each_gradient_is_computed_once():
    """Also by schedules that run a layer's backward pass twice, once per gradient."""
    for found in on_ranks(2, work.count_backward_products):
        assert {of_values for _, of_values in found.values()} == {2 * work.MICRO}
        whole = found["interleaved"]
        assert found["zero bubble"] == found["zero bubble V"] == whole
        # Some ask once more for those of inputs, to learn of shapes.
        assert all(of_inputs <= 2 * work.MICRO + 2 for of_inputs, _ in found.values())


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ddp_stages(size):
    """DistributedDataParallel accepts micro-batches only with find_unused_parameters=True."""
    ways = [("GPipe", "rigl"), ("1F1B", "rigl")]
    check(on_ranks(size, work.train_all_stages, ways, 4, 2, True), work.MICRO)


def test_stages_with_tensor_parallel_layers():
    """Two stages with two ranks each."""
    ways = [("GPipe", "rigl"), ("1F1B", "set")]
    check(on_ranks(4, work.train_all_tensor_parallel_stages, ways, 4), work.MICRO)


@pytest.mark.slow
def test_pipeline_data_and_tensor_parallel_on_eight_ranks():
    """Two pipeline stages, two replicas, two tensor-parallel ranks."""
    ways = [("GPipe", "rigl"), ("1F1B", "set")]
    check(on_ranks(8, work.train_all_tensor_parallel_stages, ways, 4, 2, seconds=300), work.MICRO)
