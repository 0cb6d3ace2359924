"""Pipelines of torch: patterns as in one process, also random ones."""

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
def test_every_schedule(algorithm):
    check(on_ranks(2, work.all_staged, [(s, algorithm) for s in work.SCHEDULES], 4), work.MICRO)


@pytest.mark.slow
def test_stages_that_are_sharded():
    """Two stages, each shared out between two ranks that see samples of their own."""
    ways = [("GPipe", "rigl"), ("1F1B", "set")]
    check(on_ranks(4, work.all_staged, ways, 4, 2, seconds=300), work.MICRO)


def test_each_gradient_is_made_once():
    """Also by schedules that go through a layer twice, once for each gradient."""
    for found in on_ranks(2, work.passes):
        assert {of_values for _, of_values in found.values()} == {2 * work.MICRO}
        whole = found["interleaved"]
        assert found["zero bubble"] == found["zero bubble V"] == whole
        # Some ask once more for those of inputs, to learn of shapes.
        assert all(of_inputs <= 2 * work.MICRO + 2 for of_inputs, _ in found.values())


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_stages_in_one_replica_each_rank(schedule):
    """torch's reducer takes micro-batches only with find_unused_parameters=True."""
    for found in on_ranks(2, work.in_replicas, schedule, 4):
        assert all(same and off <= 1e-10 for same, off in found)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_stages_in_replicas(schedule):
    for found in on_ranks(4, work.in_replicas, schedule, 4):
        assert all(same and off <= 1e-10 for same, off in found)


def test_stages_whose_layers_are_in_rectangles():
    """Two stages of two ranks."""
    ways = [("GPipe", "rigl"), ("1F1B", "set")]
    check(on_ranks(4, work.all_in_rectangles, ways, 4), work.MICRO)


@pytest.mark.slow
def test_three_dimensions_on_eight_ranks():
    """Stages of a pipeline, samples and slabs of layers, two of each."""
    ways = [("GPipe", "rigl"), ("1F1B", "set")]
    check(on_ranks(8, work.all_in_rectangles, ways, 4, 2, seconds=300), work.MICRO)
