"""Layers and trainings with the kernels, on CPU tensors in the interpreter."""

import copy

import pytest
import torch
from cases import error
from torch.nn.functional import linear, mse_loss
from torch.utils.checkpoint import checkpoint

import dynsparse as ds
from dynsparse.nn import SparseLinear
from dynsparse.ops.linear import products
from dynsparse.ops.linear.cuda import blocks

BLOCKS = (16, 32, 64, 128)


@pytest.fixture(autouse=True)
def calls(interpreter, monkeypatch):
    """Compute every layer with the block kernels, and count the passes."""
    made = {"forward": 0, "backward": 0}

    class Counted:
        @staticmethod
        def forward(*args):
            made["forward"] += 1
            return blocks.forward(*args)

        @staticmethod
        def backward(dy, x, values, p, need_input, need_values, dbias=None):
            made["backward"] += 1
            sums = []
            found = blocks.backward(dy, x, values, p, need_input, need_values, sums=sums)
            if dbias is not None:
                dbias.copy_(sums[0] if sums else dy.sum(0))
            return found

    # The one route of a CPU whose kernels take values and biases as they are, like these.
    monkeypatch.setattr(products, "route", lambda *args: "bfloat16")
    monkeypatch.setattr(products, "KERNELS", {"bfloat16": Counted})
    return made


def reference(layer, x, dy):
    """Return y, dx, dvalues and dbias of a dense float64 layer."""
    dense = layer.to_dense().detach().double().requires_grad_()
    wide, bias = x.detach().double().requires_grad_(), layer.bias.detach().double().requires_grad_()
    y = linear(wide, dense, bias)
    y.backward(dy.double())
    return y.detach(), wide.grad, layer.pattern.values_of(dense.grad), bias.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("b", BLOCKS)
def test_layer_with_float32_values(b, dtype, calls):
    layer = SparseLinear(3 * b, 2 * b, density=0.5, block_size=b)
    x = torch.randn(3, 7, 3 * b).to(dtype).requires_grad_()
    dy = torch.randn(3, 7, 2 * b).to(dtype)
    y = layer(x)
    y.backward(dy)
    assert calls == {"forward": 1, "backward": 1}
    assert y.dtype == x.grad.dtype == dtype
    assert layer.values.grad.dtype == torch.float32
    limits = {torch.float32: 1e-5, torch.bfloat16: 6e-3, torch.float16: 1e-3}
    got = (y, x.grad, layer.values.grad, layer.bias.grad)
    for one, wanted in zip(got, reference(layer, x, dy), strict=True):
        assert error(one.detach(), wanted) < limits[dtype]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_layer(dtype):
    layer = SparseLinear(48, 64, density=0.5, block_size=16).to(dtype)
    x, dy = torch.randn(9, 48, dtype=dtype, requires_grad=True), torch.randn(9, 64, dtype=dtype)
    y = layer(x)
    y.backward(dy)
    assert layer.values.grad.dtype == dtype
    got = (y, x.grad, layer.values.grad)
    for one, wanted in zip(got, reference(layer, x, dy)[:3], strict=True):
        assert error(one.detach(), wanted) < 6e-3


def test_autocast(calls):
    layer = SparseLinear(64, 32, density=0.5, block_size=32)
    x, dy = torch.randn(9, 64, requires_grad=True), torch.randn(9, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    y.backward(dy.bfloat16())
    assert calls == {"forward": 1, "backward": 1}
    for one, wanted in zip(
        (y, x.grad, layer.values.grad), reference(layer, x, dy)[:3], strict=True
    ):
        assert error(one.detach(), wanted) < 1e-2


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant, calls):
    layer = SparseLinear(32, 32, density=0.5, block_size=16)
    x, dy = torch.randn(9, 32, requires_grad=True), torch.randn(9, 32)
    checkpoint(layer, x, use_reentrant=reentrant).backward(dy)
    assert calls == {"forward": 2, "backward": 1}
    _, dx, dw, _ = reference(layer, x, dy)
    assert error(x.grad, dx) < 1e-5
    assert error(layer.values.grad, dw) < 1e-5


def test_partial_gradients():
    layer = SparseLinear(32, 48, density=0.5, block_size=16)
    x, dy = torch.randn(9, 32), torch.randn(9, 48)
    layer(x).backward(dy)
    assert error(layer.values.grad, reference(layer, x, dy)[2]) < 1e-5
    layer.requires_grad_(False)
    layer(x.requires_grad_()).backward(dy)
    assert error(x.grad, reference(layer, x, dy)[1]) < 1e-5


def train(b, method, steps):
    torch.manual_seed(1)
    width = 4 * b
    model = torch.nn.Sequential(
        SparseLinear(width, width, density=0.3, block_size=b),
        torch.nn.ReLU(),
        SparseLinear(width, width, density=0.3, block_size=b),
    )
    start = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    trainer = method(model, optimizer, total_steps=2 * steps, update_interval=3)
    x, target = torch.randn(24, width), torch.randn(24, width)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = mse_loss(model(x), target)
        loss.backward()
        trainer.step()
        losses.append(loss.item())
    assert any(not torch.equal(start[key], value) for key, value in model.state_dict().items())
    return model, losses


@pytest.mark.parametrize("b", [16, 32])
def test_rigl_training_equals_plain_torch(b, calls, monkeypatch):
    through_kernels, losses = train(b, ds.RigL, 9)
    assert calls["forward"] == calls["backward"] == 18
    assert losses[-1] < losses[0]
    monkeypatch.undo()
    with ds.ops.linear.use_kernel("sparse"):
        plain, expected = train(b, ds.RigL, 9)
    assert losses == pytest.approx(expected, rel=1e-4)
    for ours, theirs in zip(through_kernels, plain, strict=True):
        if isinstance(ours, SparseLinear):
            assert torch.equal(ours.pattern.flat, theirs.pattern.flat)
            torch.testing.assert_close(ours.values, theirs.values, rtol=1e-2, atol=1e-3)
