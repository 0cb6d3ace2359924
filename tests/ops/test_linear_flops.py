"""FlopCounterMode and profilers support sparse layers."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import dynsparse as ds
from dynsparse.nn import SparseLinear


@pytest.mark.parametrize("block", [1, 4])
def test_flops_count_nonzeros(block):
    m = nn.Sequential(SparseLinear(16, 32, 0.25, block), nn.ReLU(), SparseLinear(32, 8, 0.5, block))
    first, second = m[0].values.numel(), m[2].values.numel()
    x = torch.randn(2, 5, 16)
    with FlopCounterMode(display=False) as forward:
        loss = m(x).sum()
    assert forward.get_total_flops() == 2 * 10 * (first + second)
    with FlopCounterMode(display=False) as both:
        loss = m(x).sum()
        loss.backward()
    # x needs no gradient: the first layer makes that of its weights alone
    assert both.get_total_flops() == 2 * 10 * (2 * first + 3 * second)
    counts = both.get_flop_counts()
    assert sum(counts["Sequential.0"].values()) == 2 * 10 * 2 * first
    frozen = m.requires_grad_(False)
    with FlopCounterMode(display=False) as one:
        frozen(x.requires_grad_()).sum().backward()
    assert one.get_total_flops() == 2 * 10 * 2 * (first + second)


def test_sparse_model_counts_its_fraction_of_dense_flops():
    m = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    x = torch.randn(8, 64)
    with FlopCounterMode(display=False) as dense:
        m(x)
    ds.sparsify(m, 0.25, verbose=False)
    with FlopCounterMode(display=False) as sparse:
        m(x)
    assert 4 * sparse.get_total_flops() == dense.get_total_flops()


def test_profilers_show_the_layer():
    layer = SparseLinear(16, 8, 0.5)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        layer(torch.randn(4, 16)).sum().backward()
    names = {event.key for event in profile.key_averages()}
    assert {"SparseLinearFunction", "SparseLinearFunctionBackward"} <= names
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile,
        torch.autocast("cpu", torch.bfloat16),
    ):
        layer(torch.randn(4, 16)).float().sum().backward()
    assert "dynsparse::linear" in {event.key for event in profile.key_averages()}
