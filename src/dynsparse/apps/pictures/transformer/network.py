"""The network: a picture's 28 rows are 28 tokens of a small transformer."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from dynsparse.apps.common.methods import replace_sparse
from dynsparse.apps.pictures.transformer.options import Options
from dynsparse.data.pictures import CLASSES, SIDE
from dynsparse.nn import Dropout, SparseLinear, SparseTransformerLayer


class Network(nn.Module):
    """Rows with their positions -> `input` -> pre-norm transformer layers -> sum -> `output`.

    forward: pictures [batch, 784] -> logits [batch, 10]. Every matrix is sparse, all at one
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

    def forward(self, pictures: Tensor) -> Tensor:
        rows = pictures.unflatten(-1, (SIDE, SIDE))
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
        replace_sparse(network, _dense)
    return network


def _dense(layer: SparseLinear) -> nn.Linear:
    dense = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
    dense.weight = nn.Parameter(layer.to_dense().detach())
    dense.register_parameter("bias", layer.bias)
    return dense


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
