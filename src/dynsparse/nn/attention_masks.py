"""The masks of an attention as one that is added to the scores."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad


def merged(
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    q: Tensor,
    keys: int,
    all_keys: int,
) -> Tensor | None:
    """Both masks as one that is added to the scores, [N or 1, heads or 1, L or 1, all keys]."""
    n, heads, length, _ = q.shape
    both = None
    if attn_mask is not None:
        attn_mask = _added(attn_mask, "attn_mask", q)
        if attn_mask.shape == (length, keys):
            both = attn_mask[None, None]
        elif attn_mask.shape == (n * heads, length, keys):
            both = attn_mask.unflatten(0, (n, heads))
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
        padding = _added(key_padding_mask, "key_padding_mask", q)[:, None, None]
        both = padding if both is None else both + padding
    # The keys that bias_k and add_zero_attn append may always be looked at.
    return None if both is None else pad(both, (0, all_keys - keys))


def _added(mask: Tensor, what: str, like: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, -math.inf)
    if mask.is_floating_point():
        return mask.to(like.dtype)
    raise TypeError(f"{what} must be bool or floating point, got {mask.dtype}")
