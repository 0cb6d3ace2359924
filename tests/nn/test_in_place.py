"""In-place operations on the output of a sparse layer, of any rank and under any transform."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

import dynsparse as ds
import popsparse
from dynsparse.nn import SparseEmbedding, SparseLinear
from dynsparse.nn.active_set import ActiveSet

SHAPES = [(8,), (3, 8), (2, 3, 8), (2, 1, 3, 8), (0, 3, 8)]


def dense_of(layer):
    dense = nn.Linear(8, 6, dtype=layer.values.dtype)
    with torch.no_grad():
        dense.weight.copy_(layer.to_dense())
        dense.bias.copy_(layer.bias)
    return dense


def after(y, x):
    """Apply in-place operations as models do."""
    y += 1
    y.mul_(2)
    y[..., 0] = 3.0
    nn.ReLU(inplace=True)(y)
    return (y * x.sum()).sum()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("block", [1, 2])
def test_outputs_may_be_changed_in_place(shape, dtype, block):
    layer = SparseLinear(8, 6, 0.5, block, dtype=dtype)
    dense = dense_of(layer)
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    other = x.detach().clone().requires_grad_()
    after(layer(x), x).backward()
    after(dense(other), other).backward()
    exact = {} if dtype != torch.bfloat16 else {"rtol": 0.1, "atol": 0.5}
    torch.testing.assert_close(x.grad, other.grad, **exact)
    torch.testing.assert_close(layer.bias.grad, dense.bias.grad, **exact)
    expected = layer.pattern.values_of(dense.weight.grad)
    torch.testing.assert_close(layer.values.grad, expected, **exact)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_under_autocast_and_without_gradients(shape, grad):
    layer = SparseLinear(8, 6, 0.5)
    x = torch.randn(shape)
    for autocast in (nullcontext(), torch.autocast("cpu", torch.bfloat16)):
        with torch.set_grad_enabled(grad), autocast:
            expected = (layer(x) + 1).relu()
            y = layer(x)
            assert not y._is_view()
            y += 1
            torch.testing.assert_close(nn.functional.relu_(y), expected)
            assert y.requires_grad is grad
            if grad:
                y.float().sum().backward()


@pytest.mark.parametrize("shape", [(3, 8), (2, 3, 8)])
def test_under_compile(shape):
    layer = SparseLinear(8, 6, 0.5)
    x = torch.randn(shape)
    compiled = torch.compile(lambda x: after(layer(x), x), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), after(layer(x), x))
    compiled(x).backward()


def test_other_kernels():
    x, ids = torch.randn(2, 3, 8, requires_grad=True), torch.randint(5, (2, 3))
    active = SparseLinear(8, 6, 0.5)
    active.active = ActiveSet(active.pattern, torch.tensor([0, 3, 7]), torch.device("cpu"))
    machine = SparseLinear(8, 6, 0.5, target=popsparse.Target(tiles=4))
    table = SparseEmbedding(5, 8, 0.5)
    for layer, given in ((active, x), (machine, x), (table, ids)):
        after(layer(given), x).backward()
        assert layer.values.grad is not None


def test_in_place_residual_trains():
    class Residual(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

        def forward(self, x):
            y = self.down(nn.functional.relu(self.up(x), inplace=True))
            y += x
            return y

    m = ds.sparsify(nn.Sequential(Residual(), Residual()), 0.3, verbose=False)
    trainer = ds.RigL(m, torch.optim.SGD(m.parameters(), 0.1), total_steps=10, update_interval=1)
    for _ in range(2):
        m(torch.randn(2, 3, 8)).square().mean().backward()
        assert len(trainer.step()) == 4
