"""Training of tensor-parallel layers equals one process: patterns, values, optimizer state."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch
from grids import on_grid
from slot_order import row_major
from test_split import samples
from torch import nn

import dynsparse as ds
from dynsparse.distributed import gather, split
from dynsparse.training import ConstantSchedule
from dynsparse.training.rank_consistency import check_before_update

sys.path.insert(0, str(Path(__file__).parents[1] / "ranks"))
from rank_trainings import ALGORITHMS, batch, model_of, optimizer_of

STEPS = 8
OTHERS = {"rigl-own-start", "snfs-fixed"}
"""Left out: a user's start function sees only the shard; snfs-fixed adds no case here."""


def step_of(model, optimizer, trainer, step, grid=None):
    optimizer.zero_grad()
    x, y = batch(step, 0, 1)
    if grid is None:
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
    else:
        loss = nn.functional.mse_loss(model(samples(x, grid)), samples(y, grid))
        loss.backward()
        for parameter in model.parameters():
            grid.z.sum(parameter.grad).div_(grid.z.size)
    return trainer.step()


def train_in_one_process(make, block_size, kind):
    model = model_of(block_size=block_size, density=0.3)
    optimizer = optimizer_of(model, kind)
    trainer = make(model, optimizer, ranks=None)
    states = []
    for step in range(STEPS):
        step_of(model, optimizer, trainer, step)
        states.append(copy.deepcopy(model.state_dict()))
    return states, trainer.updates


def train_on_mesh(make, sizes, block_size, kind, expected):
    model = model_of(block_size=block_size, density=0.3)

    def work(grid):
        own = split(copy.deepcopy(model), grid)
        optimizer = optimizer_of(own, kind)
        trainer = make(own, optimizer, ranks=grid)
        for step in range(STEPS):
            step_of(own, optimizer, trainer, step, grid)
            found = row_major(gather(own))
            for key, tensor in row_major(expected[step]).items():
                if key.endswith(("rows", "cols")):
                    assert torch.equal(found[key], tensor), (step, key)
                else:
                    torch.testing.assert_close(found[key], tensor, rtol=0, atol=1e-10)
            for layer in trainer.layers.values():
                for state in optimizer.state[layer.values].values():
                    assert not state.dim() or state.shape == layer.values.shape
        return trainer.updates

    return on_grid(sizes, work)


@pytest.mark.parametrize("sizes", [(2, 2, 1), (2, 1, 2), (1, 2, 2)])
@pytest.mark.parametrize("name", sorted(set(ALGORITHMS) - OTHERS))
def test_training_equals_one_process(name, sizes):
    expected, updates = train_in_one_process(ALGORITHMS[name], 1, "sgd")
    assert set(train_on_mesh(ALGORITHMS[name], sizes, 1, "sgd", expected).values()) == {updates}
    assert updates or name == "static"


def test_mesh_of_eight_ranks_equals_one_process():
    expected, updates = train_in_one_process(ALGORITHMS["rigl"], 1, "adam")
    found = train_on_mesh(ALGORITHMS["rigl"], (2, 2, 2), 1, "adam", expected)
    assert list(found.values()) == [updates] * 8


@pytest.mark.parametrize("name", ["rigl", "set", "gmp-global", "deepr", "topkast"])
def test_blocks_with_adam_equal_one_process(name):
    expected, updates = train_in_one_process(ALGORITHMS[name], 4, "adam")
    assert set(train_on_mesh(ALGORITHMS[name], (2, 1, 2), 4, "adam", expected).values()) == {
        updates
    }


def error_of(sizes, work):
    lines = set()

    def caught(grid):
        with pytest.raises((TypeError, ValueError, RuntimeError)) as error:
            work(grid)
        lines.add(str(error.value))

    on_grid(sizes, caught)
    return lines


def test_trainer_requires_the_mesh_as_ranks():
    model = model_of(density=0.3)

    def work(grid):
        own = split(copy.deepcopy(model), grid)
        ds.Static(own, optimizer_of(own), ranks=None)

    (line,) = error_of((2, 1, 1), work)
    assert line.startswith("the model has tensor-parallel layers on a mesh of 2 ranks: pass the")


def test_ranks_auto_finds_the_mesh():
    model = model_of(density=0.3)

    def work(grid):
        own = split(copy.deepcopy(model), grid)
        return ds.Static(own, optimizer_of(own)).ranks is grid.z

    assert all(on_grid((2, 1, 1), work).values())


def test_error_on_one_rank_is_raised_on_all():
    model = model_of(density=0.3)
    sizes = (2, 1, 2)
    every = ConstantSchedule(total_steps=10, update_interval=1, drop_fraction=0.3)

    def work(grid):
        own = split(copy.deepcopy(model), grid)
        optimizer = optimizer_of(own)
        trainer = ds.RigL(own, optimizer, schedule=every, ranks=grid)
        before = gather(own)
        x, y = batch(0, 0, 1)
        nn.functional.mse_loss(own(samples(x, grid)), samples(y, grid)).backward()
        for parameter in own.parameters():
            grid.z.sum(parameter.grad).div_(grid.z.size)
        if (grid.x.rank, grid.z.rank) == (1, 1):
            own[0].values.grad[0] = torch.nan
        try:
            trainer.step()
        finally:
            assert all(torch.equal(t, before[key]) for key, t in gather(own).items())

    lines = error_of(sizes, work)
    assert len(lines) == 1
    assert "layer '0': the gradient of its weights holds NaN" in lines.pop()


def test_densify_rejects_a_shard():
    model = model_of(density=0.3)

    def work(grid):
        own = split(copy.deepcopy(model), grid)
        with pytest.raises(ValueError, match=r"shard of '0': use dynsparse.distr"):
            ds.densify(own)

    on_grid((2, 1, 1), work)


@pytest.mark.parametrize("line", [None, 0, 1])
def test_different_gradients_of_replicas_raise_on_all_ranks(line):
    """Ranks whose own replicas agree raise too; nothing is raised if all replicas agree."""

    def work(grid):
        generator = torch.Generator().manual_seed(grid.x.rank)
        layer = ds.nn.SparseLinear(8, 8, density=0.5, generator=generator)
        layer.values.grad = torch.full_like(layer.values, 1.0 + grid.x.rank)
        if (grid.x.rank, grid.z.rank) == (line, 1):
            layer.values.grad *= 3
        try:
            check_before_update(grid.z, 1, {}, {"fc": layer}, lambda: None)
        except RuntimeError as error:
            return str(error)
        return ""

    said = set(on_grid((2, 1, 2), work).values())
    assert len(said) == 1
    assert bool(line is not None) == ("'fc': rank 0 and rank 1 have other gradients" in said.pop())
