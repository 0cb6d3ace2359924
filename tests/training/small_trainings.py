"""A small training whose steps a test may take in different ways."""

import torch
from torch import nn

import dynsparse as ds
from dynsparse.nn import SparseLinear
from dynsparse.training import ConstantSchedule

EVERY = ConstantSchedule(total_steps=1000, update_interval=1, drop_fraction=0.5)


def small(optimizer=torch.optim.SGD, seed=0, **options):
    g = torch.Generator().manual_seed(seed)
    model = nn.Sequential(
        SparseLinear(12, 16, 0.3, generator=g), nn.Tanh(), SparseLinear(16, 4, 0.4, generator=g)
    )
    made = optimizer(model.parameters(), lr=0.05)
    options = {"schedule": ConstantSchedule(100, 3, 0.4)} | options
    return model, made, ds.RigL(model, made, **options)


def loss_of(model, step):
    return model(torch.randn(8, 12, generator=torch.Generator().manual_seed(step))).square().mean()


def reference(optimizer=torch.optim.SGD, steps=7):
    model, made, trainer = small(optimizer)
    for step in range(steps):
        made.zero_grad()
        loss_of(model, step).backward()
        trainer.step()
    return model, made, trainer


def assert_same(one, other):
    assert (one[2].steps, one[2].updates) == (other[2].steps, other[2].updates)
    for name, tensor in one[0].state_dict().items():
        assert torch.equal(tensor, other[0].state_dict()[name]), name
