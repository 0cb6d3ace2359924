"""How queries, keys and values of an attention are combined: heads, masks, patterns, FlexAttention.

Source of `score_mod` and `block_mask`: Dong et al. 2024, "Flex Attention: A Programming Model for
Generating Optimized Attention Kernels"; `torch.nn.attention.flex_attention` is its implementation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.functional import pad

from dynsparse._core.checks import check_kind, shorten
from dynsparse.ops import block_sparse
from dynsparse.ops.block_sparse.attention import additive_mask, bias_of
from dynsparse.ops.dropout import dropout
from dynsparse.ops.torch_internals import is_plain_eager
from dynsparse.pattern import SparsePattern

_INTERLEAVED_KEY = "interleaved_heads"
_RUN_LENGTHS = (4, 2, 1)
# Number of bytes -> a dtype of that size, to copy them at once.
_WORD_DTYPES = {2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def run_length(block_size: int, heads: int, head_dim: int) -> int:
    """Return the number of consecutive features of a head where heads are interleaved.

    It is 4 or 2 if every block of the projections then has the same number of features of each
    head, otherwise 1. Longer runs are faster to copy.
    """
    return next(
        run
        for run in _RUN_LENGTHS
        if run == 1 or not (block_size % (run * heads) or head_dim % run)
    )


def split_heads(xs: Sequence[Tensor], heads: int, run: int | None) -> list[Tensor]:
    """Reshape each tensor [N, L, inner] to [N, heads, L, head_dim].

    Args:
        run: number of consecutive features of a head where heads are interleaved; None if each head
            has head_dim consecutive features.
    """
    if run is None:
        return [x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in xs]
    # torch's fused product requires consecutive features of a head.
    if run == 1:
        return [x.unflatten(-1, (-1, heads)).permute(0, 3, 1, 2).contiguous() for x in xs]
    turned = _swap_axes(xs, xs[0].shape[-1] // (heads * run), heads, run)
    return [x.transpose(1, 2) for x in turned]


def join_heads(mixed: Tensor, run: int | None) -> Tensor:
    """Reshape [N, heads, L, head_dim] to [N, L, inner]: the inverse of `split_heads`."""
    if run == 1:
        return mixed.permute(0, 2, 3, 1).flatten(2)
    natural = mixed.transpose(1, 2)
    if run is not None:
        heads, width = natural.shape[2:]
        natural = _swap_axes([natural.flatten(2)], heads, width // run, run)[0]
    return natural.flatten(2)


def deinterleaved_order(inner: int, heads: int, run: int) -> Tensor:
    """Return the index of the interleaved features by consecutive heads: int64 [inner]."""
    return torch.arange(inner, device="cpu").view(-1, heads, run).transpose(0, 1).flatten()


def _swap_axes(xs: Sequence[Tensor], first: int, second: int, run: int) -> Sequence[Tensor]:
    """Reorder each tensor [N, L, first * second * run] to [N, L, second, first * run]."""
    if all(run * x.element_size() in _WORD_DTYPES and is_plain_eager(x) for x in xs):
        return _SwapAxes.apply(first, second, run, *xs)
    return [x.unflatten(-1, (first, second, run)).transpose(-3, -2).flatten(-2) for x in xs]


class _SwapAxes(torch.autograd.Function):
    """Copies a run of features as one word, several times as fast as torch's own copy."""

    @staticmethod
    def forward(ctx: Any, first: int, second: int, run: int, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.back = (second, first, run)
        moved = []
        for x in xs:
            words = x.contiguous().view(_WORD_DTYPES[run * x.element_size()])
            turned = words.view(-1, first, second).transpose(1, 2).contiguous()
            moved.append(turned.view(x.dtype).view(*x.shape[:-1], second, first * run))
        return tuple(moved)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        turned = _swap_axes([dy.flatten(-2) for dy in dys], *ctx.back)
        return None, None, None, *(dx.flatten(-2) for dx in turned)


def save_head_order(run: int | None, destination: Any, prefix: str) -> None:
    """Record in a state dict that heads are interleaved, which the weights do not show."""
    if run is not None:
        destination[prefix + _INTERLEAVED_KEY] = torch.tensor(run, dtype=torch.int32, device="cpu")


def check_head_order(
    run: int | None,
    state_dict: Mapping[str, Tensor],
    prefix: str,
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Add to `error_msgs`, as `load_state_dict` does, if loaded weights have another head order."""
    name = prefix + _INTERLEAVED_KEY
    if name in unexpected_keys:
        unexpected_keys.remove(name)
    if not any(key.startswith(f"{prefix}q_proj.") for key in state_dict):
        return
    what = prefix.removesuffix(".") or "the attention"
    if (name in state_dict) != (run is not None):
        error_msgs.append(
            f"expected {what!r} with interleaved={run is not None}, got weights of "
            f"interleaved={run is None}: build the attention with that setting"
        )
        return
    saved = state_dict.get(name)
    if run is not None and not (isinstance(saved, Tensor) and saved.tolist() == run):
        error_msgs.append(
            f"expected {name!r} of the weights to be {run}, got {shorten(saved)}: they are damaged"
        )


def merge_masks(
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    q: Tensor,
    keys: int,
    all_keys: int,
) -> Tensor | None:
    """Merge both masks into one additive mask [N or 1, heads or 1, L or 1, all keys], or None."""
    n, heads, length, _ = q.shape
    mask = None
    if attn_mask is not None:
        attn_mask = additive_mask(attn_mask, "attn_mask", q)
        if attn_mask.shape == (length, keys):
            mask = attn_mask[None, None]
        elif attn_mask.shape == (n * heads, length, keys):
            mask = attn_mask.unflatten(0, (n, heads))
        else:
            raise ValueError(
                f"attn_mask must have the shape {[length, keys]} or "
                f"{[n * heads, length, keys]}, got {list(attn_mask.shape)}"
            )
    if key_padding_mask is not None:
        if key_padding_mask.shape != (n, keys):
            raise ValueError(
                f"key_padding_mask must have the shape {[n, keys]}, "
                f"got {list(key_padding_mask.shape)}"
            )
        padding = additive_mask(key_padding_mask, "key_padding_mask", q)[:, None, None]
        mask = padding if mask is None else mask + padding
    # The keys that bias_k and add_zero_attn append are never masked.
    return None if mask is None else pad(mask, (0, all_keys - keys))


_PATTERN_KEYS = ("attention_rows", "attention_cols")


def check_pattern_call(pattern: SparsePattern, queries: int, keys: int, attn_mask: bool) -> None:
    """Raise ValueError if a call has other lengths than the pattern, or an additional mask.

    Args:
        pattern: the attention's pattern.
        queries, keys: the lengths of the call.
        attn_mask: whether the call has a mask that `is_causal` does not describe.
    """
    if attn_mask:
        raise ValueError(
            "attn_mask cannot be combined with attention_pattern: include it in the pattern, or "
            "pass is_causal or key_padding_mask"
        )
    if (queries, keys) != pattern.shape:
        raise ValueError(
            f"the attention_pattern is for {pattern.shape[0]} queries and {pattern.shape[1]} keys, "
            f"got {queries} and {keys}: pad, with a key_padding_mask, or set another pattern"
        )


def save_pattern(pattern: SparsePattern, destination: Any, prefix: str) -> None:
    """Add the pattern to a state dict: block rows and block columns, int32 [nnz] each."""
    for name, index in zip(_PATTERN_KEYS, (pattern.rows, pattern.cols), strict=True):
        destination[prefix + name] = index.clone()


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
    """Return the pattern of a state dict, with the shape and block size of `pattern`.

    If the state dict has no pattern or one that does not fit, return `pattern` and report that as
    `load_state_dict` does.
    """
    tensors = [state_dict.get(prefix + name) for name in _PATTERN_KEYS]
    for name, tensor in zip(_PATTERN_KEYS, tensors, strict=True):
        if prefix + name in unexpected_keys:
            unexpected_keys.remove(prefix + name)
        if tensor is None and strict:
            missing_keys.append(prefix + name)
    if any(tensor is None for tensor in tensors):
        return pattern
    try:
        return SparsePattern(*tensors, shape=pattern.shape, block_size=pattern.block_size)
    except (TypeError, ValueError) as error:
        what = prefix.removesuffix(".") or "the attention"
        error_msgs.append(f"the attention_pattern of {what!r} does not fit: {error}")
        return pattern


def attend_with_pattern(
    pattern: SparsePattern | Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    key_padding_mask: Tensor | None,
    rate: float,
    need_weights: bool,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention at the blocks of a pattern.

    Args:
        pattern: the pattern, or for exported graphs its mask, bool [L, S].
        q, k, v: [N, heads, L or S, E].
        is_causal, key_padding_mask: as in `block_sparse.scaled_dot_product_attention`.
        rate: the dropout rate.
        need_weights: whether to return the attention weights.

    Returns:
        (output [N, heads, L, E], weights [N, heads, L, S] or None).
    """
    if isinstance(pattern, SparsePattern):
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
        key_padding_mask = bias_of(key_padding_mask, q, (len(q), k.shape[2]))
        pattern = pattern.to_mask().to(q.device)
    # By standard operators, for attention weights, which are [L, S], and for exported graphs.
    mask = pattern.tril() if is_causal else pattern
    scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(-2, -1)
    lowest = torch.finfo(q.dtype).min
    scores = torch.where(mask, scores, lowest)
    if key_padding_mask is not None:
        bias = key_padding_mask
        if bias.dtype == torch.bool:
            bias = torch.where(bias, lowest, 0.0).to(q.dtype)
        scores = (scores + bias[:, None, None]).clamp_min(lowest)
    # Queries without keys get zeros.
    weights = dropout(scores.softmax(-1) * (scores > lowest), rate)
    return weights @ v, weights


ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""Function of a score and the indices of sequence, head, query and key, all scalars; returns the
new score."""


def check_flex_arguments(score_mod: Any, block_mask: Any, refused: dict[str, bool]) -> None:
    """Check the arguments for FlexAttention.

    Args:
        score_mod, block_mask: as in `flex_attention`.
        refused: description -> whether it is set, of options that cannot be combined with it.

    Raises:
        TypeError: a `score_mod` that is not callable, a `block_mask` of another type.
        ValueError: an option that cannot be combined with it.
    """
    if score_mod is not None and not callable(score_mod):
        raise TypeError(f"score_mod must be a function or None, got {type(score_mod).__name__}")
    if block_mask is not None:
        from torch.nn.attention.flex_attention import BlockMask

        check_kind("block_mask", block_mask, BlockMask, "a result of create_block_mask, or None")
    options = [description for description, is_set in refused.items() if is_set]
    if options:
        raise ValueError(
            f"score_mod and block_mask cannot be combined with {', '.join(options)}: leave one of "
            "them out"
        )


def attend_flex(
    q: Tensor, k: Tensor, v: Tensor, score_mod: ScoreMod | None, block_mask: Any
) -> Tensor:
    """Compute attention whose scores `score_mod` changes: [N, heads, L, head_dim].

    Args:
        q: [N, heads, L, head_dim]. k, v: [N, heads, S, head_dim].
        score_mod, block_mask: as in `flex_attention`. Queries without keys get zeros.

    Raises:
        ValueError: a `block_mask` of other lengths.
    """
    # Imported here because it loads torch's compiler.
    from torch.nn.attention.flex_attention import flex_attention

    # On the CPU, torch's operator has no gradient and needs a compiler.
    if q.is_cpu and not (is_compiling() and not torch.is_grad_enabled()):
        return _attend_flex_eager(q, k, v, score_mod, block_mask)
    output: Tensor = flex_attention(q, k, v, score_mod, block_mask)
    return output


def _attend_flex_eager(
    q: Tensor, k: Tensor, v: Tensor, score_mod: ScoreMod | None, block_mask: Any
) -> Tensor:
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(-2, -1)
    indices = [torch.arange(n, dtype=torch.int32, device=q.device) for n in scores.shape]
    if score_mod is not None:
        with TransformGetItemToIndex():  # lets score_mod index tensors with batched indices
            scores = _vmap_scores(score_mod, (0,))(scores, *indices)
    if block_mask is None:
        return scores.softmax(-1) @ v
    if tuple(block_mask.seq_lengths) != tuple(scores.shape[2:]):
        raise ValueError(
            f"block_mask is for {block_mask.seq_lengths[0]} queries and "
            f"{block_mask.seq_lengths[1]} keys, got {scores.shape[2]} and {scores.shape[3]}"
        )
    with TransformGetItemToIndex():
        mask = _vmap_scores(block_mask.mask_mod, ())(*indices)
    has_keys = mask.any(-1, keepdim=True)
    # Without keys the softmax and its gradient would be NaN.
    weights = scores.masked_fill(~mask & has_keys, -math.inf).softmax(-1)
    return (weights * has_keys) @ v


def _vmap_scores(function: Callable[..., Tensor], first: tuple[int, ...]) -> Callable[..., Tensor]:
    """Vectorize a function of scalars over [N, heads, L, S].

    Args:
        first: the axes of leading arguments, which come before the four indices.
    """
    for axis in (3, 2, 1, 0):
        in_dims = [0 if i == axis else None for i in range(4)]
        function = torch.vmap(function, in_dims=(*first, *in_dims))
    return function
