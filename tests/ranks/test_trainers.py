"""Training on several ranks, each a thread, equals training in one process."""

from __future__ import annotations

import pytest
import torch
from rank_trainings import (
    ALGORITHMS,
    apart,
    average,
    backward,
    layers_of,
    model_of,
    optimizer_of,
    steps_of,
    weights,
)
from threaded import run_on_ranks
from tiers import algorithms

import dynsparse as ds
from dynsparse.training import GMP, ConstantSchedule

STEPS = 5


def train(name, ranks=None, *, block_size=1, kind="sgd", passes=1, model=None, steps=STEPS):
    """Return the weights after each step."""
    model = model_of(block_size=block_size) if model is None else model
    optimizer = optimizer_of(model, kind)
    trainer = ALGORITHMS[name](model, optimizer, ranks=ranks)
    rank, size = (0, 1) if ranks is None else (ranks.rank, ranks.size)
    seen = []
    for step in range(1, steps + 1):
        backward(model, optimizer, step, rank, size, passes)
        if ranks is not None:
            average(ranks, model)
        trainer.step()
        seen.append(weights(model))
    return seen


def check(expected, results):
    for seen in results:
        for one, other in zip(expected, seen, strict=True):
            same, difference = apart(one, other)
            assert same
            assert difference <= 1e-10
    # Between ranks the same bits.
    for seen in results[1:]:
        assert all(apart(a, b) == (True, 0.0) for a, b in zip(results[0], seen, strict=True))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", algorithms(ALGORITHMS))
def test_ranks_equal_one_process(name, size):
    expected = train(name)
    if name != "static":
        assert not apart(expected[0], expected[-1])[0], "no pattern changed"
    check(expected, run_on_ranks(size, lambda ranks: train(name, ranks)))


@pytest.mark.parametrize("name", ["rigl", "set", "gmp", "granet", "topkast", "deepr", "snfs"])
@pytest.mark.parametrize("block_size", [2, 4])
def test_blocks_equal_one_process(name, block_size):
    expected = train(name, block_size=block_size, kind="adam")
    check(
        expected,
        run_on_ranks(2, lambda ranks: train(name, ranks, block_size=block_size, kind="adam")),
    )


def test_gradient_accumulation_equals_one_process():
    check(train("rigl", passes=3), run_on_ranks(2, lambda ranks: train("rigl", ranks, passes=3)))


EVERY = ConstantSchedule(100, 1, 0.3)


def test_layer_unused_on_one_rank_has_zero_gradient_there():
    """Equals one process with the samples of the rank that used the layer."""

    def run(ranks, rank, size):
        model = model_of()
        optimizer = optimizer_of(model)
        trainer = ds.RigL(model, optimizer, schedule=EVERY, ranks=ranks)
        optimizer.zero_grad()
        x = torch.randn(6, 16, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
        first = model[1](model[0](x))
        (first.square().mean() / size).backward(retain_graph=True)
        if rank == 0:
            (model[2](first.detach()).square().mean() / size).backward()
        else:
            model[2].values.grad = torch.zeros_like(model[2].values)
            model[2].bias.grad = torch.zeros_like(model[2].bias)
        return model, trainer

    def work(ranks):
        model, trainer = run(ranks, ranks.rank, ranks.size)
        for parameter in model.parameters():
            ranks.sum(parameter.grad)
        trainer.step()
        return weights(model)

    model = model_of()
    optimizer = optimizer_of(model)
    trainer = ds.RigL(model, optimizer, schedule=EVERY, ranks=None)
    for rank in range(2):
        x = torch.randn(6, 16, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
        first = model[1](model[0](x))
        (first.square().mean() / 2).backward(retain_graph=True)
        if rank == 0:
            (model[2](first.detach()).square().mean() / 2).backward()
    trainer.step()
    for got in run_on_ranks(2, work):
        same, difference = apart(got, weights(model))
        assert same
        assert difference < 1e-12


def test_keyed_generators_do_not_depend_on_layer_order():
    model = model_of()
    backwards = torch.nn.ModuleDict({"2": model[2], "0": model[0]})
    one = ds.SET(model, optimizer_of(model), schedule=EVERY, seed=3)
    other = ds.SET(backwards, optimizer_of(model), schedule=EVERY, seed=3)
    for name in ("0", "2"):
        a, b = (t.growth.generator_for(name, 5, "positions").get_state() for t in (one, other))
        assert torch.equal(a, b)


def test_optimizer_state_is_resized_on_every_rank():
    """Adam's moments have the size of the values on every rank."""

    def work(ranks):
        model = model_of(density=0.6)
        optimizer = optimizer_of(model, "adam")
        trainer = GMP(model, optimizer, total_steps=8, update_interval=1, final_density=0.1,
                      ranks=ranks)  # fmt: skip
        steps_of(ranks, trainer, model, steps=7)
        return [
            len(optimizer.state[layer.values]["exp_avg"]) for layer in layers_of(model).values()
        ]

    assert len({tuple(sizes) for sizes in run_on_ranks(2, work)}) == 1


@pytest.mark.parametrize("own", [None, "auto"])
def test_ddp_with_one_rank_follows_changes_of_size(own, tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        found = []
        for wrap in (torch.nn.parallel.DistributedDataParallel, lambda model: model):
            model = model_of()
            wrapped, optimizer = wrap(model), optimizer_of(model, "sgd")
            trainer = GMP(
                model, optimizer, total_steps=8, final_density=0.1, update_interval=2, ranks=own
            )
            g = torch.Generator().manual_seed(0)
            for _ in range(8):
                optimizer.zero_grad()
                x = torch.randn(4, model[0].in_features, generator=g, dtype=torch.float64)
                wrapped(x).square().mean().backward()
                trainer.step()
            assert trainer.updates > 2
            found.append(weights(model))
        assert apart(*found) == (True, 0.0)
    finally:
        torch.distributed.destroy_process_group()


def test_replicate_needs_ranks():
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        with pytest.raises(TypeError, match="got None"):
            ds.distributed.replicate(model_of(), ranks=None)
    finally:
        torch.distributed.destroy_process_group()
