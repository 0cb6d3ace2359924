"""A sparse table of token vectors, and the tied, factorised embedding of a language model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu
from torch.nn.functional import linear as dense_linear

from dynsparse.checks import check_integer
from dynsparse.nn.linear import SparseLinear
from dynsparse.ops.embedding import embedding
from dynsparse.typed import typed


class SparseEmbedding(SparseLinear):
    """A drop-in for `nn.Embedding` that holds only the table's non-zero entries.

    The table W [num_embeddings, embedding_dim] is the weight of a `SparseLinear` without bias, so
    trainers change its pattern like any other. The gradient that growth sees is the whole one, of
    the rows looked up and of `logits` when they are used, too.

    Args:
        num_embeddings, embedding_dim: as in `nn.Embedding`.
        padding_idx: a token whose vector gets no gradient from look-ups, as in `nn.Embedding`. Its
            vector starts as any other's.
        density, block_size, pattern, generator, target, target_options, device, dtype: as in
            `SparseLinear`. A token whose row is empty has the zero vector until something grows
            there.

    Raises:
        ValueError, TypeError: what `SparseLinear` raises, and from the call TypeError for ids that
            are not integers, IndexError for one outside the table.
    """

    @typed
    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        density: float | None = None,
        block_size: int | None = None,
        *,
        padding_idx: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(embedding_dim, num_embeddings, density, block_size, False, **options)
        if padding_idx is not None:
            padding_idx = check_integer("padding_idx", padding_idx, -self.num_embeddings)
            if padding_idx >= self.num_embeddings:
                raise ValueError(
                    f"padding_idx must be less than num_embeddings, {self.num_embeddings}, "
                    f"got {padding_idx}"
                )
            padding_idx %= self.num_embeddings
        self.padding_idx = padding_idx

    @classmethod
    @torch.no_grad()
    @typed
    def from_dense(  # type: ignore[override]
        cls, table: nn.Embedding, density: float, block_size: int = 1
    ) -> SparseEmbedding:
        """A sparse table with the entries of `table` that have the largest magnitudes.

        Raises:
            ValueError: `table` has `max_norm` or `scale_grad_by_freq`, which sparse tables do not.
        """
        for name in ("max_norm", "scale_grad_by_freq"):
            if getattr(table, name):
                raise ValueError(
                    f"the table has {name}={getattr(table, name)}, which sparse tables do not "
                    "serve: leave it dense"
                )
        linear = nn.Linear(1, 1, bias=False, device="meta")
        linear.out_features, linear.in_features = table.weight.shape
        linear.weight = nn.Parameter(table.weight.detach())
        chosen = SparseLinear.from_dense(linear, density, block_size)
        made = cls(
            table.num_embeddings,
            table.embedding_dim,
            pattern=chosen.pattern,
            padding_idx=table.padding_idx,
            device=table.weight.device,
            dtype=table.weight.dtype,
        )
        made.values.copy_(chosen.values)
        return made

    @property
    def num_embeddings(self) -> int:
        return self.out_features

    @property
    def embedding_dim(self) -> int:
        return self.in_features

    def forward(self, ids: Tensor) -> Tensor:
        """ids [...] -> [..., embedding_dim]."""
        if self.executor is not None and self.target is not None:
            on_target: Any = self.executor
            rows: Tensor = on_target.embed(self, ids)
        else:
            values, index = self.held()
            rows = embedding(ids, values, index, self.embedding_dim)
        if self.padding_idx is None:
            return rows
        return torch.where((ids == self.padding_idx)[..., None], rows.detach(), rows)

    def logits(self, x: Tensor) -> Tensor:
        """x [..., embedding_dim] -> x W^T [..., num_embeddings]: the table as output layer."""
        return super().forward(x)


class TiedEmbedding(nn.Module):
    """Token vectors going in and logits coming out of a language model, through one table.

    With `features` the table is narrow: a sparse layer leads up from it, `up` [features,
    embedding_dim], and another back, `down` [embedding_dim, features], followed by gelu and a layer
    norm (Lan et al. 2020, "ALBERT", section 3.1; the sparse projections are those of Graphcore's
    dynamic-sparsity language model). The table itself is dense or sparse.

    Args:
        num_embeddings, embedding_dim: the table.
        features: of the model; None when they are the table's own.
        table_density: density of the table; 1 makes it an `nn.Embedding`.
        density, block_size: of `up` and `down`; the table has single elements.
        generator: draws patterns and initial values of what is sparse.

    A dense table starts normal with standard deviation 0.02, a sparse one as `SparseLinear` does.
    """

    @typed
    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        features: int | None = None,
        *,
        table_density: float = 1.0,
        density: float = 0.1,
        block_size: int = 1,
        generator: torch.Generator | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        sparse = factory | {"generator": generator}
        self.table: nn.Module
        if table_density == 1:
            self.table = nn.Embedding(num_embeddings, embedding_dim, **factory)
            nn.init.normal_(self.table.weight, std=0.02)
        else:
            self.table = SparseEmbedding(num_embeddings, embedding_dim, table_density, **sparse)
        self.up = self.down = self.norm = None
        if features is not None:
            self.up = SparseLinear(embedding_dim, features, density, block_size, **sparse)
            self.down = SparseLinear(features, embedding_dim, density, block_size, **sparse)
            self.norm = nn.LayerNorm(embedding_dim, **factory)

    def forward(self, ids: Tensor) -> Tensor:
        """ids [...] -> [..., features], or [..., embedding_dim] without `features`."""
        rows = self.table(ids)
        return rows if self.up is None else self.up(rows)

    def logits(self, x: Tensor) -> Tensor:
        """What `forward` returns the shape of -> [..., num_embeddings]."""
        if self.down is not None and self.norm is not None:
            x = self.norm(gelu(self.down(x)))
        if isinstance(self.table, SparseEmbedding):
            return self.table.logits(x)
        return dense_linear(x, self.table.weight)  # type: ignore[arg-type]
