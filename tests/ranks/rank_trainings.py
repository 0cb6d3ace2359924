"""Small trainings of every algorithm that are the same on any number of ranks."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn

import dynsparse as ds
from dynsparse.nn import SparseLinear
from dynsparse.training import GMP, MEST, SNFS, ConstantSchedule, DeepR, GraNet, TopKAST
from dynsparse.training.grow import GradientStep

EVERY = ConstantSchedule(total_steps=10**6, update_interval=1, drop_fraction=0.1)
SOME = ConstantSchedule(total_steps=10**6, update_interval=2, drop_fraction=0.1)
SCHEDULE = ConstantSchedule(total_steps=100, update_interval=3, drop_fraction=0.3)
GRADUAL = {"total_steps": 400, "final_density": 0.05, "update_interval": 2}

ALGORITHMS = {
    "rigl": lambda m, o, **r: ds.RigL(m, o, schedule=EVERY, **r),
    "rigl-global": lambda m, o, **r: ds.RigL(m, o, schedule=EVERY, budget="global", **r),
    "rigl-regrow": lambda m, o, **r: ds.RigL(m, o, schedule=EVERY, regrow_dropped=True, **r),
    "rigl-step": lambda m, o, **r: ds.RigL(m, o, schedule=EVERY, initial_value=GradientStep(), **r),
    "rigl-own-start": lambda m, o, **r: ds.RigL(
        m, o, schedule=EVERY, initial_value=lambda layer, rewiring: layer.values[:1].mean(), **r
    ),
    "set": lambda m, o, **r: ds.SET(m, o, schedule=EVERY, seed=3, **r),
    "snfs": lambda m, o, **r: SNFS(m, o, schedule=SOME, window=3, **r),
    "snfs-dense": lambda m, o, **r: SNFS(m, o, schedule=SOME, window=None, **r),
    "snfs-fixed": lambda m, o, **r: SNFS(m, o, schedule=EVERY, redistribute=False, **r),
    "mest": lambda m, o, **r: MEST(m, o, schedule=EVERY, seed=3, **r),
    "mest-soft": lambda m, o, **r: MEST(m, o, schedule=EVERY, seed=3, soft_memory_bound=True, **r),
    "deepr": lambda m, o, **r: DeepR(
        m, o, total_steps=10**6, l1=0.05, temperature=1e-6, seed=3, **r
    ),
    "topkast": lambda m, o, **r: TopKAST(m, o, schedule=EVERY, seed=3, **r),
    "gmp": lambda m, o, **r: GMP(m, o, **GRADUAL, **r),
    "gmp-global": lambda m, o, **r: GMP(m, o, scope="global", **GRADUAL, **r),
    "granet": lambda m, o, **r: GraNet(m, o, **GRADUAL, **r),
    "static": lambda m, o, **r: ds.Static(m, o, **r),
}
"""{name: function of (model, optimizer, **ranks) that creates a trainer}."""


def model_of(seed=0, block_size=1, density=0.2, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    sizes = (16, 24, 8)
    first, second = (
        SparseLinear(a, b, density, block_size, dtype=dtype, generator=g)
        for a, b in pairwise(sizes)
    )
    return nn.Sequential(first, nn.Tanh(), second)


def batch(step, rank, size, samples=12, dtype=torch.float64):
    """Return the samples of `rank`; the batch does not depend on the number of ranks."""
    g = torch.Generator().manual_seed(1000 + step)
    x, y = torch.randn(samples, 16, generator=g), torch.randn(samples, 8, generator=g)
    own = slice(rank * samples // size, (rank + 1) * samples // size)
    return x[own].to(dtype), y[own].to(dtype)


def optimizer_of(model, kind="sgd"):
    if kind == "adam":
        return torch.optim.Adam(model.parameters(), lr=0.01)
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def backward(forward, optimizer, step, rank=0, size=1, passes=1, which=None):
    """Compute the gradients of one step in `passes` micro-batches, or only of those in `which`."""
    which = range(passes) if which is None else which
    if 0 in which:
        optimizer.zero_grad()
    x, y = batch(step, rank, size)
    for i in which:
        part, target = x.chunk(passes)[i], y.chunk(passes)[i]
        (nn.functional.mse_loss(forward(part), target) / passes).backward()


def average(ranks, model):
    """Average gradients over ranks, as DistributedDataParallel does."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            ranks.sum(parameter.grad).div_(ranks.size)


def steps_of(ranks, trainer, model, spoil=None, steps=3):
    """Train this rank; `spoil(step, trainer, model)` runs between the gradients and the step."""
    for step in range(1, steps + 1):
        backward(model, trainer.optimizer, step, ranks.rank, ranks.size)
        average(ranks, model)
        if spoil is not None:
            spoil(step, trainer, model)
        trainer.step()


def layers_of(model):
    return {n: m for n, m in model.named_modules() if isinstance(m, SparseLinear)}


def weights(model):
    """Return {layer: (positions, dense weight)}; the dense weight shows a wrong index."""
    layers = layers_of(model)
    return {
        name: (layer.pattern.sorted_flat.clone(), layer.to_dense().detach().clone())
        for name, layer in layers.items()
    }


def apart(one, other):
    """Return (whether patterns are equal, largest difference of dense weights)."""
    same = all(torch.equal(one[n][0], other[n][0]) for n in one)
    return same, max(float((one[n][1] - other[n][1]).abs().max()) for n in one)
