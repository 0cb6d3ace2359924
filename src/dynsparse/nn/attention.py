"""Multi-head attention and a transformer layer whose projections are sparse."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.nn.functional import gelu, pad, scaled_dot_product_attention

from dynsparse._core.checks import (
    check_flag,
    check_integer,
    check_kind,
    check_types,
    check_within,
    shorten,
)
from dynsparse.nn.attend import (
    ScoreMod,
    attend_flex,
    attend_with_pattern,
    check_flex_arguments,
    check_head_order,
    check_pattern_call,
    join_heads,
    load_pattern,
    merge_masks,
    run_length,
    save_head_order,
    save_pattern,
    split_heads,
)
from dynsparse.nn.init import align_columns, align_rows, even_pattern
from dynsparse.nn.linear import SparseLinear
from dynsparse.nn.sparse_module import trace_call
from dynsparse.ops.dropout import dropout
from dynsparse.pattern import SparsePattern


class Dropout(nn.Dropout):
    """A drop-in for `nn.Dropout` that is fast on a CPU.

    It draws many mask entries from one random number; see `dynsparse.ops.dropout.dropout` for what
    differs. With sparse layers torch's own dropout is a large part of a training step on a CPU.
    """

    @check_types
    def __init__(self, p: float = 0.5, inplace: bool = False) -> None:
        super().__init__(check_within("p", p, "[0, 1]"), inplace)

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(x, Proxy):
            return trace_call(self, x)
        if self.inplace:
            return super().forward(x)
        return dropout(x, self.p, self.training)


PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")
"""The names of the projections, in the order in which they are applied."""


class SparseMultiheadAttention(nn.Module):
    """A drop-in for `nn.MultiheadAttention` that stores only the projections' non-zero weights.

    Arguments, call and results are those of `nn.MultiheadAttention` (Vaswani et al. 2017,
    "Attention Is All You Need", section 3.2.2), with more keywords after `batch_first`. The packed
    `in_proj_weight` is three layers here: `q_proj` [inner, embed], `k_proj` [inner, kdim], `v_proj`
    [inner, vdim]; `out_proj` is [embed, inner]; inner is heads * head_dim. The product of queries
    and keys is dense unless an `attention_pattern` is set, whose blocks then determine its cost.

    Args:
        embed_dim, num_heads, dropout, bias: as in `nn.MultiheadAttention`.
        add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype: likewise.
        head_dim: features of one head; defaults to embed_dim / num_heads.
        interleaved: whether the features of the heads are interleaved in the projections, in runs
            of one, two or four features depending on the block size, instead of head_dim
            consecutive features each, so that a large block has features of every head. Newly
            initialised networks are equivalent; "Blocks and order" in the documentation describes
            the effect on large blocks. Saved in the state dict.
        matched: whether the projections start with patterns whose blocks are spread evenly, in
            which keys (and values, unless interleaved) have the block rows of queries, and
            `out_proj` reads the block rows of values.
        attention_pattern: which queries [L] attend to which keys [S], in all heads; from
            `nn.attention_patterns` or your own. It fixes L and S for every call. It can be combined
            with `is_causal`, `key_padding_mask` and dropout, but not with `attn_mask`, `score_mod`,
            `add_bias_kv` and `add_zero_attn`. Saved in the state dict; may be set.
        density, block_size, generator: options of each projection, see `SparseLinear`.

    Raises:
        ValueError: sizes below 1, heads that do not divide embed_dim without a head_dim, a dropout
            outside [0, 1], options that cannot be combined with a pattern; as `SparseLinear`.
    """

    # torch's transformer layers read these to decide on the fused path of evaluation, which needs
    # dense weights: None and False disable it.
    in_proj_weight = None
    in_proj_bias = None
    _qkv_same_embed_dim = False

    # Whether the other heads are on other ranks.
    shares_heads: bool = False

    interleaved: bool = False
    _run: int = 1  # number of consecutive features of a head if heads are interleaved

    dim_shards: dict[str, Any]  # as in `SparseLinear`, if heads are split over ranks
    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    out_proj: nn.Module
    bias_k: nn.Parameter | None
    bias_v: nn.Parameter | None
    _attention_pattern: SparsePattern | None = None
    exported_mask: Tensor | None = None  # the pattern as a mask, for export to other runtimes

    @check_types
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        *,
        head_dim: int | None = None,
        interleaved: bool = False,
        matched: bool = False,
        attention_pattern: SparsePattern | None = None,
        density: float = 0.1,
        block_size: int = 1,
        generator: torch.Generator | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "head_dim": head_dim}
        for name, size in (sizes | {"kdim": kdim, "vdim": vdim}).items():
            if size is not None:
                check_integer(name, size, 1)
        if head_dim is None and embed_dim % num_heads:
            raise ValueError(
                f"embed_dim must be a multiple of num_heads, got {embed_dim} and {num_heads}"
            )
        check_within("dropout", dropout, "[0, 1]")
        kdim = embed_dim if kdim is None else kdim
        vdim = embed_dim if vdim is None else vdim
        inner = embed_dim if head_dim is None else num_heads * head_dim
        shapes = ((embed_dim, inner), (kdim, inner), (vdim, inner), (inner, embed_dim))
        options: dict[str, dict[str, Any]] = {
            name: {"density": density, "block_size": block_size} for name in PROJECTIONS
        }
        if matched:
            q, k, v, out = (even_pattern(s[::-1], density, block_size, generator) for s in shapes)
            # The features of one head are in few blocks, which its values then share.
            v = v if interleaved else align_rows(v, q)
            patterns = (q, align_rows(k, q), v, align_columns(out, v))
            options = {n: {"pattern": p} for n, p in zip(PROJECTIONS, patterns, strict=True)}
        projections = {
            name: SparseLinear(
                in_features,
                out_features,
                bias=bias,
                **options[name],
                generator=generator,
                device=device,
                dtype=dtype,
            )
            for name, (in_features, out_features) in zip(PROJECTIONS, shapes, strict=True)
        }
        for projection in projections.values():
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)
        extra_keys = None
        if add_bias_kv:
            rows = [torch.empty(1, 1, inner, dtype=dtype, device="cpu") for _ in range(2)]
            rows = [nn.init.xavier_normal_(row, generator=generator) for row in rows]
            extra_keys = [nn.Parameter(row.to(device)) for row in rows]
        self._set(num_heads, dropout, add_zero_attn, batch_first, projections, extra_keys)
        self.interleaved = bool(interleaved)
        self._run = run_length(block_size, num_heads, self.head_dim)
        self.attention_pattern = attention_pattern

    def _set(
        self,
        num_heads: int,
        dropout: float,
        add_zero_attn: bool,
        batch_first: bool,
        projections: Mapping[str, nn.Module],
        extra_keys: Any,
    ) -> None:
        self.num_heads = num_heads
        self.dropout = dropout
        self.add_zero_attn = add_zero_attn
        self.batch_first = batch_first
        for name in PROJECTIONS:
            self.add_module(name, projections[name])
        self.bias_k, self.bias_v = (None, None) if extra_keys is None else extra_keys

    @classmethod
    @check_types
    def from_projections(
        cls, attention: nn.MultiheadAttention, projections: Mapping[str, nn.Module]
    ) -> SparseMultiheadAttention:
        """Make a sparse attention with the settings of `attention` and these projections.

        A projection is sparse or an `nn.Linear`. `bias_k` and `bias_v` are shared with `attention`.
        """
        if set(projections) != set(PROJECTIONS):
            raise ValueError(
                f"projections must be {', '.join(PROJECTIONS)}, got {shorten(list(projections))}"
            )
        sparse = cls.__new__(cls)
        nn.Module.__init__(sparse)
        extra_keys = None if attention.bias_k is None else (attention.bias_k, attention.bias_v)
        sparse._set(
            attention.num_heads,
            attention.dropout,
            attention.add_zero_attn,
            attention.batch_first,
            projections,
            extra_keys,
        )
        return sparse.train(attention.training)

    @property
    def attention_pattern(self) -> SparsePattern | None:
        """Which queries attend to which keys; None for all. May be set."""
        return self._attention_pattern

    @attention_pattern.setter
    def attention_pattern(self, pattern: SparsePattern | None) -> None:
        kinds = (SparsePattern, type(None))
        check_kind("attention_pattern", pattern, kinds, "a SparsePattern or None")
        if pattern is not None:
            if self.bias_k is not None or self.add_zero_attn:
                raise ValueError(
                    "attention_pattern cannot be combined with add_bias_kv and add_zero_attn, "
                    "whose keys it does not contain: leave one of them out"
                )
            pattern.index  # noqa: B018  made now: the next call may be compiled
        self._attention_pattern = pattern

    @property
    def embed_dim(self) -> int:
        return int(self.q_proj.in_features)  # type: ignore[arg-type]

    @property
    def head_dim(self) -> int:
        return int(self.q_proj.out_features) // self.num_heads  # type: ignore[arg-type]

    @property
    def interleave_length(self) -> int | None:
        """Number of consecutive features of a head if heads are interleaved, otherwise None."""
        return self._run if self.interleaved else None

    @property
    def kdim(self) -> int:
        return int(self.k_proj.in_features)  # type: ignore[arg-type]

    @property
    def vdim(self) -> int:
        return int(self.v_proj.in_features)  # type: ignore[arg-type]

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        score_mod: ScoreMod | None = None,
        block_mask: Any = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from L queries to S keys, in N sequences.

        Args:
            query, key, value: [L, N, embed], [S, N, kdim], [S, N, vdim]; with `batch_first`
                [N, L, embed] and so on; without N for one sequence.
            key_padding_mask: [N, S] ([S] for one sequence): True for keys to ignore, or values that
                are added to the scores.
            need_weights: whether to return the attention weights; without them the product is
                fused.
            attn_mask: [L, S] or [N * heads, L, S]: True where a query may not attend, or values
                that are added to the scores.
            average_attn_weights: whether to return the mean of the weights over the heads.
            is_causal: without `attn_mask`, no query attends to later positions. With it, asserts
                that it is the causal mask, so that the fused product may ignore it.
            score_mod, block_mask: as in `torch.nn.attention.flex_attention.flex_attention`, which
                then computes the attention. They replace masks, `need_weights` and dropout.

        Returns:
            (output, shaped as the query; weights [N, L, S] or [N, heads, L, S], or None).
        """
        if isinstance(query, Proxy):
            return trace_call(
                self, query, key, value, key_padding_mask, need_weights, attn_mask,
                average_attn_weights, is_causal, score_mod=score_mod, block_mask=block_mask,
            )  # fmt: skip
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            check_kind(name, tensor, Tensor, "a tensor")
        for name, mask in (("key_padding_mask", key_padding_mask), ("attn_mask", attn_mask)):
            check_kind(name, mask, (Tensor, type(None)), "a tensor or None")
        flags = {"need_weights": need_weights, "is_causal": is_causal}
        for name, flag in (flags | {"average_attn_weights": average_attn_weights}).items():
            check_flag(name, flag)
        if query.is_nested or key.is_nested or value.is_nested:
            raise RuntimeError("nested tensors are not supported: pad, and pass key_padding_mask")
        rate = self.dropout if self.training else 0.0
        uses_flex = score_mod is not None or block_mask is not None
        if uses_flex:
            check_flex_arguments(
                score_mod,
                block_mask,
                {
                    "need_weights=True": need_weights,
                    "attn_mask": attn_mask is not None,
                    "key_padding_mask": key_padding_mask is not None,
                    "is_causal": is_causal,
                    "dropout": rate > 0,
                    "add_bias_kv and add_zero_attn": self.bias_k is not None or self.add_zero_attn,
                    "heads split over ranks": self.shares_heads,
                    "attention_pattern": self._attention_pattern is not None,
                },
            )
        batched = query.dim() == 3
        if not batched:
            query, key, value = query[None], key[None], value[None]
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))

        pattern = self._attention_pattern
        if pattern is not None:
            other_mask = attn_mask is not None and not is_causal
            check_pattern_call(pattern, query.shape[1], key.shape[1], other_mask)
        q, k, v = self.q_proj(query), self.k_proj(key), self.v_proj(value)
        run = self.interleave_length
        if self.bias_k is not None and self.bias_v is not None:
            k = torch.cat([k, self.bias_k.expand(len(k), 1, -1)], 1)
            v = torch.cat([v, self.bias_v.expand(len(v), 1, -1)], 1)
        if self.add_zero_attn:
            k, v = pad(k, (0, 0, 0, 1)), pad(v, (0, 0, 0, 1))
        q, k, v = split_heads((q, k, v), self.num_heads, run)

        if pattern is not None:
            padding = key_padding_mask
            blocks = pattern if self.exported_mask is None else self.exported_mask
            mixed, weights = attend_with_pattern(
                blocks, q, k, v, is_causal, padding, rate, need_weights
            )
        elif uses_flex:
            mixed, weights = attend_flex(q, k, v, score_mod, block_mask), None
        else:
            masks = (attn_mask, key_padding_mask)
            mixed, weights = self._attend_dense(q, k, v, masks, rate, need_weights, is_causal)
        if not need_weights:
            weights = None
        elif weights is not None and average_attn_weights:
            weights = weights.mean(1)

        output = self.out_proj(join_heads(mixed, run))
        if not batched:
            return output[0], None if weights is None else weights[0]
        return output if self.batch_first else output.transpose(0, 1), weights

    def _attend_dense(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        masks: tuple[Tensor | None, Tensor | None],
        rate: float,
        need_weights: bool,
        is_causal: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend without a pattern; return the output [N, heads, L, E] and the weights or None."""
        attn_mask, key_padding_mask = masks
        adds_keys = self.bias_k is not None or self.add_zero_attn
        keys = k.shape[2] - (self.bias_k is not None) - self.add_zero_attn
        # On the CPU torch's fused product is slow with dropout. It also handles queries without
        # keys, which only the masks of a call can cause.
        fast_dropout = rate > 0 and q.is_cpu and attn_mask is None and key_padding_mask is None
        is_fused = not (need_weights or fast_dropout)
        fused_causal = is_causal and key_padding_mask is None and is_fused and not adds_keys
        mask = None
        if not fused_causal:
            if is_causal and attn_mask is None:
                attn_mask = torch.ones(q.shape[2], keys, device=q.device).triu(1).bool()
            mask = merge_masks(attn_mask, key_padding_mask, q, keys, k.shape[2])
        if is_fused:
            return scaled_dot_product_attention(q, k, v, mask, rate, fused_causal), None
        scores = (q / math.sqrt(self.head_dim)) @ k.transpose(-2, -1)
        weights = dropout((scores if mask is None else scores + mask).softmax(-1), rate)
        return weights @ v, weights if need_weights else None

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        save_head_order(self.interleave_length, destination, prefix)
        if self._attention_pattern is not None:
            save_pattern(self._attention_pattern, destination, prefix)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *rest)
        check_head_order(self.interleave_length, state_dict, prefix, *rest[-2:])
        if self._attention_pattern is not None:
            pattern = load_pattern(self._attention_pattern, state_dict, prefix, *rest)
            self.attention_pattern = pattern

    def extra_repr(self) -> str:
        pattern = self._attention_pattern
        return (
            f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, "
            f"head_dim={self.head_dim}, dropout={self.dropout}, batch_first={self.batch_first}"
            f"{', interleaved=True' if self.interleaved else ''}"
            f"{'' if pattern is None else f', attention_pattern={pattern}'}"
        )


class SparseTransformerLayer(nn.Module):
    """A pre-norm transformer layer: x + attention(norm(x)), then x + feed-forward(norm(x)).

    Dropout precedes each sum. All six matrices are sparse, with one density. Source: Vaswani et al.
    2017, "Attention Is All You Need", with norms first as in Xiong et al. 2020, "On Layer
    Normalization in the Transformer Architecture", and gelu in the feed-forward part. To distribute
    a density over the matrices of torch's own layer by ERK, `sparsify` an `nn.TransformerEncoder`.

    Args:
        features: number of features of every token.
        num_heads: number of heads of the attention.
        head_dim: features of one head; defaults to features / num_heads.
        interleaved, matched: see `SparseMultiheadAttention`. With `matched` the feed-forward part
            also starts with even patterns, and its second matrix reads the block rows of the first.
        hidden_features: number of features of the feed-forward part.
        dropout: rate for attention weights, hidden activations and both branches, in training.
        attention_bias: whether the projections of the attention have biases.
        attention_pattern: see `SparseMultiheadAttention`.
        density, block_size, generator, device, dtype: see `SparseLinear`.

    Raises:
        ValueError: as `SparseMultiheadAttention` and `SparseLinear`.
    """

    @check_types
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
                for pattern in (first, align_columns(second, first))
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
        """Return the output of the layer, of the shape of x [batch, tokens, features].

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
