"""LeNets that train as one network are those that train alone."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import lenet
import lenet_together


@pytest.mark.parametrize("decays", [(), (1e-2, 0.0, 3e-3)])
def test_together_is_as_alone(decays):
    settings = lenet.Settings(rate=0.2, dropout=0.0, interval=5, share=0.3)
    seeds, steps = (0, 1, 2), 24
    together = lenet_together.Training(
        [lenet.build(seed, settings).double() for seed in seeds], steps, settings, decays
    )
    chance = torch.Generator().manual_seed(0)
    images = torch.rand(3, steps * lenet.BATCH, 784, generator=chance, dtype=torch.float64)
    labels = torch.randint(10, (3, steps * lenet.BATCH), generator=chance)
    for i in range(steps):
        batch = slice(i * lenet.BATCH, (i + 1) * lenet.BATCH)
        together.step(images[:, batch].transpose(0, 1), labels[:, batch].t())
    assert together.trainer.updates == 3

    for at, seed in enumerate(seeds):
        own = replace(settings, decay=decays[at]) if decays else settings
        alone = lenet.Contender(lenet.build(seed, own).double(), False, steps, own)
        alone.epoch(images[at], labels[at], torch.arange(steps * lenet.BATCH))
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
        error = alone.error(images[at], labels[at])
        assert abs(float(together.errors(images[at], labels[at])[at]) - error) < 1e-9
