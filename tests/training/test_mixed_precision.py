"""Autocast in bfloat16 and float16, with GradScaler, on and off the CPU."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dynsparse as ds
from dynsparse.nn import SparseConv2d, SparseLinear
from dynsparse.nn.active_set import ActiveSet
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
    """Return the losses of a training with an update every five steps."""
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
def test_16_bit_training_follows_float32(place, dtype, b):
    exact, low = train(made(b), torch.float32), train(made(b), dtype)
    assert low[-1] < 0.6 * low[0]
    for one, other in zip(low, exact, strict=True):
        assert one == pytest.approx(other, rel=0.1)


@pytest.mark.parametrize("kind", ["linear", "blocks", "conv", "active", "transformed"])
@pytest.mark.parametrize(
    ("stored", "computed"), [(torch.bfloat16, torch.float16), (torch.float16, torch.bfloat16)]
)
def test_values_of_16_bits_are_cast_like_dense_weights(place, kind, stored, computed):
    if kind == "conv":
        layer, x = SparseConv2d(4, 8, 3, density=0.5), torch.randn(2, 4, 6, 6)
    else:
        layer, x = SparseLinear(16, 32, 0.5, 4 if kind == "blocks" else 1), torch.randn(5, 16)
    layer.to(stored)
    exact = copy.deepcopy(layer).float()
    exact.values.data = layer.values.detach().to(computed).float()
    if kind == "active":
        for m in (layer, exact):
            m.active = ActiveSet(m.pattern, torch.arange(0, m.pattern.nnz, 2), torch.device("cpu"))
    with torch.autocast("cpu", computed):
        if kind == "transformed":
            y = torch.vmap(layer)(x[None])[0]
        else:
            y = layer(x)
    assert y.dtype is computed
    expected = exact(x.to(computed))
    torch.testing.assert_close(y, expected)
    y.float().square().sum().backward()
    expected.float().square().sum().backward()
    assert layer.values.grad.dtype is stored
    torch.testing.assert_close(layer.values.grad.float(), exact.values.grad, rtol=0.02, atol=0.1)


@pytest.mark.parametrize("how", [True, False])
def test_activation_checkpointing_is_exact(place, how):
    assert train(made(1), torch.float16) == train(made(1), torch.float16, how)


def test_step_skipped_by_the_scaler_does_not_count(place):
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


def test_updates_by_hand_equal_those_in_float32():
    """One layer of 4 x 4, all numbers exact in float16: W = diag(4, 3, 2, 1).

    The loss is sum(Y * C) for inputs that are unit vectors, so dW = C^T, whose largest entry
    outside the diagonal is C[2, 1]: the update drops (3, 3) and grows (1, 2).
    """
    pattern = ds.SparsePattern(range(4), range(4), shape=(4, 4))
    c = torch.tensor([[1, 2, -1, 0], [0, 2, 3, 1], [-1, 7, 3, -4], [5, 0, 6, 1]]) / 1024
    grown = []
    for dtype in (torch.float32, torch.float16):
        layer = SparseLinear(4, 4, 0.25, bias=False)
        layer.set_pattern(pattern)
        with torch.no_grad():
            layer.values.copy_(torch.tensor([4.0, 3, 2, 1]))
        optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
        trainer = ds.RigL(
            layer, optimizer, total_steps=100, update_interval=1, drop_fraction=0.3,
            initial_value=GradientStep(),
        )  # fmt: skip
        is_half = dtype is torch.float16
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, enabled=is_half)
        skipped = -1
        rewirings = None
        while rewirings is None:  # until the scale lets the gradients be finite
            assert torch.equal(layer.values, torch.tensor([4.0, 3, 2, 1]))
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype, enabled=is_half):
                loss = (layer(torch.eye(4)).float() * c).sum()
            scaler.scale(loss).backward()
            rewirings = scaled_step(trainer, scaler)
            skipped += 1
        assert (skipped, trainer.steps) == (1 if is_half else 0, 1)
        assert scaler.get_scale() == (2.0**23 if is_half else 1)
        change = rewirings[""]
        assert change.dropped.tolist() == [3]
        assert (change.after.rows[3].item(), change.after.cols[3].item()) == (1, 2)
        grown.append(layer.values.detach())
    # The new weight starts with -lr dW, not with the scaled gradient.
    expected = torch.tensor([4 - 1 / 1024, 3 - 2 / 1024, 2 - 3 / 1024, -7 / 1024])
    assert torch.equal(grown[0], expected)
    assert torch.equal(grown[1], expected)


def test_momentum_uses_unscaled_gradients():
    """The loss scale changes between the steps of the momentum."""
    found = []
    for dtype in (torch.float32, torch.float16):
        model = made(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        trainer = ds.SNFS(model, optimizer, total_steps=99, update_interval=6, window=6)
        is_half = dtype is torch.float16
        scaler = torch.amp.GradScaler("cpu", 2.0**8, growth_interval=2, enabled=is_half)
        generator = torch.Generator().manual_seed(1)
        for _ in range(5):
            x = torch.randn(20, 16, generator=generator)
            optimizer.zero_grad()
            scaler.scale(model(x).square().mean()).backward()
            scaled_step(trainer, scaler)
        assert scaler.get_scale() == (2.0**10 if is_half else 1)
        found.append({n: trainer.history.at(n, m.pattern) for n, m in trainer.layers.items()})
    for name, momentum in found[0].items():
        torch.testing.assert_close(found[1][name], momentum, rtol=1e-6, atol=0)


def test_optimizer_that_skips_steps_silently_raises():
    model = made(1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    fused = torch.optim.Adam(model.parameters(), fused=True)
    trainer = ds.RigL(model, fused, total_steps=9, update_interval=1)
    for take in (lambda: scaled_step(trainer, scaler), lambda: scaler.step(fused)):
        before = [p.detach().clone() for p in model.parameters()]
        scaler.scale(model(torch.randn(20, 16)).square().mean()).backward()
        with pytest.raises(ValueError, match="got Adam with fused=True"):
            take()
        scaler.update()
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert trainer.steps == 0
    with pytest.raises(TypeError, match="scaler"):
        scaled_step(trainer, 3)
