"""`stages` cuts a model into pipeline stages of nearly equal size."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import dynsparse as ds
from dynsparse.distributed import stages


def model():
    sizes = (512, 256, 64, 64, 512, 256)
    layers = []
    for a, b in itertools.pairwise(sizes):
        layers += [ds.nn.SparseLinear(a, b, 0.2), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(256, 10))


def weights(stage):
    found = [m for m in stage.modules() if isinstance(m, (ds.nn.SparseLinear, nn.Linear))]
    return sum(m.values.numel() if hasattr(m, "values") else m.weight.numel() for m in found)


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_consecutive_stages_equal_the_model(n):
    net = model()
    cut = stages(net, n)
    assert len(cut) == n
    x = torch.randn(3, 512)
    y = x
    for stage in cut:
        y = stage(y)
    assert torch.equal(y, net(x))
    together = {name: t for stage in cut for name, t in stage.state_dict().items()}
    assert together.keys() == net.state_dict().keys()
    assert all(a is b for a, b in zip((m for s in cut for m in s), net, strict=True))


def test_largest_stage_is_minimal():
    net = model()
    cut = stages(net, 2)
    ways = [(net[:i], net[i:]) for i in range(1, len(net))]
    best = min(max(map(weights, way)) for way in ways)
    assert max(map(weights, cut)) == best
    assert best < 0.7 * weights(net)


def test_stages_rejects_bad_arguments():
    net = model()
    with pytest.raises(ValueError, match="11 modules cannot have 12 stages"):
        stages(net, 12)
    with pytest.raises(TypeError, match=r"stages cut an nn.Sequential, .* got SparseLinear"):
        stages(net[0], 1)
    with pytest.raises(ValueError, match="twice"):
        stages(nn.Sequential(net[0], nn.ReLU(), net[0]), 2)
