"""Optimizer state follows the pattern: survivors keep theirs, grown entries start anew."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from dynsparse.encoding import moves_in_place
from dynsparse.pattern import Rewiring
from dynsparse.typed import typed


@typed
@torch.no_grad()
def rewire_state(optimizer: torch.optim.Optimizer, values: Tensor, rewiring: Rewiring) -> None:
    """Apply `rewiring` to every state tensor of the Parameter `values`, in place if its size stays.

    A state tensor with one entry per block ([nnz, ...]) follows the pattern; grown entries get
    what the optimizer would start them with, which is zero nearly everywhere. Scalars such as
    Adam's step count belong to the whole Parameter and stay.

    Where survivors keep their slots, only what grown blocks start with is written. State that holds
    no tensor with an entry per block (lists, factors) is right for survivors as it is; grown blocks
    start with what the dropped ones left there, which a RuntimeWarning says once.

    Raises:
        ValueError: survivors move, and a state is neither a tensor with one entry nor one with an
            entry per block, so that nobody can tell how it follows; nothing is changed.
    """
    prepare_state(optimizer, values, rewiring)()


@torch.no_grad()
def prepare_state(
    optimizer: torch.optim.Optimizer, values: Tensor, rewiring: Rewiring
) -> Callable[[], None]:
    """The two parts of `rewire_state`: see `prepare_tensors`.

    Raises:
        ValueError: as `rewire_state`.
    """
    state = state_of(optimizer, values)
    return prepare_tensors(state, state_per_block(optimizer, values, rewiring), rewiring)


@torch.no_grad()
def prepare_tensors(
    state: dict[Any, Any], moving: Mapping[float, Sequence[Any]], rewiring: Rewiring
) -> Callable[[], None]:
    """What applies `rewiring` to tensors, each in its place if its size stays, without more memory.

    Args:
        state: holds the tensors.
        moving: their keys, by what a grown entry starts with.
    """
    in_place: dict[float, list[Tensor]] = {}
    beside: dict[Any, Tensor] = {}
    for fill, keys in moving.items():
        for key in keys:
            tensor = state[key]
            if rewiring._reused is None:
                small = fill == 0 and rewiring.keeps_size and moves_in_place(tensor)
                small = small and rewiring._ascends
            else:
                small = tensor.is_cpu and type(tensor) in (Tensor, torch.nn.Parameter)
            if small:
                in_place.setdefault(fill, []).append(tensor)
            else:
                beside[key] = rewiring.apply(state[key], fill)

    @torch.no_grad()
    def follow() -> None:
        for fill, tensors in in_place.items():
            rewiring.apply_(*tensors, fill=fill)
        for key, made in beside.items():
            if rewiring.keeps_size:
                state[key].copy_(made)
            else:
                state[key] = made

    return follow


def state_of(optimizer: torch.optim.Optimizer, values: Tensor) -> dict[Any, Any]:
    """What `optimizer`, or one that it steps, keeps of `values`."""
    found: dict[Any, Any] = _holder(optimizer, values).state.get(values, {})
    return found


def _holder(optimizer: torch.optim.Optimizer, values: Tensor) -> torch.optim.Optimizer:
    """Which optimizer keeps the state of `values`: this one, or one that it steps and holds in an
    attribute, as ZeroRedundancyOptimizer, Lookahead and SAM do."""
    seen, waiting = set(), [optimizer]
    while waiting:
        found = waiting.pop(0)
        if found.state.get(values):
            return found
        seen.add(id(found))
        held = [o for o in vars(found).values() if isinstance(o, torch.optim.Optimizer)]
        waiting += [o for o in held if id(o) not in seen]
    return optimizer


def state_per_block(
    optimizer: torch.optim.Optimizer, values: Tensor, rewiring: Rewiring
) -> dict[float, list[str]]:
    """The names of the state tensors of `values` that follow its blocks, by what a fresh entry of
    theirs holds.

    Raises:
        ValueError: as `rewire_state`.
    """
    optimizer = _holder(optimizer, values)
    moving: dict[float, list[str]] = {}
    nnz, kind = rewiring.before.nnz, type(optimizer).__name__
    for key, state in optimizer.state.get(values, {}).items():
        if isinstance(state, Tensor) and state.dim() and len(state) == nnz:
            moving.setdefault(_start(optimizer, values, key), []).append(key)
        elif not _is_shared(state):
            shape = f" of shape {list(state.shape)}" if isinstance(state, Tensor) else ""
            what = f"{kind} keeps the state {key!r}{shape}, "
            if not rewiring.keeps_slots:
                raise ValueError(
                    f"{what}which does not follow the {nnz} blocks of the layer: use an optimizer "
                    "that keeps one entry per weight"
                )
            if optimizer not in _told:
                _told.add(optimizer)
                warnings.warn(
                    f"{what}of which nobody can tell what belongs to a grown weight: grown weights "
                    "start with what the dropped ones left there",
                    RuntimeWarning,
                    stacklevel=2,
                )
    return moving


# Optimizers of which that has been said.
_told: WeakSet[torch.optim.Optimizer] = WeakSet()


def _is_shared(state: Any) -> bool:
    """Whether nothing in it belongs to single weights, as a step count does not."""
    if isinstance(state, Tensor):
        return state.numel() <= 1
    if isinstance(state, Mapping):
        return all(map(_is_shared, state.values()))
    return not isinstance(state, (list, tuple)) or all(map(_is_shared, state))


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


def learning_rate_of(optimizer: torch.optim.Optimizer, values: Tensor) -> float:
    """The learning rate of the parameter group that holds `values`.

    Raises:
        ValueError: no group does, or the group has no learning rate.
    """
    for group in optimizer.param_groups:
        if any(parameter is values for parameter in group["params"]):
            if "lr" not in group:
                raise ValueError(f"{type(optimizer).__name__} has no learning rate")
            return float(group["lr"])
    raise ValueError("the optimizer does not hold the values of this layer")
