"""Checkpoints of tensor-parallel layers load on any other mesh, on replicas and in one process."""

from __future__ import annotations

import copy

import pytest
import torch
from grids import GRIDS, on_grid
from rank_trainings import ALGORITHMS, model_of, optimizer_of
from slot_order import row_major
from test_split_training import step_of
from threaded import run_on_ranks

import dynsparse as ds
from dynsparse.distributed import gather, split
from dynsparse.distributed.sharded_layer import spec_of
from dynsparse.training.checkpoint.rank_state import Sources
from dynsparse.training.checkpoint.tensor_parallel import rebalance

ALONE = (1, 1, 1)


def state_of(model, optimizer):
    """Return the full model's state and optimizer state in row-major order."""
    found = dict(gather(model))
    own = copy.deepcopy(model)
    for key in ("exp_avg", "exp_avg_sq"):
        with torch.no_grad():
            for mine, theirs in zip(own.parameters(), model.parameters(), strict=True):
                mine.copy_(optimizer.state[theirs][key])
        found |= {f"{key} of {name}": t.clone() for name, t in gather(own).items()}
    return row_major(found)


def reference(name, block_size, steps):
    model = model_of(block_size=block_size, density=0.3)
    optimizer = optimizer_of(model, "adam")
    trainer = ALGORITHMS[name](model, optimizer, ranks=None)
    for step in range(steps):
        step_of(model, optimizer, trainer, step)
    return {key: tensor.clone() for key, tensor in state_of(model, optimizer).items()}


def resume_and_save(sizes, name, block_size, source, target, first, last):
    """Load `source` on a mesh, train, save `target`; return the full state."""
    model = model_of(seed=0 if source is None else 9, block_size=block_size, density=0.3)

    def work(grid=None):
        own, ranks = copy.deepcopy(model), None
        if grid is not None:
            own, ranks = split(own, grid), grid
        optimizer = optimizer_of(own, "adam")
        trainer = ALGORITHMS[name](own, optimizer, ranks=ranks)
        parts = {"model": own, "optimizer": optimizer, "trainer": trainer, "ranks": ranks}
        if source is not None:
            assert ds.training.load_checkpoint(source, **parts, random_state=False) == {"at": first}
            assert trainer.steps == first
        for step in range(first, last):
            step_of(own, optimizer, trainer, step, grid)
        ds.training.save_checkpoint(target, **parts, extra={"at": last})
        return state_of(own, optimizer)

    return [work()] if sizes == ALONE else list(on_grid(sizes, work).values())


def check_legs(legs, name, tmp_path, block_size=1, steps=3):
    source = None
    for number, sizes in enumerate(legs):
        target = str(tmp_path / str(number))
        first, last = number * steps, (number + 1) * steps
        expected = reference(name, block_size, last)
        for found in resume_and_save(sizes, name, block_size, source, target, first, last):
            assert found.keys() == expected.keys()
            for key, tensor in expected.items():
                if key.endswith(("rows", "cols")):
                    assert torch.equal(found[key], tensor), (number, key)
                else:
                    assert (found[key] - tensor).abs().max() <= 1e-12, (number, key)
        source = target


@pytest.mark.parametrize("block_size", [1, 4])
def test_resume_on_other_meshes(block_size, tmp_path):
    legs = [(2, 2, 1), ALONE, (1, 2, 2), (2, 1, 1), (1, 3 if block_size == 1 else 2, 1), ALONE]
    check_legs(legs, "rigl", tmp_path, block_size)


@pytest.mark.parametrize(
    "name", ["static", "set", "snfs", "snfs-dense", "gmp-global", "mest-soft", "deepr", "topkast"]
)
def test_trainer_state_resumes_on_other_meshes(name, tmp_path):
    check_legs([(2, 1, 2), (1, 2, 1), ALONE, (2, 2, 1)], name, tmp_path)


