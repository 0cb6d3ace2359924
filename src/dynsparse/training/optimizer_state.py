"""Optimizer state follows the pattern: survivors keep theirs, grown entries start anew."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dynsparse.encoding import follows_in_place
from dynsparse.pattern import Rewiring
from dynsparse.typed import typed

__all__ = ["check_optimizer", "follow_later", "moving_state", "prepare_state", "rewire_state"]


@typed
@torch.no_grad()
def rewire_state(optimizer: torch.optim.Optimizer, values: Tensor, rewiring: Rewiring) -> None:
    """Apply `rewiring` to every state tensor of the Parameter `values`, in place if its size stays.

    A state tensor with one entry per block ([nnz, ...]) follows the pattern; grown entries get
    what the optimizer would start them with, which is zero nearly everywhere. Scalars such as
    Adam's step count belong to the whole Parameter and stay.

    Raises:
        ValueError: a state tensor with neither one entry nor one per block, of which nobody can
            tell how it follows; nothing is changed.
    """
    prepare_state(optimizer, values, rewiring)()


@torch.no_grad()
def prepare_state(
    optimizer: torch.optim.Optimizer, values: Tensor, rewiring: Rewiring
) -> Callable[[], None]:
    """The two parts of `rewire_state`: see `follow_later`.

    Raises:
        ValueError: as `rewire_state`.
    """
    state = optimizer.state.get(values, {})
    return follow_later(state, moving_state(optimizer, values, rewiring.before.nnz), rewiring)


@torch.no_grad()
def follow_later(
    state: dict[Any, Any], moving: Mapping[float, Sequence[Any]], rewiring: Rewiring
) -> Callable[[], None]:
    """What applies `rewiring` to tensors, each in its place if its size stays, without more memory.

    Args:
        state: holds the tensors.
        moving: their keys, by what a grown entry starts with.
    """
    in_place: list[Tensor] = []
    beside: dict[Any, Tensor] = {}
    for fill, keys in moving.items():
        for key in keys:
            if fill == 0 and rewiring.keeps_size and follows_in_place(state[key]):
                in_place.append(state[key])
            else:
                beside[key] = rewiring.apply(state[key], fill)

    @torch.no_grad()
    def follow() -> None:
        if in_place:
            rewiring.apply_(*in_place)
        for key, made in beside.items():
            if rewiring.keeps_size:
                state[key].copy_(made)
            else:
                state[key] = made

    return follow


def moving_state(
    optimizer: torch.optim.Optimizer, values: Tensor, nnz: int
) -> dict[float, list[str]]:
    """The names of the state tensors of `values` that follow its `nnz` blocks, by what a fresh
    entry of theirs holds.

    Raises:
        ValueError: as `rewire_state`.
    """
    moving: dict[float, list[str]] = {}
    for key, tensor in optimizer.state.get(values, {}).items():
        if not isinstance(tensor, Tensor) or tensor.dim() == 0:
            continue
        if len(tensor) == nnz:
            moving.setdefault(_start(optimizer, values, key), []).append(key)
        elif tensor.numel() > 1:
            raise ValueError(
                f"{type(optimizer).__name__} keeps the state {key!r} of shape "
                f"{list(tensor.shape)}, which does not follow the {nnz} blocks "
                "of the layer: use an optimizer that keeps one entry per weight"
            )
    return moving


def _start(optimizer: torch.optim.Optimizer, values: Tensor, key: str) -> float:
    """What a fresh entry of the state `key` holds."""
    told = getattr(optimizer, "fresh", {})  # by those that stand for other libraries' optimizers
    if key in told:
        return float(told[key])
    group = next(g for g in optimizer.param_groups if any(p is values for p in g["params"]))
    if isinstance(optimizer, torch.optim.Adagrad) and key == "sum":
        return float(group["initial_accumulator_value"])
    if isinstance(optimizer, torch.optim.Rprop) and key == "step_size":
        return float(group["lr"])
    return 0.0


def check_optimizer(optimizer: torch.optim.Optimizer, layers: dict[str, Tensor]) -> None:
    """Whether `optimizer` can train these values (name -> Parameter) while their pattern changes.

    Raises:
        TypeError: not an optimizer of torch, or one whose state is no longer per weight (LBFGS).
        ValueError: a layer's values are in none of its parameter groups.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError("LBFGS mixes all weights in its state, which cannot follow a pattern")
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, values in layers.items():
        if values.requires_grad and id(values) not in held:
            raise ValueError(
                f"the optimizer does not hold the values of layer {name!r}: make it from "
                "model.parameters() after the model has become sparse"
            )
