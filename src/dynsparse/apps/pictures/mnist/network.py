"""The network: 784 pixels -> hidden layers with relu and dropout -> 10 classes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from dynsparse.apps.pictures.mnist.options import LayerShape, Options, layer_shapes, picture_side
from dynsparse.data.pictures import SIDE
from dynsparse.nn import SparseLinear

if TYPE_CHECKING:
    from popsparse import Target


class Network(nn.Module):
    """Linear layers fc1, fc2, ..., each hidden one followed by relu and dropout.

    forward: pictures [batch, in] -> logits [batch, 10].
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
    """The network of `options`, its patterns and weights drawn from `generator`."""
    target = _target(options)
    layers = [(shape.name, _layer(shape, generator, target)) for shape in layer_shapes(options)]
    return Network(layers, options.droprate)


def _target(options: Options) -> Target | None:
    if options.target is None:
        return None
    from popsparse import Target  # loaded by those who ask for a target

    return Target.named(
        options.target, **({} if options.tiles is None else {"tiles": options.tiles})
    )


def _layer(shape: LayerShape, generator: torch.Generator, target: Target | None) -> nn.Module:
    if shape.sparse:
        return SparseLinear(
            shape.in_features,
            shape.out_features,
            density=shape.density,
            block_size=shape.block_size,
            generator=generator,
            target=target,
        )
    layer = nn.Linear(shape.in_features, shape.out_features)
    # nn.Linear draws from torch's global generator; the same distribution from ours.
    bound = 1 / math.sqrt(shape.in_features)
    for parameter in layer.parameters():
        nn.init.uniform_(parameter, -bound, bound, generator=generator)
    return layer


def pixel_permutation(kind: str, block_size: int, generator: torch.Generator) -> Tensor:
    """Which pixel each input of the network reads: int64 [side^2], the side of `picture_side`.

    "none" keeps the picture's order, "random" shuffles it. With "block" the inputs of one block
    are a compact tile of the picture (2x2 pixels for blocks of 4, 2x4 for 8, 4x4 for 16, 4x8 for
    32, 8x8 for 64, 8x16 for 128) in place of a strip of a row.
    """
    side = picture_side(block_size)
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
    """Pictures [n, 784] as the network reads them: with a border if it needs one, permuted."""
    side = math.isqrt(len(permutation))
    border = (side - SIDE) // 2
    if border:
        images = nn.functional.pad(images.view(-1, SIDE, SIDE), [border] * 4).flatten(1)
    if torch.equal(permutation, torch.arange(len(permutation))):
        return images
    return images[:, permutation]
