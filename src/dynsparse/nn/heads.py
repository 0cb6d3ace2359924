"""Which features of the projections an attention's heads have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dynsparse.files.shorten import shortened
from dynsparse.ops.eager import is_plain_eager

_NAME = "interleaved_heads"
_RUNS = (4, 2, 1)
# What moves so many bytes at once.
_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def run_length(block_size: int, heads: int, head_dim: int) -> int:
    """How many features of a head stand side by side where heads are interleaved.

    As many as can be moved at once, 4 at most, where each block of the projections still has as
    many features of each head; else 1.
    """
    return next(
        run for run in _RUNS if run == 1 or not (block_size % (run * heads) or head_dim % run)
    )


def split(xs: Sequence[Tensor], heads: int, run: int | None) -> list[Tensor]:
    """Each [N, L, inner] -> [N, heads, L, head_dim].

    Args:
        run: features are dealt out to the heads in turn, `run` at a time; None: each head has
            head_dim side by side.
    """
    if run is None:
        return [x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in xs]
    # torch's fused product wants the features of a head side by side.
    if run == 1:
        return [x.unflatten(-1, (-1, heads)).permute(0, 3, 1, 2).contiguous() for x in xs]
    turned = _turned(xs, xs[0].shape[-1] // (heads * run), heads, run)
    return [x.transpose(1, 2) for x in turned]


def joined(mixed: Tensor, run: int | None) -> Tensor:
    """[N, heads, L, head_dim] -> [N, L, inner]: `split` undone."""
    if run == 1:
        return mixed.permute(0, 2, 3, 1).flatten(2)
    natural = mixed.transpose(1, 2)
    if run is not None:
        heads, width = natural.shape[2:]
        natural = _turned([natural.flatten(2)], heads, width // run, run)[0]
    return natural.flatten(2)


def natural_order(inner: int, heads: int, run: int) -> Tensor:
    """Which interleaved feature comes where once heads are side by side: int64 [inner]."""
    return torch.arange(inner).view(-1, heads, run).transpose(0, 1).flatten()


def _turned(xs: Sequence[Tensor], first: int, second: int, run: int) -> Sequence[Tensor]:
    """Each [N, L, first * second * run] -> [N, L, second, first * run]."""
    if all(run * x.element_size() in _WORDS and is_plain_eager(x) for x in xs):
        return _Turned.apply(first, second, run, *xs)
    return [x.unflatten(-1, (first, second, run)).transpose(-3, -2).flatten(-2) for x in xs]


class _Turned(torch.autograd.Function):
    """A run of features is moved as one word: torch's own copy takes several times as long."""

    @staticmethod
    def forward(ctx: Any, first: int, second: int, run: int, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.back = (second, first, run)
        moved = []
        for x in xs:
            words = x.contiguous().view(_WORDS[run * x.element_size()])
            turned = words.view(-1, first, second).transpose(1, 2).contiguous()
            moved.append(turned.view(x.dtype).view(*x.shape[:-1], second, first * run))
        return tuple(moved)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        turned = _turned([dy.flatten(-2) for dy in dys], *ctx.back)
        return None, None, None, *(dx.flatten(-2) for dx in turned)


def save_order(run: int | None, destination: Any, prefix: str) -> None:
    """Mark a state dict whose heads are interleaved: the weights alone do not show it."""
    if run is not None:
        destination[prefix + _NAME] = torch.tensor(run, dtype=torch.int32)


def check_order(
    run: int | None,
    head_dim: int,
    state_dict: Mapping[str, Tensor],
    prefix: str,
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> int | None:
    """The run of the weights, which may be another than one's own.

    Says, as `load_state_dict` does, where heads are interleaved on one side alone.
    """
    name = prefix + _NAME
    if name in unexpected_keys:
        unexpected_keys.remove(name)
    has_own = any(key.startswith(f"{prefix}q_proj.") for key in state_dict)
    if not has_own:
        return run
    what = prefix.removesuffix(".") or "the attention"
    if (name in state_dict) != (run is not None):
        error_msgs.append(
            f"expected {what!r} with interleaved={run is not None}, got weights of "
            f"interleaved={run is None}: make the attention as it was when they were saved"
        )
        return run
    if run is None:
        return None
    saved = state_dict[name].tolist() if isinstance(state_dict[name], Tensor) else None
    if saved in _RUNS and type(saved) is int and head_dim % saved == 0:
        return saved
    error_msgs.append(
        f"expected {name!r} of the weights to be 1, 2 or 4 and to divide the {head_dim} features "
        f"of a head, got {shortened(state_dict[name])}: the weights are damaged"
    )
    return run
