"""The MNIST training: its network and the order of its pixels."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from dynsparse.apps import pictures
from dynsparse.apps.pictures.mnist.network import (
    Network,
    arrange_pixels,
    build_network,
    pixel_permutation,
)
from dynsparse.apps.pictures.mnist.options import Options
from dynsparse.data import CLASSES


class MnistTraining(pictures.Training):
    """Fully connected layers on pictures whose pixels may be permuted."""

    app = "mnist"
    options: Options

    def build_network(self) -> Network:
        options = self.options
        block = options.block_size if options.is_sparse(0) else 1
        self.permutation = pixel_permutation(options.permute_input, block, self.generator)
        return build_network(options, self.generator)

    @property
    def test_batch(self) -> int:
        # A tile machine holds all of a batch, and one plan serves both.
        return super().test_batch if self.options.target is None else self.options.batch_size

    def arrange(self, images: Tensor) -> Tensor:
        return arrange_pixels(images, self.permutation)

    def headline(self) -> str:
        sizes = [self.permutation.numel(), *self.options.hidden_sizes, CLASSES]
        return f"network {' - '.join(map(str, sizes))}"

    def drawn(self) -> dict[str, Tensor]:
        return {"permutation": self.permutation}

    def metadata(self) -> dict[str, Any]:
        own = {"pixel_permutation": self.permutation.tolist()} if self.options.is_sparse(0) else {}
        return super().metadata() | own


run = partial(pictures.run, MnistTraining)
"""Train and test as options say: `run(options, console, given=...)`, see `pictures.run`."""
