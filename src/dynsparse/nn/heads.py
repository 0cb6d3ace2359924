"""Which features of the projections an attention's heads have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["check_order", "joined", "natural_order", "save_order", "split"]

_NAME = "interleaved_heads"


def split(x: Tensor, heads: int, interleaved: bool) -> Tensor:
    """[N, L, inner] -> [N, heads, L, head_dim].

    Args:
        interleaved: head h has the features h, h + heads, ...; else head_dim side by side.
    """
    if interleaved:
        # torch's fused product wants the features of a head side by side.
        return x.unflatten(-1, (-1, heads)).permute(0, 3, 1, 2).contiguous()
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def joined(mixed: Tensor, interleaved: bool) -> Tensor:
    """[N, heads, L, head_dim] -> [N, L, inner]: `split` undone."""
    turned = mixed.permute(0, 2, 3, 1) if interleaved else mixed.transpose(1, 2)
    return turned.flatten(2)


def natural_order(inner: int, heads: int) -> Tensor:
    """Which interleaved feature comes where once heads are side by side: int64 [inner]."""
    return torch.arange(inner).view(-1, heads).t().flatten()


def save_order(interleaved: bool, destination: Any, prefix: str) -> None:
    """Mark a state dict whose heads are interleaved: the weights alone do not show it."""
    if interleaved:
        destination[prefix + _NAME] = torch.ones((), dtype=torch.int32)


def check_order(
    interleaved: bool,
    state_dict: Mapping[str, Tensor],
    prefix: str,
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Say, as `load_state_dict` does, where heads are interleaved on one side alone."""
    name = prefix + _NAME
    if name in unexpected_keys:
        unexpected_keys.remove(name)
    has_own = any(key.startswith(f"{prefix}q_proj.") for key in state_dict)
    if has_own and (name in state_dict) != interleaved:
        what = prefix.removesuffix(".") or "the attention"
        error_msgs.append(
            f"expected {what!r} with interleaved={interleaved}, got weights of "
            f"interleaved={not interleaved}: make the attention as it was when they were saved"
        )
