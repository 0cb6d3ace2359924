"""A synthetic task of CIFAR-10's shape, for trainings where no data can be had.

These are no pictures of anything. Every class has a few prototypes, smooth random fields of
3 x 32 x 32; an example is one of its class's prototypes with a random sign, under noise. The sign
makes the mean of every class zero, so that no linear classifier can tell classes apart: the hidden
layers must be trained.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_CHANNELS, _SIDE, _COARSE = 3, 32, 8
PIXELS = _CHANNELS * _SIDE * _SIDE
CLASSES = 10


@dataclass(frozen=True)
class Task:
    """Examples [n, 3072] float32 of mean 0 and variance about 1, and labels [n] int64."""

    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor


def make_task(
    *,
    train: int = 20000,
    test: int = 2000,
    prototypes: int = 4,
    signal: float = 0.25,
    seed: int = 0,
) -> Task:
    """The task of a seed.

    Args:
        train, test: how many examples.
        prototypes: how many per class.
        signal: amplitude of a prototype, where the noise has amplitude 1.
    """
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(CLASSES * prototypes, _CHANNELS, _COARSE, _COARSE, generator=generator)
    fields = F.interpolate(coarse, size=(_SIDE, _SIDE), mode="bilinear").flatten(1)
    fields = fields / fields.std(1, keepdim=True)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        which = torch.randint(len(fields), (count,), generator=generator)
        sign = 2.0 * torch.randint(2, (count, 1), generator=generator) - 1
        noise = torch.randn(count, fields.shape[1], generator=generator)
        examples = noise.addcmul_(fields[which], sign, value=signal)
        return examples.div_((1 + signal**2) ** 0.5), which // prototypes

    return Task(*draw(train), *draw(test))
