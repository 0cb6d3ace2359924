"""Pictures a little out of shape: what a network sees in place of the same picture every epoch.

The plane of a picture is pulled at a lattice of 3 x 3 points, each displaced by its own normal
numbers, with bicubic interpolation between them: shifts, turns, stretching, slant and bends in one,
and one number for how much. In the manner of Simard et al. 2003, "Best practices for convolutional
neural networks applied to visual document analysis", whose field of displacements is finer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

LATTICE = 3


def distorted(images: Tensor, pixels: float, generator: torch.Generator) -> Tensor:
    """Every picture, bent by its own displacements.

    Args:
        images: [pictures, side * side].
        pixels: the standard deviation of the displacement of a point of the lattice, each way.
    """
    made = torch.empty_like(images)
    side = int(images.shape[1] ** 0.5)
    at = torch.linspace(-1, 1, side, dtype=images.dtype)
    still = torch.stack(torch.meshgrid(at, at, indexing="xy"), -1)
    # What each point of the lattice does to each pixel; one product is quicker than interpolating.
    points = torch.eye(LATTICE**2, dtype=images.dtype).view(-1, 1, LATTICE, LATTICE)
    spread = F.interpolate(points, (side, side), mode="bicubic", align_corners=True).flatten(1)
    spread *= pixels * 2 / (side - 1)  # the picture is 2 wide
    for source, target in zip(images.split(1000), made.split(1000), strict=True):
        pull = torch.randn(len(source), 2, LATTICE**2, generator=generator, dtype=images.dtype)
        grid = still + (pull @ spread).view(-1, 2, side, side).permute(0, 2, 3, 1)
        bent = F.grid_sample(source.view(-1, 1, side, side), grid, align_corners=True)
        target.copy_(bent.flatten(1))
    return made


class Distortion(Protocol):
    """What the settings of a training say of bending.

    Attributes:
        distort: pixels, as in `distorted`, while pictures are bent at all.
        distorted: the share of pictures that are bent.
    """

    @property
    def distort(self) -> float: ...

    @property
    def distorted(self) -> float: ...

    def distort_at(self, done: float) -> float:
        """Pixels after the fraction `done` of the training."""


class Bent:
    """The pictures of an epoch: as they are, and by how far the settings want them bent."""

    def __init__(self, images: Tensor, settings: Sequence[Distortion]) -> None:
        self.count, self.settings = len(images), settings
        self.sizes = sorted({own.distort for own in settings} - {0.0})
        self.all = images.repeat(1 + len(self.sizes), 1)
        self.chance = torch.Generator().manual_seed(0)

    def epoch(self, done: float, order: Tensor) -> Tensor:
        """Which of `all` each network sees, in its order [pictures, networks]."""
        for at, size in enumerate(self.sizes, 1):
            if any(own.distort_at(done) == size for own in self.settings):
                own = self.all[at * self.count : (at + 1) * self.count]
                own.copy_(distorted(self.all[: self.count], size, self.chance))
        shares = torch.tensor([own.distorted for own in self.settings])
        which = [(0.0, *self.sizes).index(own.distort_at(done)) for own in self.settings]
        bent = torch.rand(order.shape, generator=self.chance) < shares
        return order + self.count * torch.tensor(which) * bent
