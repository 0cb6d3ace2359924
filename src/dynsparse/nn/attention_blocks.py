"""What an attention with a pattern does in place of a dense one, and what goes with it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dynsparse.checks import check_kind
from dynsparse.ops import block_sparse
from dynsparse.ops.block_sparse.attention import bias_of
from dynsparse.ops.dropout import dropout
from dynsparse.pattern import SparsePattern

_NAMES = ("attention_rows", "attention_cols")


def check_pattern(pattern: object, adds_keys: bool) -> SparsePattern | None:
    """`pattern`, a SparsePattern or None.

    Raises:
        TypeError: anything else.
        ValueError: an attention that adds keys of its own, for which no pattern has a column.
    """
    kinds = (SparsePattern, type(None))
    found: SparsePattern | None = check_kind(
        "attention_pattern", pattern, kinds, "a SparsePattern or None"
    )
    if found is not None and adds_keys:
        raise ValueError(
            "attention_pattern does not go with add_bias_kv and add_zero_attn, whose keys it does "
            "not know: leave one of them out"
        )
    if found is not None:
        found.index  # noqa: B018  made now, and not in the next call, which a compiler may watch
    return found


def check_goes_with(pattern: SparsePattern, queries: int, keys: int, attn_mask: bool) -> None:
    """Raise ValueError where a call has other lengths than the pattern, or a mask beside it.

    Args:
        attn_mask: whether there is one that is more than the promise of `is_causal`.
    """
    if attn_mask:
        raise ValueError(
            "attn_mask does not go with attention_pattern: put it into the pattern, or pass "
            "is_causal or key_padding_mask"
        )
    if (queries, keys) != pattern.shape:
        raise ValueError(
            f"the attention_pattern is for {pattern.shape[0]} queries and {pattern.shape[1]} keys, "
            f"got {queries} and {keys}: pad, with a key_padding_mask, or set another pattern"
        )


def save_pattern(pattern: SparsePattern, destination: Any, prefix: str) -> None:
    """Put the pattern into a state dict: int32 [nnz] for rows and columns of blocks."""
    for name, own in zip(_NAMES, (pattern.rows, pattern.cols), strict=True):
        destination[prefix + name] = own.clone()


def load_pattern(
    pattern: SparsePattern,
    state_dict: Mapping[str, Tensor],
    prefix: str,
    local_metadata: Any,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> SparsePattern:
    """The pattern of a state dict, of the shape and block size of `pattern`; that one where there
    is none, or none that fits, which is said as `load_state_dict` says such things."""
    found = [state_dict.get(prefix + name) for name in _NAMES]
    for name, tensor in zip(_NAMES, found, strict=True):
        if prefix + name in unexpected_keys:
            unexpected_keys.remove(prefix + name)
        if tensor is None and strict:
            missing_keys.append(prefix + name)
    if any(tensor is None for tensor in found):
        return pattern
    try:
        return SparsePattern(*found, shape=pattern.shape, block_size=pattern.block_size)
    except (TypeError, ValueError) as error:
        what = prefix.removesuffix(".") or "the attention"
        error_msgs.append(f"the attention_pattern of {what!r} does not fit: {error}")
        return pattern


def attend_at(
    pattern: SparsePattern | Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    key_padding_mask: Tensor | None,
    rate: float,
    need_weights: bool,
) -> tuple[Tensor, Tensor | None]:
    """The mixed values [N, heads, L, E], and the weights [N, heads, L, S] where they are needed.

    Args:
        pattern: or where the graph is to leave this library, its mask, bool [L, S].
        q, k, v: [N, heads, L or S, E].
        is_causal, key_padding_mask: as of `block_sparse.scaled_dot_product_attention`.
        rate: of dropout.
    """
    if isinstance(pattern, Tensor):
        return _densely(pattern, q, k, v, is_causal, key_padding_mask, rate)
    if not need_weights and rate < 1:
        mixed = block_sparse.scaled_dot_product_attention(
            q,
            k,
            v,
            pattern,
            is_causal=is_causal,
            key_padding_mask=key_padding_mask,
            dropout_p=rate,
        )
        return mixed, None
    bias = bias_of(key_padding_mask, q, (len(q), k.shape[2]))
    scores = block_sparse.sampled_matmul(q / math.sqrt(q.shape[-1]), k.transpose(-2, -1), pattern)
    if bias is not None:
        b = pattern.block_size
        places = pattern.cols.to(q.device).long()
        each = bias.unflatten(1, (-1, b))[:, None, places]
        scores = scores + (each[..., 0] if b == 1 else each[..., None, :])
    mask = "zero_upper_triangle" if is_causal else "none"
    shares = dropout(block_sparse.softmax(scores, pattern, mask), rate)
    mixed = block_sparse.sparse_dense_matmul(shares, pattern, v)
    return mixed, _laid_out(shares, pattern) if need_weights else None


def _laid_out(values: Tensor, pattern: SparsePattern) -> Tensor:
    """[N, heads, nnz] or [N, heads, nnz, b, b] as dense matrices [N, heads, L, S]."""
    (n, heads), (height, width), b = values.shape[:2], pattern.grid, pattern.block_size
    flat = pattern.flat.to(values.device)
    dense = values.new_zeros(n, heads, height * width, b, b)
    dense = dense.index_copy(2, flat, values.view(n, heads, -1, b, b))
    return (
        dense.view(n, heads, height, width, b, b).transpose(3, 4).reshape(n, heads, *pattern.shape)
    )


def _densely(
    seen: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    key_padding_mask: Tensor | None,
    rate: float,
) -> tuple[Tensor, Tensor]:
    """By operators that every runtime has: for graphs that leave this library."""
    if is_causal:
        seen = seen.tril()
    scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(-2, -1)
    lowest = torch.finfo(q.dtype).min
    scores = torch.where(seen, scores, lowest)
    if key_padding_mask is not None:
        bias = key_padding_mask
        if bias.dtype == torch.bool:
            bias = torch.where(bias, lowest, 0.0).to(q.dtype)
        scores = (scores + bias[:, None, None]).clamp_min(lowest)
    # Queries that see nothing get zeros.
    shares = dropout(scores.softmax(-1) * (scores > lowest), rate)
    return shares @ v, shares
