"""The training on CIFAR-10: its pictures as they come, moved and mirrored."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from dynsparse.apps import pictures
from dynsparse.apps.pictures.cifar.network import Network, build_network
from dynsparse.apps.pictures.cifar.options import Options
from dynsparse.data import DataSet
from dynsparse.data.pictures import SIDE
from dynsparse.training.schedule import default_interval

_SIDE = 32
_REACH = 4  # pixels that a picture is moved by at most


class CifarTraining(pictures.Training):
    """A wide residual network on coloured pictures of 32x32."""

    app = "cifar"
    options: Options

    def __init__(self, options: Options, data: DataSet, seed: int) -> None:
        self._statistics = _statistics(self.arrange(data.train.images))
        super().__init__(options, data, seed)

    @property
    def pattern_steps(self) -> int:
        return max(1, round(self.options.prune_end * self.total_steps))

    @property
    def pattern_interval(self) -> int:
        return self.options.update_interval or default_interval(self.pattern_steps)

    def build_network(self) -> Network:
        return build_network(self.options, *self._statistics, self.generator)

    def headline(self) -> str:
        return f"wide residual network {self.options.depth}-{self.options.width}"

    def arrange(self, images: Tensor) -> Tensor:
        """Bytes [n, 3, 32, 32]: those of CIFAR-10, or grey digits with a border."""
        if images.dtype == torch.uint8:
            return images.view(-1, 3, _SIDE, _SIDE)
        grey = pad(images.view(-1, 1, SIDE, SIDE), [(_SIDE - SIDE) // 2] * 4)
        return (255 * grey).round().to(torch.uint8).expand(-1, 3, -1, -1)

    def vary(self, images: Tensor, batch: Tensor) -> Tensor:
        kind = self.options.augmentation
        if kind == "none":
            return images
        by = torch.randint(-_REACH, _REACH + 1, (len(batch), 2), generator=self.generator)
        mirror = torch.zeros(len(batch), 1, dtype=by.dtype)
        if kind == "move-mirror":
            mirror = torch.randint(0, 2, (len(batch), 1), generator=self.generator)
        own, _ = self.share(torch.cat([by, mirror], 1))
        own = own.to(images.device)
        return moved(images, own[:, :2], own[:, 2] > 0)


def moved(images: Tensor, by: Tensor, mirror: Tensor) -> Tensor:
    """Pictures [n, channels, side, side], each seen from `by` rows and columns further on, and
    then left and right exchanged where `mirror` says so.

    What lies beyond an edge is what lies before it, mirrored; the edge itself is there once.

    Args:
        by: int64 [n, 2], below the side in size; mirror: bool [n].
    """
    side = images.shape[-1]
    line = torch.arange(side, device=images.device)
    columns = torch.where(mirror[:, None], line.flip(0), line) + by[:, 1:]
    rows = line + by[:, :1]
    rows, columns = (side - 1 - (side - 1 - at.abs()).abs() for at in (rows, columns))
    number = torch.arange(len(images), device=images.device)[:, None, None]
    return images[number, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def _statistics(images: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation [3] of the channels of bytes, exact and the same everywhere."""
    levels = torch.arange(256, dtype=torch.float64)
    counts = torch.stack(
        [torch.bincount(images[:, c].flatten().long(), minlength=256) for c in range(3)]
    ).double()
    shares = counts / counts.sum(1, keepdim=True)
    mean = shares @ levels
    deviation = (shares @ levels.square() - mean.square()).sqrt()
    return mean.float(), deviation.float().clamp_min(1.0)


run = partial(pictures.run, CifarTraining)
"""Train and test as options say: `run(options, console, given=...)`, see `pictures.run`."""
