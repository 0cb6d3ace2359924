"""A causal transformer language model in the manner of GPT-2, sparse or dense."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dynsparse.apps.common.methods import replace_sparse
from dynsparse.apps.lm.options import Options
from dynsparse.nn import SparseLinear, SparseTransformerLayer, TiedEmbedding


class LanguageModel(nn.Module):
    """Token vectors plus learned positions, pre-norm layers, a norm, logits through the same table.

    Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.3.
    Every matrix of the layers is sparse, even at density 1; the token table is dense unless
    `sparse_embeddings`; norms, biases and positions are dense. `embedding_size` is the width of a
    narrow table, which two sparse layers bring to the hidden size and back (see `TiedEmbedding`).

    Args:
        options: the sizes and the sparsity. With method "dense" the sparse layers hold next to
            nothing: `build_model` replaces them.
        vocabulary: how many tokens there are.
        generator: draws patterns and values of what is sparse.

    Raises:
        ValueError: what the layers raise.
    """

    def __init__(self, options: Options, vocabulary: int, generator: torch.Generator) -> None:
        super().__init__()
        dense = options.method == "dense"
        dtype = torch.float64 if options.data_type == "float64" else torch.float32
        hidden, density = options.hidden_size, 1 - options.sparsity
        sparse: dict[str, Any] = {
            # One block is the least that a sparse layer holds.
            "density": 1e-12 if dense else density,
            "block_size": 1 if dense else options.block_size,
            "generator": generator,
            "dtype": dtype,
        }
        narrow = options.embedding_size
        self.embedding = TiedEmbedding(
            vocabulary,
            hidden if narrow is None else narrow,
            None if narrow is None else hidden,
            table_density=density if options.sparse_embeddings and not dense else 1.0,
            **sparse,
        )
        self.positions = nn.Parameter(torch.empty(options.sequence_length, hidden, dtype=dtype))
        nn.init.normal_(self.positions, std=0.02, generator=generator)
        self.dropout = nn.Dropout(options.droprate)
        self.layers = nn.ModuleList(
            SparseTransformerLayer(
                hidden,
                options.heads,
                options.ff_size,
                head_dim=options.qkv_size,
                interleaved=options.interleave_heads,
                matched=options.match_blocks,
                dropout=options.droprate,
                **sparse,
            )
            for _ in range(options.layers)
        )
        self.norm = nn.LayerNorm(hidden, dtype=dtype)

    def forward(self, ids: Tensor) -> Tensor:
        """ids [batch, tokens], at most sequence_length of them -> logits [batch, tokens, V].

        The logits at a token depend on it and on those before it.
        """
        x = self.dropout(self.embedding(ids) + self.positions[: ids.shape[1]])
        for layer in self.layers:
            x = layer(x, is_causal=True)
        return self.embedding.logits(self.norm(x))

    @property
    def sequence_length(self) -> int:
        return len(self.positions)


def build_model(options: Options, vocabulary: int, generator: torch.Generator) -> LanguageModel:
    """The model of `options`, drawn from `generator` and, for a dense table, torch's global one.

    Dense models are the same modules with an `nn.Linear` wherever a sparse layer would be.
    """
    model = LanguageModel(options, vocabulary, generator)
    if options.method == "dense":
        replace_sparse(model, partial(_drawn, generator=generator))
    scale_matrices(model, options.initial_scale)
    return model


@torch.no_grad()
def scale_matrices(model: LanguageModel, factor: float) -> None:
    """Start the matrices, apart from the token table, at `factor` times what their layers draw."""
    for module in model.modules():
        if module is model.embedding.table:
            continue
        if isinstance(module, SparseLinear):
            module.values.mul_(factor)
        elif isinstance(module, nn.Linear):
            module.weight.mul_(factor)


def _drawn(layer: SparseLinear, generator: torch.Generator) -> nn.Linear:
    """Started as those of `nn` start."""
    linear = nn.Linear(
        layer.in_features,
        layer.out_features,
        bias=layer.bias is not None,
        dtype=layer.values.dtype,
    )
    bound = layer.in_features**-0.5
    nn.init.uniform_(linear.weight, -bound, bound, generator=generator)
    if layer.bias is not None:
        if bool(layer.bias.any()):
            nn.init.uniform_(linear.bias, -bound, bound, generator=generator)
        else:  # the attention's start at zero
            nn.init.zeros_(linear.bias)
    return linear
