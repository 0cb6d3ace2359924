"""Updates over ranks of layers off the CPU copy nothing large to the host."""

from __future__ import annotations

import sys
import threading

import pytest
import torch
from rank_trainings import ALGORITHMS, layers_of, optimizer_of
from threaded import run_on_ranks
from tiers import algorithms
from torch import nn

from dynsparse.nn import SparseLinear
from dynsparse.ranks import GroupRanks

IN, OUT, SAMPLES = 48, 96, 24
SMALL = 512  # bytes: norms, borders of selections, seeds

CPUS_OWN = "_selection_threshold"  # of `select` on a CPU

NAMES = [name for name in ALGORITHMS if name not in ("static", "rigl-own-start")]


def model():
    g = torch.Generator().manual_seed(0)
    sizes = ((IN, OUT), (OUT, IN))
    # In float64: growth on a CPU has a way of its own for float32.
    first, second = (SparseLinear(*s, 0.2, generator=g, dtype=torch.float64) for s in sizes)
    return nn.Sequential(first, nn.Tanh(), second)


@pytest.fixture
def copies_to_host(monkeypatch):
    """Record copies to the host during a trainer's step as [(tensor, code location)]."""
    found, inside = [], threading.local()

    def watch(name):
        real = getattr(torch.Tensor, name)

        def watched(self, *args, **kwargs):
            to_host = name != "to" or "cpu" in (*args, *kwargs.values())
            if to_host and getattr(inside, "step", False):
                frame = sys._getframe(1)
                where = frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
                if where[2] != CPUS_OWN:
                    found.append((self, where))
            return real(self, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, watched)

    for name in ("cpu", "numpy", "tolist", "item", "to"):
        watch(name)
    return found, inside


def train(name, ranks, inside):
    net = model()
    optimizer = optimizer_of(net)
    trainer = ALGORITHMS[name](net, optimizer, ranks=ranks)
    most = max(layer.pattern.nnz for layer in layers_of(net).values())
    for step in range(4):
        g = torch.Generator().manual_seed(10 * step + ranks.rank)
        x = torch.randn(SAMPLES, IN, generator=g).double()
        optimizer.zero_grad()
        net(x).square().mean().backward()
        for parameter in net.parameters():
            ranks.sum(parameter.grad).div_(ranks.size)
        inside.step = True
        trainer.step()
        inside.step = False
    assert trainer.updates > 0
    return max(most, *(layer.pattern.nnz for layer in layers_of(net).values()))


@pytest.mark.usefixtures("off_cpu")
@pytest.mark.parametrize("name", algorithms(NAMES))
def test_values_gradients_and_samples_stay_on_device(name, copies_to_host):
    """Only positions are copied: dropped and grown ones, and the index built from them."""
    found, inside = copies_to_host
    most = 8 * max(run_on_ranks(2, lambda ranks: train(name, ranks, inside)))
    assert found
    for tensor, where in found:
        bound = SMALL if tensor.is_floating_point() else most
        assert tensor.nbytes <= bound, (tensor.dtype, list(tensor.shape), where)


def test_backend_gets_tensors_of_its_device_uncopied():
    ranks = object.__new__(GroupRanks)
    ranks.__dict__.update(_kinds={"meta"}, device=torch.device("meta"))
    tensor = torch.empty(1 << 20, device="meta")
    assert ranks._to_supported_device(tensor) is tensor
    assert ranks._to_supported_device(tensor.view(2, -1).t()).device == tensor.device
    assert ranks._to_supported_device(torch.zeros(3)).device == tensor.device
