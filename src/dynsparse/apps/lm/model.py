"""A causal transformer language model in the manner of GPT-2, sparse or dense."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dynsparse.apps.lm.options import Options
from dynsparse.nn import SparseLinear, SparseTransformerLayer, TiedEmbedding

__all__ = ["LanguageModel", "build_model", "scale_matrices"]


class LanguageModel(nn.Module):
    """Token vectors plus learned positions, pre-norm layers, a norm, logits through the same table.

    Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.3.
    Every matrix of the layers is sparse; the token table is dense unless `table_density` is below
    1; norms, biases and positions are dense.

    Args:
        vocabulary: how many tokens there are.
        layers, hidden_size, ff_size, heads: of the transformer.
        sequence_length: the most tokens at once.
        qkv_size: features of a head; hidden_size / heads when left out.
        embedding_size: width of the table, which two sparse layers then bring to hidden_size and
            back (see `TiedEmbedding`); hidden_size when left out.
        table_density, density, block_size: 1 as `density` still makes sparse layers.
        droprate: of embeddings, attention weights, hidden activations and branches; in training.
        generator: draws patterns and values of what is sparse.

    Raises:
        ValueError: what the layers raise.
    """

    def __init__(
        self,
        vocabulary: int,
        layers: int,
        hidden_size: int,
        ff_size: int,
        heads: int,
        sequence_length: int,
        *,
        qkv_size: int | None = None,
        embedding_size: int | None = None,
        table_density: float = 1.0,
        density: float = 0.1,
        block_size: int = 1,
        droprate: float = 0.0,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sparse: dict[str, Any] = {
            "density": density,
            "block_size": block_size,
            "generator": generator,
            "dtype": dtype,
        }
        narrow = embedding_size is not None
        self.embedding = TiedEmbedding(
            vocabulary,
            embedding_size if embedding_size is not None else hidden_size,
            hidden_size if narrow else None,
            table_density=table_density,
            **sparse,
        )
        self.positions = nn.Parameter(torch.empty(sequence_length, hidden_size, dtype=dtype))
        nn.init.normal_(self.positions, std=0.02, generator=generator)
        self.dropout = nn.Dropout(droprate)
        self.layers = nn.ModuleList(
            SparseTransformerLayer(
                hidden_size, heads, ff_size, head_dim=qkv_size, dropout=droprate, **sparse
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(hidden_size, dtype=dtype)

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
    dense = options.method == "dense"
    model = LanguageModel(
        vocabulary,
        options.layers,
        options.hidden_size,
        options.ff_size,
        options.heads,
        options.sequence_length,
        qkv_size=options.qkv_size,
        embedding_size=options.embedding_size,
        table_density=1 - options.sparsity if options.sparse_embeddings and not dense else 1.0,
        # Replaced below: one block each is the least that a sparse layer holds.
        density=1e-12 if dense else 1 - options.sparsity,
        block_size=1 if dense else options.block_size,
        droprate=options.droprate,
        generator=generator,
        dtype=torch.float64 if options.data_type == "float64" else torch.float32,
    )
    if dense:
        _replace_sparse(model, generator)
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


def _replace_sparse(model: nn.Module, generator: torch.Generator) -> None:
    """An `nn.Linear` in place of every `SparseLinear`, started as those of `nn` start."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, SparseLinear):
                linear = nn.Linear(
                    child.in_features,
                    child.out_features,
                    bias=child.bias is not None,
                    dtype=child.values.dtype,
                )
                bound = child.in_features**-0.5
                nn.init.uniform_(linear.weight, -bound, bound, generator=generator)
                if child.bias is not None:
                    if bool(child.bias.any()):
                        nn.init.uniform_(linear.bias, -bound, bound, generator=generator)
                    else:  # the attention's start at zero
                        nn.init.zeros_(linear.bias)
                setattr(module, name, linear)
