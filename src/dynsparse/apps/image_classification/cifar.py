"""Train a wide residual network with sparse convolutions on CIFAR-10: `run(Options(...))`.

The defaults are those of Evci et al. 2020, "Rigging the Lottery", section 4.2, and the authors'
program: 250 epochs of batches of 128, momentum 0.9 (Nesterov's), weight decay 5e-4, rate 0.1, a
fifth of it after every 30,000 steps, updates of the patterns every 100 steps up to step 75,000 of
97,656.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from dynsparse.allocation import METHODS as ALLOCATIONS
from dynsparse.apps import image_classification
from dynsparse.apps.common.options import SPARSE, TRAINS, methods_with, panel
from dynsparse.apps.image_classification.training import ImageOptions
from dynsparse.data import CLASSES, DataSet
from dynsparse.data.images import SIDE
from dynsparse.nn import sparsify
from dynsparse.options import choice, integer_between, number, override
from dynsparse.training.algorithms import BY_NAME
from dynsparse.training.schedule import default_interval

_network = panel("Network", "network")
_training = panel("Training", "training")


@dataclass(kw_only=True)
class Options(ImageOptions):
    """One training; the flags of `dynsparse cifar`."""

    # 0.1 with momentum at a batch of 128.
    rates: ClassVar[dict[str, float]] = {
        "GradientDescent": 0.1 / 8,
        "Momentum": 0.1 / 8,
        "Adam": 0.001 / 8**0.5,
    }
    decays: ClassVar[dict[str, float]] = {
        "GradientDescent": 5e-4,
        "Momentum": 5e-4,
        "Adam": 1e-4,
    }

    dataset: str = override(
        ImageOptions,
        "dataset",
        default="cifar-10",
        help="What to train on; digits needs no download: they are brought to the same form.",
        kind=choice("digits", "cifar-10"),
    )
    data_dir: Path | None = override(
        ImageOptions,
        "data_dir",
        help="Folder with cifar-10-binary.tar.gz or the files in it; without it that is downloaded "
        "once.",
    )
    depth: int = _network(22, "Layers of the network: 6 n + 4.", integer_between(10, 1_000))
    width: int = _network(2, "Channels, as a multiple of 16, 32 and 64.", integer_between(1, 1_000))
    sparsity: float = _network(
        0.9, "Share of the weights left out, the first convolution's not counted.",
        number(0, 1, below=True), methods=tuple(BY_NAME), complement="density",
    )  # fmt: skip
    allocation: str = _network(
        "erk", "How the density is shared among the layers.", choice(*ALLOCATIONS),
        methods=tuple(BY_NAME), needs=(SPARSE,),
    )  # fmt: skip
    block_size: int = override(
        ImageOptions,
        "block_size",
        help="Edge of the blocks, over channels; with blocks the last layer stays dense.",
        kind=choice(1, 4, 8, 16),
    )
    update_interval: int | None = override(
        ImageOptions,
        "update_interval",
        help="Steps between pattern updates.",
        by_default="100, or a tenth of the steps with updates where that is less",
    )
    prune_end: float = panel("Sparsity", "training")(
        0.768, "Share of the training after which patterns stay.",
        number(0, 1, above="a number in (0, 1]"), methods=methods_with("update_interval"),
        needs=(SPARSE, TRAINS),
    )  # fmt: skip
    steps_per_epoch: int = override(ImageOptions, "steps_per_epoch", help="Reports per epoch.")
    batch_size: int = override(ImageOptions, "batch_size", default=128)
    optimizer: str = override(ImageOptions, "optimizer", default="Momentum")
    epochs: int | None = override(
        ImageOptions, "epochs", default=None, by_default="250 of CIFAR-10, 20 of the digits"
    )
    learning_rate: float | None = override(
        ImageOptions,
        "learning_rate",
        help="First learning rate; the default is for a batch of 128 and scales with the batch.",
        by_default="0.1, with Adam 0.001",
    )
    decay: str = override(
        ImageOptions,
        "decay",
        default="drops",
        help="Of the learning rate; drops are the paper's: a fifth, three times in the training.",
        kind=choice("drops", "cosine", "constant"),
    )
    augment: str | None = _training(
        None,
        "Which images the training sees: moved by up to 4 pixels, and mirrored at random "
        "(move-mirror), moved only, or as they are.",
        choice("move-mirror", "move", "none"),
        by_default="move-mirror of CIFAR-10, none of the digits",
    )
    checkpoint_freq: int = override(ImageOptions, "checkpoint_freq", default=10)
    threads: int = override(ImageOptions, "threads", help="CPU threads.")

    def check_network(self) -> None:
        if (self.depth - 4) % 6:
            raise ValueError(
                f"--depth: expected 6 n + 4, such as 10, 16, 22 or 28, got {self.depth}"
            )

    @property
    def has_sparse_layers(self) -> bool:
        return self.method != "dense" and self.sparsity > 0

    @property
    def length(self) -> int:
        if self.epochs is not None:
            return self.epochs
        return 20 if self.dataset == "digits" else 250

    @property
    def augmentation(self) -> str:
        """ "move-mirror", "move" or "none"."""
        if self.augment is not None:
            return self.augment
        return "none" if self.dataset == "digits" else "move-mirror"

    @property
    def label(self) -> str:
        return f"Sparsity_{self.sparsity:g}"


class Network(nn.Module):
    """A convolution, three groups of residual blocks, the mean over each channel, a linear layer.

    forward: images uint8 [batch, 3, 32, 32] -> logits [batch, 10]. Each channel is brought to
    mean 0 and standard deviation 1 of the training images, `mean` and `deviation` [3].

    Source: Zagoruyko and Komodakis 2016, "Wide Residual Networks", sections 2 and 2.3, without
    dropout: depth 6 n + 4, blocks of two 3x3 convolutions, each after a batch norm and relu.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, depth: int, width: int, mean: Tensor, deviation: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", mean.view(3, 1, 1))
        self.register_buffer("deviation", deviation.view(3, 1, 1))
        self.first = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        channels = 16
        blocks: list[nn.Module] = []
        for group, base in enumerate((16, 32, 64)):
            for place in range((depth - 4) // 6):
                stride = 2 if group and not place else 1
                blocks.append(_Block(channels, base * width, stride))
                channels = base * width
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.BatchNorm2d(channels)
        self.output = nn.Linear(channels, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = (images.to(self.mean.dtype) - self.mean) / self.deviation
        x = self.norm(self.blocks(self.first(x))).relu()
        return self.output(x.mean((2, 3)))


class _Block(nn.Module):
    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv1 = nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.shortcut: nn.Module | None = None
        if stride != 1 or channels != out:
            self.shortcut = nn.Conv2d(channels, out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x).relu()
        around = x if self.shortcut is None else self.shortcut(y)
        return around + self.conv2(self.norm2(self.conv1(y)).relu())


def build_network(
    options: Options, mean: Tensor, deviation: Tensor, generator: torch.Generator
) -> Network:
    """The network of `options`, its weights and patterns drawn from `generator`.

    The first convolution stays dense, as in the RigL paper; what the allocation makes dense does
    too, and so do the first and last layer where there are blocks, which do not divide them.
    """
    network = Network(options.depth, options.width, mean, deviation)
    _initialise(network, generator)
    if options.has_sparse_layers:
        sparsify(
            network,
            1 - options.sparsity,
            options.block_size,
            options.allocation,
            exclude=["first"] if options.block_size == 1 else ["first", "output"],
            generator=generator,
            verbose=False,
        )
    return network


@torch.no_grad()
def _initialise(network: nn.Module, generator: torch.Generator) -> None:
    """Draw the weights that torch's layers draw from the global generator from `generator`.

    Convolutions are drawn as in He et al. 2015, "Delving Deep into Rectifiers".
    """
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            fan_in = module.weight[0].numel()
            nn.init.normal_(module.weight, std=math.sqrt(2 / fan_in), generator=generator)
        elif isinstance(module, nn.Linear):
            bound = 1 / math.sqrt(module.in_features)
            nn.init.uniform_(module.weight, -bound, bound, generator=generator)
            nn.init.zeros_(module.bias)


_SIDE = 32
_REACH = 4  # pixels that an image is moved by at most


class CifarTraining(image_classification.Training):
    """A wide residual network on coloured images of 32x32."""

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
        """Images as bytes [n, 3, 32, 32]: those of CIFAR-10, or grey digits with a border."""
        if images.dtype == torch.uint8:
            return images.view(-1, 3, _SIDE, _SIDE)
        grey = pad(images.view(-1, 1, SIDE, SIDE), [(_SIDE - SIDE) // 2] * 4)
        return (255 * grey).round().to(torch.uint8).expand(-1, 3, -1, -1)

    def augment_images(self, images: Tensor, batch: Tensor) -> Tensor:
        kind = self.options.augmentation
        if kind == "none":
            return images
        by = torch.randint(-_REACH, _REACH + 1, (len(batch), 2), generator=self.generator)
        mirror = torch.zeros(len(batch), 1, dtype=by.dtype)
        if kind == "move-mirror":
            mirror = torch.randint(0, 2, (len(batch), 1), generator=self.generator)
        local, _ = self.rank_share(torch.cat([by, mirror], 1))
        local = local.to(images.device)
        return shift(images, local[:, :2], local[:, 2] > 0)


def shift(images: Tensor, by: Tensor, mirror: Tensor) -> Tensor:
    """Images [n, channels, side, side], each seen from `by` rows and columns further on, and
    then mirrored left to right where `mirror` is true.

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


run = partial(image_classification.run, CifarTraining)
"""Train and test as options say: `run(options, console, given=...)`; see
`image_classification.run`."""
