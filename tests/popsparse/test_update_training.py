"""Trainings with pattern updates on the tile machine equal those on the CPU."""

import pytest
import torch
from torch import nn

import dynsparse as ds
import popsparse
from popsparse.machine import Target

TARGET = Target.bow(tiles=12)


def images(count, generator):
    """Make noisy 28 x 28 images of ten classes."""
    kinds = torch.randn(10, 784, generator=generator)
    labels = torch.arange(count) % 10
    return kinds[labels] + 0.5 * torch.randn(count, 784, generator=generator), labels


def train(target, dtype=torch.float32, *, block=4, micro=1, steps=24, **options):
    generator = torch.Generator().manual_seed(0)
    x, labels = images(32 * steps, generator)
    where = {} if target is None else {"target": target, **options}
    torch.manual_seed(1)
    model = nn.Sequential(
        ds.nn.SparseLinear(784, 320, 0.1, block, generator=generator, **where),
        nn.ReLU(),
        ds.nn.SparseLinear(320, 10, 0.5, generator=generator, **where),
    ).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = ds.RigL(
        model, optimizer, total_steps=steps, update_interval=6, drop_fraction=0.3, pooling="avg"
    )
    losses = []
    for batch, wanted in zip(x.to(dtype).split(32), labels.split(32), strict=True):
        optimizer.zero_grad()
        for part, right in zip(batch.chunk(micro), wanted.chunk(micro), strict=True):
            loss = nn.functional.cross_entropy(model(part), right) / micro
            loss.backward()
        trainer.step()
        losses.append(loss.item())
    return model, losses


@pytest.fixture(scope="module")
def on_cpu():
    return {dtype: train(None, dtype) for dtype in (torch.float32, torch.float64)}


def test_training_of_mnist_size_equals_the_cpu(on_cpu):
    target = Target.bow(tiles=24)
    model, losses = train(target, target_options={"dense_grad": {"partials_type": "float32"}})
    assert losses[0] > 2
    assert losses[-1] < 0.3
    for other, wanted in on_cpu.values():
        assert losses == pytest.approx(wanted, rel=1e-3, abs=1e-4)
        for mine, theirs in zip(model, other, strict=True):
            if isinstance(mine, ds.nn.SparseLinear):
                assert mine.pattern == theirs.pattern
                torch.testing.assert_close(
                    mine.to_dense().double(), theirs.to_dense().double(), rtol=1e-3, atol=1e-4
                )
    profiles = popsparse.machine_profiles(model[0])
    assert set(profiles) == {"forward", "grad_input", "grad_weight", "scores", "rewire"} - {
        "grad_input"  # nobody asks for the gradient of the images
    }
    sent = [s.to_host_bytes for s in profiles["scores"].steps if "scores to host" in s.name]
    assert sum(sent) == 80 * 196 * 4
    assert profiles["rewire"].from_host_bytes > 0


def test_micro_batches():
    wanted = train(None, micro=2, steps=12)[0]
    found = train(TARGET, micro=2, steps=12)[0]
    assert found[0].pattern == wanted[0].pattern
    assert found[2].pattern == wanted[2].pattern


def test_histories_of_several_steps_grow_on_the_host():
    torch.manual_seed(0)
    layer = ds.nn.SparseLinear(32, 48, 0.3, 4, target=TARGET)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    trainer = ds.SNFS(layer, optimizer, total_steps=8, update_interval=2)
    before = layer.pattern
    for _ in range(4):
        layer(torch.randn(4, 32)).square().sum().backward()
        trainer.step()
        optimizer.zero_grad()
    assert layer.pattern != before
    assert "scores" not in popsparse.machine_profiles(layer)


def test_float16_overflow_and_nan_gradients():
    def one_step(loss, line):
        torch.manual_seed(0)
        layer = ds.nn.SparseLinear(64, 96, 0.3, 16, target=TARGET, dtype=torch.float16)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
        trainer = ds.RigL(layer, optimizer, total_steps=4, update_interval=1)
        before = layer.pattern
        loss(layer(torch.ones(4, 64, dtype=torch.float16))).backward()
        with pytest.raises(ValueError, match=line):
            trainer.step()
        assert layer.pattern is before

    one_step(lambda y: (y * 1000).sum(), r"overflow torch\.float16: lower the scale")
    one_step(lambda y: (y * float("nan")).sum(), "NaN or infinity")
