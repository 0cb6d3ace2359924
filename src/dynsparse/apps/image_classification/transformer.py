"""Train a transformer with sparse projections on the rows of images: `run(Options(...))`.

Names and sizes of the options are those of `sparse_transformer_rigl_mnist.py` of Graphcore's
dynamic sparsity application; docs/mnist-transformer.md lists the differences.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from dynsparse.apps import image_classification
from dynsparse.apps.common.options import MachineOptions, interleave_option, match_option, panel
from dynsparse.apps.common.training import replace_sparse
from dynsparse.apps.image_classification.training import ImageOptions
from dynsparse.data.images import CLASSES, SIDE
from dynsparse.nn import Dropout, SparseLinear, SparseTransformerLayer
from dynsparse.options import SWITCH, integer_between, number, override
from dynsparse.training.algorithms import BY_NAME

_network = panel("Network", "network")
_SIZE = integer_between(1, 100_000)


@dataclass(kw_only=True)
class Options(MachineOptions, ImageOptions):
    """One training; the flags of `dynsparse mnist-transformer`."""

    rates: ClassVar[dict[str, float]] = ImageOptions.rates | {"Adam": 0.004}

    epochs: int | None = override(
        ImageOptions, "epochs", default=None, by_default="12 of digits, 1 of the others"
    )
    sparsity: float = _network(
        0.9, "Share of zeros in every matrix; 0 is dense.", number(0, 1, below=True),
        methods=tuple(BY_NAME), complement="density",
    )  # fmt: skip
    encoder_layers: int = _network(1, "Number of transformer layers.", _SIZE)
    hidden_length: int = _network(96, "Features of a token.", _SIZE)
    ff_length: int = _network(48, "Width of the feed-forward part.", _SIZE)
    attention_heads: int = _network(16, "Heads of the attention.", _SIZE)
    qkv_length: int = _network(32, "Features of one head's queries, keys and values.", _SIZE)
    interleave_heads: bool = interleave_option(_network)
    match_blocks: bool = match_option(_network)
    dropout_keep_prob: float = _network(
        1.0, "Share that dropout keeps, in training; 1 for no dropout.",
        number(0, 1, above="a number above 0 and up to 1"),
    )  # fmt: skip
    exclude_attention_biases: bool = _network(False, "Attention without biases.", SWITCH)

    def check_network(self) -> None:
        if not self.has_sparse_layers:
            return
        inner = self.attention_heads * self.qkv_length
        for what, size in (
            ("--hidden-length", self.hidden_length),
            ("--ff-length", self.ff_length),
            ("--attention-heads times --qkv-length", inner),
        ):
            if size % self.block_size:
                raise ValueError(
                    f"--block-size {self.block_size}: expected it to divide {what}, got {size}: "
                    f"choose a multiple of {self.block_size} for it"
                )

    @property
    def label(self) -> str:
        return f"Sparsity_{self.sparsity:g}"

    @property
    def has_sparse_layers(self) -> bool:
        return self.method != "dense" and self.sparsity > 0

    @property
    def in_features(self) -> int:
        """Pixels of a row, and zeros up to the next multiple of the block size."""
        return self._round_up(SIDE)

    @property
    def out_features(self) -> int:
        """Classes, and unused outputs up to the next multiple of the block size."""
        return self._round_up(CLASSES)

    def _round_up(self, size: int) -> int:
        block = self.block_size if self.has_sparse_layers else 1
        return -(-size // block) * block


class Network(nn.Module):
    """Rows with their positions -> `input` -> pre-norm transformer layers -> sum -> `output`.

    forward: images [batch, 784] -> logits [batch, 10]. Every matrix is sparse, all at one
    density: `input` [hidden, 28], six per layer, `output` [10, hidden], which has no bias.
    """

    def __init__(self, options: Options, generator: torch.Generator) -> None:
        super().__init__()
        density = 1 - options.sparsity if options.has_sparse_layers else 1.0
        block = options.block_size if options.has_sparse_layers else 1
        sparse: dict[str, Any] = {
            "density": density,
            "block_size": block,
            "generator": generator,
        }
        droprate = 1 - options.dropout_keep_prob
        self.dropout = Dropout(droprate)
        self.input = SparseLinear(options.in_features, options.hidden_length, **sparse)
        self.layers = nn.ModuleList(
            SparseTransformerLayer(
                options.hidden_length,
                options.attention_heads,
                options.ff_length,
                head_dim=options.qkv_length,
                interleaved=options.interleave_heads,
                matched=options.match_blocks,
                dropout=droprate,
                attention_bias=not options.exclude_attention_biases,
                **sparse,
            )
            for _ in range(options.encoder_layers)
        )
        self.output = SparseLinear(
            options.hidden_length, options.out_features, bias=False, **sparse
        )
        self.positions: Tensor
        self.register_buffer("positions", position_encoding(SIDE, options.in_features))

    def forward(self, images: Tensor) -> Tensor:
        rows = images.unflatten(-1, (SIDE, SIDE))
        x = pad(rows, (0, self.positions.shape[1] - SIDE)) + self.positions
        x = self.input(self.dropout(x))
        for layer in self.layers:
            x = layer(x)
        # The tokens' logits are summed: a layer without bias may as well take the sum.
        return self.output(x.sum(1))[:, :CLASSES]


def build_network(options: Options, generator: torch.Generator) -> Network:
    """The network of `options`, its patterns and weights drawn from `generator`."""
    network = Network(options, generator)
    if not options.has_sparse_layers:
        replace_sparse(network, SparseLinear.to_dense_layer)
    return network


def position_encoding(tokens: int, features: int) -> Tensor:
    """Sines and cosines of falling frequency, float32 [tokens, features].

    Source: Vaswani et al. 2017, "Attention Is All You Need", section 3.5. Each token's are brought
    to mean 0 and standard deviation 1, as in Graphcore's application.
    """
    position = torch.arange(tokens, dtype=torch.float64)[:, None]
    pair = torch.arange(features) // 2 * 2
    angle = position * torch.exp(pair * (-math.log(10_000) / features))
    waves = torch.where(torch.arange(features) % 2 == 0, angle.sin(), angle.cos())
    centred = waves - waves.mean(1, keepdim=True)
    return (centred / centred.std(1, correction=0, keepdim=True)).float()


class TransformerTraining(image_classification.Training):
    """A transformer on the rows of images."""

    app = "mnist-transformer"
    options: Options

    def build_network(self) -> Network:
        return build_network(self.options, self.generator)

    def headline(self) -> str:
        o = self.options
        return (
            f"{o.encoder_layers} transformer layer{'' if o.encoder_layers == 1 else 's'} of "
            f"{o.hidden_length} features, {o.attention_heads} heads of {o.qkv_length}, "
            f"{o.ff_length} hidden"
        )


run = partial(image_classification.run, TransformerTraining)
"""Train and test as options say: `run(options, console, given=...)`; see
`image_classification.run`."""
