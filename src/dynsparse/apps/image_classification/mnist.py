"""Train MNIST, Fashion-MNIST or the digits with sparse layers: `run(Options(...))`.

Names and most defaults of the options are those of `sparse_mnist.py` of Graphcore's dynamic
sparsity application; docs/mnist.md lists the differences.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dynsparse.apps import image_classification
from dynsparse.apps.common.options import MachineOptions, panel
from dynsparse.apps.image_classification.training import ImageOptions
from dynsparse.data import CLASSES
from dynsparse.data.images import SIDE
from dynsparse.nn import SparseLinear
from dynsparse.options import Need, choice, integer_between, list_of, number, override
from dynsparse.training.algorithms import BY_NAME

_network = panel("Network", "network")
_FIRST = Need(
    "a sparse first layer", lambda o: o.is_sparse(0), lambda o: f"density {o.densities[0]:g}"
)


@dataclass(kw_only=True)
class Options(MachineOptions, ImageOptions):
    """One training; the flags of `dynsparse mnist`."""

    permute_input: str = panel("Data", "network")(
        "none",
        "Order of the pixels; with block, a block of weights covers a tile of the image.",
        choice("none", "block", "random"),
    )
    densities: Sequence[float] = _network(
        (0.1, 0.3),
        "Density of each layer, first to last; 1 is dense.",
        list_of(
            number(0, 1, above="more than 0"), "numbers above 0 and up to 1 (1 is a dense layer)"
        ),
        methods=tuple(BY_NAME),
        also=("density",),
    )
    hidden_sizes: Sequence[int] = _network(
        (320,),
        "Widths of the hidden layers, such as 300 100.",
        list_of(integer_between(1, 1_000_000), "integers between 1 and 1000000"),
        also=("hidden_size",),
    )
    block_size: int = override(
        ImageOptions,
        "block_size",
        help="Edge of the blocks of the first layer.",
        needs=(_FIRST,),
    )
    droprate: float = _network(0.1, "Dropout after every hidden layer.", number(0, 1, below=True))

    def check_network(self) -> None:
        expected = len(self.hidden_sizes) + 1
        if not self.hidden_sizes or len(self.densities) != expected:
            raise ValueError(
                f"--densities: expected one density per layer, {expected} for "
                f"{len(self.hidden_sizes)} hidden layer(s), got {len(self.densities)}: "
                "match --densities and --hidden-sizes"
            )
        first = self.hidden_sizes[0]
        if self.is_sparse(0) and first % self.block_size:
            raise ValueError(
                f"--block-size {self.block_size} does not divide the first hidden size {first}: "
                f"choose a hidden size such as {-(-first // self.block_size) * self.block_size}"
            )

    @property
    def label(self) -> str:
        return "Density_" + "_".join(f"{density:g}" for density in self.densities)

    @property
    def has_sparse_layers(self) -> bool:
        return any(self.is_sparse(layer) for layer in range(len(self.densities)))

    def is_sparse(self, layer: int) -> bool:
        return self.method != "dense" and self.densities[layer] < 1


def image_side(block_size: int) -> int:
    """Edge of the images the network reads: 28, or 32 where blocks do not divide 28 x 28.

    The border of two empty pixels all around keeps the image square and in the middle.
    """
    return SIDE if SIDE * SIDE % block_size == 0 else 32


class Network(nn.Module):
    """Linear layers fc1, fc2, ..., each hidden one followed by relu and dropout.

    forward: images [batch, in] -> logits [batch, 10].
    """

    def __init__(self, layers: list[tuple[str, nn.Module]], droprate: float) -> None:
        super().__init__()
        for name, layer in layers:
            self.add_module(name, layer)
        self._names = [name for name, _ in layers]
        self.dropout = nn.Dropout(droprate)

    def forward(self, x: Tensor) -> Tensor:
        for name in self._names[:-1]:
            x = self.dropout(torch.relu(self.get_submodule(name)(x)))
        return self.get_submodule(self._names[-1])(x)


def build_network(options: Options, generator: torch.Generator) -> Network:
    """The network of `options`, its patterns and weights drawn from `generator`.

    Only the first layer has blocks.
    """
    block = options.block_size if options.is_sparse(0) else 1
    widths = [image_side(block) ** 2, *options.hidden_sizes, CLASSES]
    layers: list[tuple[str, nn.Module]] = []
    for i, (in_features, out_features) in enumerate(itertools.pairwise(widths)):
        layer: nn.Module
        if options.is_sparse(i):
            density = options.densities[i]
            layer = SparseLinear(
                in_features, out_features, density, block if i == 0 else 1, generator=generator
            )
        else:
            layer = nn.Linear(in_features, out_features)
            # nn.Linear draws from torch's global generator; the same distribution from ours.
            bound = 1 / math.sqrt(in_features)
            for parameter in layer.parameters():
                nn.init.uniform_(parameter, -bound, bound, generator=generator)
        layers.append((f"fc{i + 1}", layer))
    return Network(layers, options.droprate)


def pixel_permutation(kind: str, block_size: int, generator: torch.Generator) -> Tensor:
    """The pixel that each input of the network reads: int64 [side^2], the side of `image_side`.

    "none" keeps the image's order, "random" shuffles it. With "block" the inputs of one block
    are a compact tile of the image (2x2 pixels for blocks of 4, 2x4 for 8, 4x4 for 16, 4x8 for
    32, 8x8 for 64, 8x16 for 128) in place of a strip of a row.
    """
    side = image_side(block_size)
    if kind == "random":
        return torch.randperm(side * side, generator=generator)
    pixels = torch.arange(side * side)
    if kind == "none" or block_size == 1:
        return pixels
    height = 1 << (block_size.bit_length() - 1) // 2
    width = block_size // height
    tiles = pixels.view(side // height, height, side // width, width).transpose(1, 2)
    return tiles.flatten()


def arrange_pixels(images: Tensor, permutation: Tensor) -> Tensor:
    """Images [n, 784] as the network reads them: with a border if it needs one, permuted."""
    side = math.isqrt(len(permutation))
    border = (side - SIDE) // 2
    if border:
        images = nn.functional.pad(images.view(-1, SIDE, SIDE), [border] * 4).flatten(1)
    if torch.equal(permutation, torch.arange(len(permutation))):
        return images
    return images[:, permutation]


class MnistTraining(image_classification.Training):
    """Fully connected layers on images whose pixels may be permuted."""

    app = "mnist"
    options: Options

    def build_network(self) -> Network:
        options = self.options
        block = options.block_size if options.is_sparse(0) else 1
        self.permutation = pixel_permutation(options.permute_input, block, self.generator)
        return build_network(options, self.generator)

    def arrange(self, images: Tensor) -> Tensor:
        return arrange_pixels(images, self.permutation)

    def headline(self) -> str:
        sizes = [self.permutation.numel(), *self.options.hidden_sizes, CLASSES]
        return f"network {' - '.join(map(str, sizes))}"

    def extra_state(self) -> dict[str, Tensor]:
        return {"permutation": self.permutation}

    def metadata(self) -> dict[str, Any]:
        extra = (
            {"pixel_permutation": self.permutation.tolist()} if self.options.is_sparse(0) else {}
        )
        return super().metadata() | extra


run = partial(image_classification.run, MnistTraining)
"""Train and test as options say: `run(options, console, given=...)`; see
`image_classification.run`."""
