"""Arguments of the algorithms: seeds, schedules, and those that are refused."""

import pytest
import torch
from torch import nn

from dynsparse.nn import SparseLinear
from dynsparse.training import SET, ConstantSchedule, RigL


def network(seed=0, **options):
    g = torch.Generator().manual_seed(seed)
    return nn.Sequential(
        SparseLinear(20, 32, density=0.2, generator=g, **options),
        nn.ReLU(),
        SparseLinear(32, 4, density=0.4, generator=g, **options),
    )


def data(seed=1):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(256, 20, generator=g)
    return x, (x @ torch.randn(20, 4, generator=g)).argmax(1)


def train(trainer, model, steps):
    x, target = data()
    updates = {}
    for step in range(1, steps + 1):
        trainer.optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), target).backward()
        rewirings = trainer.step()
        if rewirings is not None:
            updates[step] = rewirings
    return updates


def test_set_draws_from_its_own_generator():
    def run(disturb):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = SET(model, optimizer, total_steps=40, update_interval=10, seed=5)
        if disturb:
            trainer.on_update.append(lambda step, rewirings: torch.rand(step))
        train(trainer, model, 40)
        return [layer.pattern for layer in trainer.layers.values()]

    assert run(False) == run(True)


def test_schedule_instead_of_numbers():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = SET(model, optimizer, schedule=ConstantSchedule(30, 10, 0.5), seed=0)
    updates = train(trainer, model, 30)
    assert list(updates) == [10, 20]
    assert [len(r.grown) for r in updates[20].values()] == [64, 25]  # half of 128 and of 51


def test_bad_arguments():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="give total_steps"):
        RigL(model, optimizer)
    with pytest.raises(
        ValueError, match="a schedule replaces update_interval: give one or the other"
    ):
        RigL(model, optimizer, update_interval=3, schedule=ConstantSchedule(30))
    with pytest.raises(ValueError, match="pooling must be one of sum, avg, max, none"):
        RigL(model, optimizer, total_steps=10, pooling="median")
