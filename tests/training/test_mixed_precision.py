"""Autocast in bfloat16 and float16, with a scaler of the loss, on the CPU and elsewhere."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dynsparse as ds
from dynsparse.nn import SparseLinear
from dynsparse.training import GradientStep, scaled_step


@pytest.fixture(params=["cpu", "elsewhere"])
def place(request):
    if request.param == "elsewhere":
        request.getfixturevalue("off_cpu")
    return request.param


def made(b):
    g = torch.Generator().manual_seed(3)
    layers = [SparseLinear(16, 32, 0.5, b, generator=g), SparseLinear(32, 16, 0.5, b, generator=g)]
    return nn.Sequential(layers[0], nn.GELU(), layers[1])


def train(model, dtype, how=None, steps=30):
    """The losses of a training that changes patterns every five steps."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    trainer = ds.RigL(model, optimizer, total_steps=steps, update_interval=5, drop_fraction=0.3)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16)
    g = torch.Generator().manual_seed(5)
    # With a gradient of its own, or a reentrant checkpoint would not go into the layers.
    x = torch.randn(20, 16, generator=g, requires_grad=True)
    target = torch.randn(20, 16, generator=g)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
            y = model(x) if how is None else checkpoint(model, x, use_reentrant=how)
            loss = (y.float() - target).square().mean()
        scaler.scale(loss).backward()
        scaled_step(trainer, scaler)
        losses.append(float(loss.detach()))
    assert trainer.updates > 0
    assert all(p.dtype is torch.float32 for p in model.parameters())
    return losses


@pytest.mark.parametrize("b", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_training_in_sixteen_bits_follows_that_in_float32(place, dtype, b):
    exact, low = train(made(b), torch.float32), train(made(b), dtype)
    assert low[-1] < 0.6 * low[0]
    for one, other in zip(low, exact, strict=True):
        assert one == pytest.approx(other, rel=0.1)


@pytest.mark.parametrize("how", [True, False])
def test_checkpointing_comes_to_the_same_bits(place, how):
    assert train(made(1), torch.float16) == train(made(1), torch.float16, how)


def test_a_step_that_the_scaler_skips_is_none(place):
    model = made(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = ds.RigL(model, optimizer, total_steps=9, update_interval=1, drop_fraction=0.3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30)

    def step():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = model(torch.randn(20, 16)).square().mean()
        scaler.scale(loss).backward()
        return scaled_step(trainer, scaler)

    before = [p.detach().clone() for p in model.parameters()]
    assert step() is None
    assert not all(bool(p.grad.isfinite().all()) for p in model.parameters())
    assert scaler.get_scale() == 2.0**29
    assert (trainer.steps, trainer.updates) == (0, 0)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    while (rewirings := step()) is None:
        assert scaler.get_scale() > 1
    assert (trainer.steps, trainer.updates) == (1, 1)
    assert list(rewirings) == ["0", "2"]
    assert len(optimizer._optimizer_step_pre_hooks) == 1


def test_what_does_not_go_with_a_scaler_is_refused():
    model = made(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"total_steps": 9, "update_interval": 1}
    trainer = ds.RigL(model, optimizer, **options, initial_value=GradientStep())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    fused = torch.optim.Adam(model.parameters(), fused=True)
    other = ds.RigL(model, fused, **options)

    def refused(take, message):
        before = [p.detach().clone() for p in model.parameters()]
        scaler.scale(model(torch.randn(20, 16)).square().mean()).backward()
        with pytest.raises(ValueError, match=message):
            take()
        scaler.update()
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))

    step = "got a GradientStep, which would go against the scaled"
    refused(lambda: scaled_step(trainer, scaler), step)
    refused(lambda: scaler.step(optimizer), step)
    refused(lambda: scaled_step(other, scaler), "got Adam with fused=True")
    refused(lambda: scaler.step(fused), "got Adam with fused=True")
    assert (trainer.steps, other.steps) == (0, 0)
    with pytest.raises(TypeError, match="scaler"):
        scaled_step(trainer, 3)
