"""Training of one network on the CPU or on a device."""

import torch
from torch import nn

from dynsparse.nn import SparseLinear
from dynsparse.pattern import SparsePattern

TIMES = {"total_steps": 30, "update_interval": 5}


def model(b=1, dtype=torch.float64):
    """Return a network of two pairs of equal layers, which a device updates together."""
    g = torch.Generator().manual_seed(0)
    sizes = [(16, 24), (24, 16)] * 2
    layers = [SparseLinear(*size, 0.4, b, generator=g) for size in sizes]
    return nn.Sequential(layers[0], nn.GELU(), *layers[1:]).to(dtype)


def train(net, make, steps=21):
    """Return (trainer, optimizer, patterns after each step, losses)."""
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    torch.manual_seed(0)
    trainer = make(net, optimizer)
    g = torch.Generator().manual_seed(1)
    dtype = next(net.parameters()).dtype
    patterns, losses = [], []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = net(torch.randn(12, 16, generator=g, dtype=dtype)).square().mean()
        loss.backward()
        rewirings = trainer.step()
        losses.append(float(loss.detach()))
        patterns.append([layer.pattern for layer in trainer.layers.values()])
        for name, rewiring in (rewirings or {}).items():
            assert trainer.layers[name].pattern is rewiring.after
    return trainer, optimizer, patterns, losses


def both(request, make, b=1):
    """Run a training on the CPU and the same off the CPU."""
    here = train(model(b), make)
    request.getfixturevalue("off_cpu")
    net = model(b)
    assert all(layer.is_on_device for layer in net if isinstance(layer, SparseLinear))
    return here, train(net, make)


def same(here, there):
    (_, _, patterns, losses), (trainer, _, others, again) = here, there
    assert trainer.updates > 0
    for step, (own, other) in enumerate(zip(patterns, others, strict=True)):
        assert own == other, step
        assert all(map(SparsePattern._has_slots_of, own, other)), step
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(again), rtol=1e-9, atol=0)


def backward(net):
    net.zero_grad()
    net(torch.randn(12, 16, dtype=next(net.parameters()).dtype)).square().mean().backward()
