"""The network: a wide residual network, its convolutions made sparse."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from dynsparse.apps.pictures.cifar.options import Options
from dynsparse.data import CLASSES
from dynsparse.nn import sparsify


class Network(nn.Module):
    """A convolution, three groups of residual blocks, the mean over each channel, a linear layer.

    forward: pictures uint8 [batch, 3, 32, 32] -> logits [batch, 10]. Each channel is brought to
    mean 0 and standard deviation 1 of the training pictures, `mean` and `deviation` [3].

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
            for number in range((depth - 4) // 6):
                stride = 2 if group and not number else 1
                blocks.append(_Block(channels, base * width, stride))
                channels = base * width
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.BatchNorm2d(channels)
        self.output = nn.Linear(channels, CLASSES)

    def forward(self, pictures: Tensor) -> Tensor:
        x = (pictures.to(self.mean.dtype) - self.mean) / self.deviation
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
    _draw(network, generator)
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
def _draw(network: nn.Module, generator: torch.Generator) -> None:
    """What torch's layers draw from the global generator, from ours.

    Convolutions as in He et al. 2015, "Delving Deep into Rectifiers".
    """
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            fan_in = module.weight[0].numel()
            nn.init.normal_(module.weight, std=math.sqrt(2 / fan_in), generator=generator)
        elif isinstance(module, nn.Linear):
            bound = 1 / math.sqrt(module.in_features)
            nn.init.uniform_(module.weight, -bound, bound, generator=generator)
            nn.init.zeros_(module.bias)
