"""Elastic distortion of training images, so that a network sees them differently in each epoch.

Each point of a 3 x 3 lattice is displaced by normal random numbers, with bicubic interpolation
between the points: shift, rotation, scaling, shear and bending in one, with one number for the
amount. After Simard et al. 2003, "Best practices for convolutional neural networks applied to
visual document analysis", whose displacement field is finer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

LATTICE = 3


def distorted(images: Tensor, pixels: float, generator: torch.Generator) -> Tensor:
    """Distort every image, each by its own displacements.

    Args:
        images: [images, side * side].
        pixels: standard deviation of the displacement of a lattice point along each axis.
    """
    made = torch.empty_like(images)
    side = int(images.shape[1] ** 0.5)
    at = torch.linspace(-1, 1, side, dtype=images.dtype)
    still = torch.stack(torch.meshgrid(at, at, indexing="xy"), -1)
    # How each lattice point moves each pixel; one product is faster than interpolating.
    points = torch.eye(LATTICE**2, dtype=images.dtype).view(-1, 1, LATTICE, LATTICE)
    spread = F.interpolate(points, (side, side), mode="bicubic", align_corners=True).flatten(1)
    spread *= pixels * 2 / (side - 1)  # grid_sample's image is 2 wide
    for source, target in zip(images.split(1000), made.split(1000), strict=True):
        pull = torch.randn(len(source), 2, LATTICE**2, generator=generator, dtype=images.dtype)
        grid = still + (pull @ spread).view(-1, 2, side, side).permute(0, 2, 3, 1)
        bent = F.grid_sample(source.view(-1, 1, side, side), grid, align_corners=True)
        target.copy_(bent.flatten(1))
    return made


class Distortion(Protocol):
    """The distortion settings of a training.

    Attributes:
        distort: pixels, as in `distorted`, while images are distorted at all.
        distorted: the share of distorted images.
    """

    @property
    def distort(self) -> float: ...

    @property
    def distorted(self) -> float: ...

    def distort_at(self, done: float) -> float:
        """Pixels after the share `done` of the training."""


class Bent:
    """The images of an epoch: originals, and a distorted copy for each distortion setting."""

    def __init__(self, images: Tensor, settings: Sequence[Distortion]) -> None:
        self.count, self.settings = len(images), settings
        self.sizes = sorted({own.distort for own in settings} - {0.0})
        self.all = images.repeat(1 + len(self.sizes), 1)
        self.chance = torch.Generator().manual_seed(0)

    def epoch(self, done: float, order: Tensor) -> Tensor:
        """Distort anew; return indices into `all`, as seen by each network: [images, networks]."""
        for at, size in enumerate(self.sizes, 1):
            if any(own.distort_at(done) == size for own in self.settings):
                own = self.all[at * self.count : (at + 1) * self.count]
                own.copy_(distorted(self.all[: self.count], size, self.chance))
        shares = torch.tensor([own.distorted for own in self.settings])
        which = [(0.0, *self.sizes).index(own.distort_at(done)) for own in self.settings]
        bent = torch.rand(order.shape, generator=self.chance) < shares
        return order + self.count * torch.tensor(which) * bent
