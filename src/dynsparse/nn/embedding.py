"""A sparse embedding table, and the tied, factorised embedding of a language model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.nn.functional import gelu
from torch.nn.functional import linear as dense_linear

from dynsparse._core.checks import check_integer, check_types
from dynsparse.nn.init import count_blocks, select_largest_blocks
from dynsparse.nn.linear import SparseLinear
from dynsparse.nn.sparse_module import trace_call
from dynsparse.ops.embedding import embedding


class SparseEmbedding(SparseLinear):
    """A drop-in for `nn.Embedding` that stores only the non-zero entries of the table.

    The table W [num_embeddings, embedding_dim] is the weight of a `SparseLinear` without bias, so
    trainers change its pattern like any other. Growth sees the full gradient, of look-ups and of
    `logits`.

    Args:
        num_embeddings, embedding_dim: as in `nn.Embedding`.
        padding_idx: a token whose vector gets no gradient from look-ups, as in `nn.Embedding`. Its
            vector is initialised like the others.
        density, block_size, pattern, generator, values, target, target_options, device, dtype: as
            in `SparseLinear`. A token whose row has no entries has the zero vector.

    Raises:
        ValueError, TypeError: as `SparseLinear`. When called, TypeError for ids that are not
            integers and IndexError for ids outside the table.
    """

    @check_types
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
    @check_types
    def from_dense(  # type: ignore[override]
        cls, table: nn.Embedding, density: float, block_size: int = 1
    ) -> SparseEmbedding:
        """Make a sparse table that keeps the entries of `table` with the largest magnitudes.

        Raises:
            ValueError: `table` has `max_norm` or `scale_grad_by_freq`, which sparse tables do not
                support.
        """
        for name in ("max_norm", "scale_grad_by_freq"):
            if getattr(table, name):
                raise ValueError(
                    f"the table has {name}={getattr(table, name)}, which sparse tables do not "
                    "support: leave it dense"
                )
        weight = table.weight
        nnz = count_blocks(tuple(weight.shape), density, block_size)
        pattern = select_largest_blocks(weight, nnz, block_size)
        return cls(
            *weight.shape,
            pattern=pattern,
            values=pattern.values_of(weight),
            padding_idx=table.padding_idx,
            device=weight.device,
            dtype=weight.dtype,
        )

    def to_dense_layer(self) -> nn.Module:
        freeze = not self.values.requires_grad
        return nn.Embedding.from_pretrained(self.to_dense().detach(), freeze, self.padding_idx)

    @property
    def num_embeddings(self) -> int:
        return self.out_features

    @property
    def embedding_dim(self) -> int:
        return self.in_features

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows [..., embedding_dim] of ids [...]."""
        if isinstance(ids, Proxy):
            return trace_call(self, ids)
        if self.executor is not None and self.target is not None:
            executor: Any = self.executor
            rows: Tensor = executor.embed(self, ids)
        else:
            values, index = self.snapshot()
            rows = embedding(ids, values, index, self.embedding_dim)
        if self.padding_idx is None:
            return rows
        return torch.where((ids == self.padding_idx)[..., None], rows.detach(), rows)

    def logits(self, x: Tensor) -> Tensor:
        """Return x W^T [..., num_embeddings] of x [..., embedding_dim]: the output layer."""
        return super().forward(x)


class TiedHead(nn.Module):
    """The output layer of a language model whose weight is the table of its `SparseEmbedding`.

    `sparsify` puts it in the place of an `nn.Linear` that is tied to an embedding. It has no values
    or pattern of its own: in `state_dict()` and to trainers there is only the table, whose gradient
    is the sum of both uses. The table is not a submodule; copies of a model keep the two together.

    Args:
        table: the embedding W [out, in].
        bias: [out] or None.
    """

    bias: nn.Parameter | None

    @check_types
    def __init__(self, table: SparseEmbedding, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self._tables = (table,)  # a tuple, so that it is not registered as a submodule
        self.register_parameter("bias", bias)

    @property
    def table(self) -> SparseEmbedding:
        return self._tables[0]

    @property
    def in_features(self) -> int:
        return self.table.in_features

    @property
    def out_features(self) -> int:
        return self.table.out_features

    @property
    def weight(self) -> Tensor:
        """The weight [out, in], read-only; see `SparseLinear.weight`."""
        return self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + bias [..., out] of x [..., in]."""
        if isinstance(x, Proxy):
            return trace_call(self, x)
        logits = self.table.logits(x)
        return logits if self.bias is None else logits + self.bias

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}"
        )


class TiedEmbedding(nn.Module):
    """The token vectors and the logits of a language model, computed with one table.

    With `features` the table is factorised: a sparse layer `up` [features, embedding_dim] projects
    its rows to the features of the model, and `down` [embedding_dim, features] projects back,
    followed by gelu and a layer norm (Lan et al. 2020, "ALBERT", section 3.1; the sparse
    projections are those of Graphcore's dynamic-sparsity language model). The table is dense or
    sparse.

    Args:
        num_embeddings, embedding_dim: shape of the table.
        features: number of features of the model; None if it is `embedding_dim`.
        table_density: density of the table; at 1 it is an `nn.Embedding`.
        density, block_size: of `up` and `down`; the blocks of the table are 1x1.
        generator: random generator of the patterns and values of the sparse layers.

    The values of a dense table start normally distributed with standard deviation 0.02, those of a
    sparse one as in `SparseLinear`.
    """

    @check_types
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
        """Return the vectors [..., features] of ids [...]; embedding_dim without `features`."""
        rows = self.table(ids)
        return rows if self.up is None else self.up(rows)

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits [..., num_embeddings] of x, of the shape that `forward` returns."""
        if self.down is not None and self.norm is not None:
            x = self.norm(gelu(self.down(x)))
        if isinstance(self.table, SparseEmbedding):
            return self.table.logits(x)
        return dense_linear(x, self.table.weight)  # type: ignore[arg-type]
