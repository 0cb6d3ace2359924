"""LeNets trained together in one network equal those trained alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import lenet
import lenet_images
import lenet_together

VARIANTS = ("decay=1e-2", "decay=0 rate=0.1 initial=0.5", "smoothing=0.2")


@pytest.mark.slow
@pytest.mark.parametrize("variants", [("", "", ""), VARIANTS])
def test_joint_training_equals_separate_training(variants):
    usual = lenet.Settings(rate=0.2, dropout=0.0, interval=5, share=0.3)
    settings = [lenet_together.variant_of(words, usual) for words in variants]
    seeds, steps = (0, 1, 2), 24
    runs = zip(seeds, settings, strict=True)
    together = lenet_together.Training(
        [lenet.build(*run).double() for run in runs], steps, settings
    )
    chance = torch.Generator().manual_seed(0)
    images = torch.rand(3, steps * lenet.BATCH, 784, generator=chance, dtype=torch.float64)
    labels = torch.randint(10, (3, steps * lenet.BATCH), generator=chance)
    for i in range(steps):
        if i == 20:  # of 24, the last quarter of which has no updates
            together.average.take(together.done, together.settings)
        batch = slice(i * lenet.BATCH, (i + 1) * lenet.BATCH)
        together.step(images[:, batch].transpose(0, 1), labels[:, batch].t())
    together.average.take(together.done, together.settings)
    assert together.trainer.updates == 3

    for at, seed in enumerate(seeds):
        own = settings[at]
        alone = lenet.Contender(lenet.build(seed, own).double(), "rigl", steps, own)
        for part in torch.arange(steps * lenet.BATCH).split(20 * lenet.BATCH):
            alone.epoch(images[at], labels[at], part)
        assert alone.trainer.updates == 3
        for mine, theirs in zip(
            together.model.sparse, (alone.model[0], alone.model[2]), strict=True
        ):
            assert lenet_together.of_block(mine.pattern, at, len(seeds)) == theirs.pattern
            values = mine.values.view(len(seeds), -1)[at]
            torch.testing.assert_close(values, theirs.values, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(
            together.model.weight[at], alone.model[4].weight, rtol=1e-9, atol=1e-11
        )
        for mine, theirs in (
            (together.model, alone.model),
            (
                together.average.model,
                alone.average.model,
            ),
        ):
            error = alone.error(images[at], labels[at], theirs)
            assert abs(float(together.errors(images[at], labels[at], mine)[at]) - error) < 1e-9


@pytest.mark.parametrize("method", lenet.METHODS)
def test_methods(method):
    settings = lenet.Settings(interval=5, dropout=0.0)
    network = lenet.build(0, settings, method)
    own = lenet.Contender(network, method, 24, settings)
    patterns = [getattr(layer, "pattern", None) for layer in network]
    own.epoch(torch.rand(2000, 784), torch.randint(10, (2000,)), torch.arange(2000))
    changed = [
        before is not None and before != layer.pattern
        for before, layer in zip(patterns, network, strict=True)
    ]
    assert any(changed) == (method in ("rigl", "set"))
    assert any(before is not None for before in patterns) == (method != "dense")
    assert own.steps == 20


def test_average_over_epochs_after_the_last_update():
    settings = lenet.Settings(end=0.5)
    net = lenet.build(0, settings)
    average = lenet.Average(net)
    for done, value in (0.5, 9.0), (0.75, 1.0), (1.0, 2.0):
        with torch.no_grad():
            net[0].values.fill_(value)
        average.take(done, settings)
    assert average.model is not net
    torch.testing.assert_close(
        lenet.ds.densify(average.model.module)[0].weight.max(), torch.tensor(1.5)
    )


def test_each_network_drops_its_own_fraction():
    shares = (0.0, 0.25, 0.5)
    settings = [lenet.Settings(dropout=share) for share in shares]
    runs = zip(range(3), settings, strict=True)
    net = lenet_together.Together([lenet.build(*run) for run in runs], settings)
    torch.manual_seed(0)
    ones = torch.ones(500, 3 * 784)
    found = net._dropped(ones).view(500, 3, 784)
    for at, share in enumerate(shares):
        own = found[:, at]
        assert set(own.unique().tolist()) <= {0.0, float(torch.tensor(1 / (1 - share)))}
        assert abs(float((own == 0).float().mean()) - share) < 0.01
    net.eval()
    assert net._dropped(ones) is ones


def test_different_shared_options_raise():
    settings = [lenet.Settings(), lenet.Settings(interval=5)]
    nets = [lenet.build(0, own) for own in settings]
    with pytest.raises(SystemExit, match="the same interval"):
        lenet_together.Training(nets, 10, settings)
    with pytest.raises(SystemExit, match="got 'decoy'"):
        lenet_together.variant_of("decoy=1", settings[0])


def bar():
    """Make an image of a vertical bar, three pixels wide."""
    image = torch.zeros(28, 28)
    image[4:24, 12:15] = 1
    return image.flatten()


def test_distortion_of_images():
    images = bar().repeat(3000, 1)
    chance = torch.Generator().manual_seed(0)
    torch.testing.assert_close(lenet_images.distorted(images, 0.0, chance), images)
    bent = lenet_images.distorted(images, 1.0, chance)
    assert bent.dtype == images.dtype
    assert 0 <= bent.min() < bent.max() <= 1
    middle = bent.view(-1, 28, 28)[:, 13:15].sum(1)  # near the middle point of the lattice
    centre = (middle * torch.arange(28.0)).sum(1) / middle.sum(1)
    assert abs(float(centre.mean()) - 13) < 0.1
    assert abs(float(centre.std()) - 1) < 0.1
    assert not torch.equal(bent[0], bent[1])


def test_each_network_gets_its_distortion():
    images = bar().repeat(400, 1)
    asked = "", "distort=1", "distort=2 distorted=0.5", "distort=1 clean=0.25"
    settings = [lenet_together.variant_of(words, lenet.Settings()) for words in asked]
    bent = lenet_images.Bent(images, settings)
    order = torch.stack([torch.randperm(400) for _ in asked], 1)
    seen = bent.epoch(0.5, order)
    assert torch.equal(seen % 400, order)
    copies = seen // 400
    assert copies[:, (0, 1, 3)].unique(dim=0).tolist() == [[0, 1, 1]]
    assert set(copies[:, 2].tolist()) == {0, 2}
    assert abs(float((copies[:, 2] == 2).float().mean()) - 0.5) < 0.1
    before = bent.all.clone()
    assert set((bent.epoch(0.75, order) // 400)[:, 3].tolist()) == {0}
    assert torch.equal(bent.all[:400], images)
    assert not torch.equal(bent.all[400:800], before[400:800])
