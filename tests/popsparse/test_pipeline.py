"""Models in stages over processors: numbers are torch's, times those of the schedules."""

import copy

import pytest
import torch
from torch import nn

import dynsparse as ds
import popsparse
from popsparse import poptorch
from popsparse.machine import Target

SCHEDULES = ("grouped", "interleaved", "sequential")


def stages(count=2, width=16, sparse=True):
    """A model of so many stages on as many processors."""
    torch.manual_seed(0)
    layers = []
    for stage in range(count):
        generator = torch.Generator().manual_seed(stage)
        layer = ds.nn.SparseLinear(width, width, 0.4, generator=generator)
        layers.append(layer if sparse and stage == 0 else nn.Linear(width, width))
        layers.append(nn.Tanh())
        poptorch.BeginBlock(layers[-2], f"part {stage}", ipu_id=stage)
    return nn.Sequential(*layers, nn.Linear(width, 10))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batches(steps, count, size=6, width=16):
    generator = torch.Generator().manual_seed(7)
    x = torch.rand(steps, count, size, width, generator=generator)
    return x, torch.randint(0, 10, (steps, count, size), generator=generator)


def train_on_host(model, optimizer, x, y):
    """Steps of micro-batches; returns their losses [steps, batches]."""
    losses = []
    for xs, ys in zip(x, y, strict=True):
        optimizer.zero_grad()
        for inputs, labels in zip(xs, ys, strict=True):
            loss = nn.functional.cross_entropy(model(inputs), labels)
            (loss / len(xs)).backward()
            losses.append(loss.item())
        optimizer.step()
    return torch.tensor(losses).view(len(x), -1)


def check(host, optimizer_of, target, pipeline, count, steps=3, **sizes):
    twin = copy.deepcopy(host)
    x, y = batches(steps, count, **sizes)
    expected = train_on_host(host, optimizer_of(host), x, y)
    compiled = popsparse.compile(
        twin,
        optimizer_of(twin),
        nn.functional.cross_entropy,
        target,
        pipeline=pipeline,
        gradient_accumulation=count,
    )
    losses = [
        compiled.step(*(data if count > 1 else (part[0] for part in data))).view(-1)
        for data in zip(x, y, strict=True)
    ]
    torch.testing.assert_close(torch.stack(losses), expected, atol=1e-5, rtol=1e-5)
    compiled.copy_weights_to_host()
    for (name, weight), other in zip(host.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(other, weight, atol=1e-5, rtol=1e-5, msg=name)
    return compiled


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_numbers_are_those_of_torch(schedule):
    compiled = check(stages(), sgd, Target.pod(2, tiles=8), schedule, 4)
    assert [stage.name for stage in compiled.stages()] == ["part 0", "part 1"]