@pytest.mark.parametrize("sizes", GRIDS)
def test_slots_of_shards_map_to_the_full_layer(sizes):
    model = model_of(density=0.3)

    def work(grid):
        own = split(copy.deepcopy(model), grid)
        for layer, whole in ((own[0], model[0]), (own[2], model[2])):
            spec = spec_of(layer)
            slots, total = spec.slots(layer.pattern)
            assert total == whole.pattern.nnz
            assert torch.equal(spec.to_full(layer.pattern.flat, 1), whole.pattern.flat[slots])
            assert torch.equal(layer.values, whole.values[slots])
            mine = slots if grid.z.is_lead_rank(spec.axes) else slots[:0]
            brought = [whole.values.detach()[mine], whole.pattern.rows[mine]]
            pieces = rebalance(grid.all_ranks, mine, total, brought)
            size = grid.all_ranks.size
            for piece, tensor in zip(pieces, (whole.values, whole.pattern.rows), strict=True):
                expected = [*tensor.chunk(size), *[tensor[:0]] * size][grid.all_ranks.rank]
                assert torch.equal(piece, expected)
            with pytest.raises(ValueError, match="slots from all ranks"):
                rebalance(grid.all_ranks, slots[:0], total, [])

    on_grid(sizes, work)


def error_of(sizes, model, work):
    lines = set()

    def caught(grid):
        own = split(copy.deepcopy(model), grid)
        before = gather(own)
        with pytest.raises(ValueError, match="does not fit") as error:
            work(own, grid)
        lines.add(str(error.value))
        assert all(torch.equal(t, before[key]) for key, t in gather(own).items())

    on_grid(sizes, caught)
    (line,) = lines
    return line


def test_mismatched_checkpoint_changes_no_shard(tmp_path):
    path, sizes = tmp_path / "c", (2, 1, 1)
    model = model_of(density=0.3)
    ds.training.save_checkpoint(path, model=model, optimizer=optimizer_of(model), ranks=None)

    def load_model(own, grid):
        ds.training.load_checkpoint(path, model=own, ranks=grid)

    line = error_of(sizes, model_of(density=0.4), load_model)
    assert "layer '0' was saved with [out, in, block size, blocks] = [24, 16, 1, 115]" in line
    line = error_of(sizes, model_of(block_size=4, density=0.3), load_model)
    assert "the model has [24, 16, 4, 7]" in line


@pytest.mark.parametrize("bad", [None, [], [(0, 0, 1)], [(0, 0)], [(0, 1, 0)], ["0"], 3])
def test_damaged_coordinates_are_rejected(bad):
    with pytest.raises(ValueError, match=r"expected (the coordinates|ranks with samples)"):
        Sources(bad, 1, [(0, 0, 0)], 0)


def test_source_ranks_of_generators_and_histories():
    """A rank takes the generators of its coordinates or, on another mesh, of its samples."""
    grid = [(x, y, z) for x in range(2) for y in range(1) for z in range(2)]
    alone, replicas = [(0, 0, 0)], [(0, 0, 0), (0, 0, 1), (0, 0, 2)]
    assert [Sources(grid, 4, grid, rank).random for rank in range(4)] == [0, 1, 2, 3]
    assert Sources(grid, 4, alone, 0).random == 0
    assert [Sources(grid, 4, replicas, rank).random for rank in range(3)] == [0, 1, None]
    assert [Sources(replicas, 3, grid, rank).random for rank in range(4)] == [0, 1, 0, 1]
    assert Sources(grid, 4, replicas, 2).histories == [0, 1]
    assert Sources(replicas, 3, grid, 3).ranks_to_read == {0, 1}
    assert Sources(replicas, 3, replicas, 2).ranks_to_read == {2}


def test_generators_follow_the_samples_to_another_mesh(tmp_path):
    model = model_of(density=0.3)

    def saved(rank):
        g = torch.Generator().manual_seed(rank)
        ds.training.save_checkpoint(
            tmp_path / "c", model=model, optimizer=optimizer_of(model), generators={"g": g},
            ranks=rank_of[rank],
        )  # fmt: skip

    sizes = (2, 1, 2)
    rank_of = {}

    def save(ranks):
        rank_of[ranks.rank] = ranks
        saved(ranks.rank)

    run_on_ranks(2, save)

    def load(grid):
        own, g = split(copy.deepcopy(model), grid), torch.Generator()
        ds.training.load_checkpoint(
            tmp_path / "c", model=own, generators={"g": g}, random_state=False, ranks=grid
        )
        return g.initial_seed()

    assert {place[2]: seed for place, seed in on_grid(sizes, load).items()} == {0: 0, 1: 1}
    assert on_grid(sizes, load)[1, 0, 1] == 1
