"""Attention whose scores a function changes: FlexAttention, and the same by steps.

Source: Dong et al. 2024, "Flex Attention: A Programming Model for Generating Optimized Attention
Kernels"; `torch.nn.attention.flex_attention` is its implementation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from dynsparse.checks import check_kind

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""From a score, the sequence, the head, the query and the key to the score that counts; scalars."""


def check_flexible(score_mod: Any, block_mask: Any, refused: dict[str, bool]) -> None:
    """Raise where the arguments are not what FlexAttention takes.

    Args:
        refused: what does not go with it, by the words for it, and whether it is there.

    Raises:
        TypeError: a `score_mod` that cannot be called, a `block_mask` that is none.
        ValueError: something that is refused.
    """
    if score_mod is not None and not callable(score_mod):
        raise TypeError(f"score_mod must be a function or None, got {type(score_mod).__name__}")
    if block_mask is not None:
        from torch.nn.attention.flex_attention import BlockMask

        check_kind("block_mask", block_mask, BlockMask, "what create_block_mask makes, or None")
    found = [words for words, there in refused.items() if there]
    if found:
        raise ValueError(
            f"score_mod and block_mask do not go with {', '.join(found)}: leave one of them out"
        )


def attend(q: Tensor, k: Tensor, v: Tensor, score_mod: ScoreMod | None, block_mask: Any) -> Tensor:
    """[N, heads, L, head_dim] of q [N, heads, L, head_dim], k and v [N, heads, S, head_dim].

    A query that may look nowhere gets zeros.

    Raises:
        ValueError: a `block_mask` of other lengths.
    """
    # Imported where it is used, as it brings torch's compiler along.
    from torch.nn.attention.flex_attention import flex_attention

    # On the CPU torch has no gradient of its own, and calls for a compiler.
    if q.is_cpu and not (is_compiling() and not torch.is_grad_enabled()):
        return _by_steps(q, k, v, score_mod, block_mask)
    found: Tensor = flex_attention(q, k, v, score_mod, block_mask)
    return found


def _by_steps(
    q: Tensor, k: Tensor, v: Tensor, score_mod: ScoreMod | None, block_mask: Any
) -> Tensor:
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(-2, -1)
    places = [torch.arange(n, dtype=torch.int32, device=q.device) for n in scores.shape]
    if score_mod is not None:
        with TransformGetItemToIndex():  # a tensor's entry at a number that is mapped over
            scores = _mapped(score_mod, (0,))(scores, *places)
    if block_mask is None:
        return scores.softmax(-1) @ v
    if tuple(block_mask.seq_lengths) != tuple(scores.shape[2:]):
        raise ValueError(
            f"block_mask is for {block_mask.seq_lengths[0]} queries and "
            f"{block_mask.seq_lengths[1]} keys, got {scores.shape[2]} and {scores.shape[3]}"
        )
    with TransformGetItemToIndex():
        seen = _mapped(block_mask.mask_mod, ())(*places)
    some = seen.any(-1, keepdim=True)
    # Without keys the softmax would be NaN, and its gradient, too.
    shares = scores.masked_fill(~seen & some, -math.inf).softmax(-1)
    return (shares * some) @ v


def _mapped(function: Callable[..., Tensor], first: tuple[int, ...]) -> Callable[..., Tensor]:
    """A function of scalars over [N, heads, L, S], and what comes before over the same."""
    for axis in (3, 2, 1, 0):
        places = [0 if i == axis else None for i in range(4)]
        function = torch.vmap(function, in_dims=(*first, *places))
    return function
