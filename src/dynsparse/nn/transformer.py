"""A pre-norm transformer layer with every projection sparse."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from dynsparse.checks import check_integer
from dynsparse.nn.attention import SparseMultiheadAttention
from dynsparse.nn.dropout import Dropout
from dynsparse.nn.linear import SparseLinear
from dynsparse.nn.matched import even_pattern, reading
from dynsparse.pattern import SparsePattern
from dynsparse.typed import typed


class SparseTransformerLayer(nn.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x)), with dropout before each sum.

    All six matrices are sparse, at one density. Source: Vaswani et al. 2017, "Attention Is All You
    Need"; the norms come first as in Xiong et al. 2020, "On Layer Normalization in the Transformer
    Architecture", and the feed-forward part uses gelu. To share a density among the matrices of
    torch's own layer by ERK instead, `sparsify` an `nn.TransformerEncoder`.

    Args:
        features: of every token.
        num_heads: of the attention; head_dim: features of one head, features / num_heads when left
            out.
        interleaved, matched: see `SparseMultiheadAttention`; matched, the feed-forward part, too,
            starts with even patterns, and its second matrix reads what the first one writes.
        hidden_features: of the feed-forward part.
        dropout: of attention weights, hidden activations and both branches; in training only.
        attention_bias: whether the attention's projections have biases.
        attention_pattern: which tokens see which, see `SparseMultiheadAttention`.
        density, block_size, generator, device, dtype: see `SparseLinear`.

    Raises:
        ValueError: what `SparseMultiheadAttention` and `SparseLinear` raise.
    """

    @typed
    def __init__(
        self,
        features: int,
        num_heads: int,
        hidden_features: int,
        *,
        head_dim: int | None = None,
        interleaved: bool = False,
        matched: bool = False,
        dropout: float = 0.1,
        attention_bias: bool = True,
        attention_pattern: SparsePattern | None = None,
        density: float = 0.1,
        block_size: int = 1,
        generator: torch.Generator | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        sparse = factory | {"density": density, "block_size": block_size, "generator": generator}
        check_integer("features", features, 1)
        self.norm1 = nn.LayerNorm(features, **factory)
        self.attention = SparseMultiheadAttention(
            features,
            num_heads,
            dropout,
            attention_bias,
            batch_first=True,
            head_dim=head_dim,
            interleaved=interleaved,
            matched=matched,
            attention_pattern=attention_pattern,
            **sparse,
        )
        self.norm2 = nn.LayerNorm(features, **factory)
        up = down = sparse
        if matched:
            first, second = (
                even_pattern(shape, density, block_size, generator)
                for shape in ((hidden_features, features), (features, hidden_features))
            )
            up, down = (
                factory | {"pattern": pattern, "generator": generator}
                for pattern in (first, reading(second, first))
            )
        self.linear1 = SparseLinear(features, hidden_features, **up)
        self.linear2 = SparseLinear(hidden_features, features, **down)
        self.dropout = Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """x [batch, tokens, features] -> the same shape.

        The masks are those of `SparseMultiheadAttention.forward`; `is_causal` needs none.
        """
        y = self.norm1(x)
        y, _ = self.attention(
            y,
            y,
            y,
            key_padding_mask=key_padding_mask,
            need_weights=False,
            attn_mask=attn_mask,
            is_causal=is_causal,
        )
        x = x + self.dropout(y)
        y = self.linear2(self.dropout(gelu(self.linear1(self.norm2(x)))))
        return x + self.dropout(y)
