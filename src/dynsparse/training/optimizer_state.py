"""Optimizer state follows the pattern: survivors keep theirs, grown entries start anew."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from dynsparse.checks import typed
from dynsparse.pattern import Rewiring
from dynsparse.pattern.index_arrays import moves_in_place


@typed
@torch.no_grad()
def rewire_state(optimizer: torch.optim.Optimizer, values: Tensor, rewiring: Rewiring) -> None:
    """Apply `rewiring` to every state tensor of the Parameter `values`, in place if its size stays.

    A state tensor with one entry per block ([nnz, ...]) follows the pattern; grown entries get the
    optimizer's initial value, which is mostly zero. Scalars such as Adam's step count belong to the
    whole Parameter and stay.

    Where survivors keep their slots, only the entries of grown blocks are written. Other state
    (lists, factors) stays right for survivors; grown blocks inherit that of the dropped ones, of
    which a RuntimeWarning warns once.

    Raises:
        ValueError: survivors move, and a state is neither a tensor with one entry nor one with an
            entry per block, so that it cannot follow; nothing is changed.
    """
    prepare_state(optimizer, values, rewiring)()


@torch.no_grad()
def prepare_state(
    optimizer: torch.optim.Optimizer, values: Tensor, rewiring: Rewiring
) -> Callable[[], None]:
    """`rewire_state` in two parts: see `prepare_tensors`.

    Raises:
        ValueError: as `rewire_state`.
    """
    state = state_of(optimizer, values)
    return prepare_tensors(state, state_per_block(optimizer, values, rewiring), rewiring)


@torch.no_grad()
def prepare_tensors(
    state: dict[Any, Any], keys_by_fill: Mapping[float, Sequence[Any]], rewiring: Rewiring
) -> Callable[[], None]:
    """Returns a function that applies `rewiring` to tensors without allocating memory, each in its
    place if its size stays.

    Args:
        state: holds the tensors.
        keys_by_fill: their keys, by the initial value of a grown entry.
    """
    in_place: dict[float, list[Tensor]] = {}
    prepared: dict[Any, Tensor] = {}
    for fill, keys in keys_by_fill.items():
        for key in keys:
            tensor = state[key]
            if rewiring._reused is None:
                follows = fill == 0 and rewiring.keeps_size and moves_in_place(tensor)
                follows = follows and rewiring._ascends
            else:
                follows = tensor.is_cpu and type(tensor) in (Tensor, torch.nn.Parameter)
            if follows:
                in_place.setdefault(fill, []).append(tensor)
            else:
                prepared[key] = rewiring.apply(state[key], fill)

    @torch.no_grad()
    def follow() -> None:
        for fill, tensors in in_place.items():
            rewiring.apply_(*tensors, fill=fill)
        for key, tensor in prepared.items():
            if rewiring.keeps_size:
                state[key].copy_(tensor)
            else:
                state[key] = tensor

    return follow


def state_of(optimizer: torch.optim.Optimizer, values: Tensor) -> dict[Any, Any]:
    """The state of `values` in `optimizer`, or in one that it steps."""
    state: dict[Any, Any] = _holder(optimizer, values).state.get(values, {})
    return state


def _holder(optimizer: torch.optim.Optimizer, values: Tensor) -> torch.optim.Optimizer:
    """The optimizer that keeps the state of `values`: this one, or one that it steps and holds in
    an attribute, as ZeroRedundancyOptimizer, Lookahead and SAM do."""
    seen, waiting = set(), [optimizer]
    while waiting:
        candidate = waiting.pop(0)
        if candidate.state.get(values):
            return candidate
        seen.add(id(candidate))
        inner = [o for o in vars(candidate).values() if isinstance(o, torch.optim.Optimizer)]
        waiting += [o for o in inner if id(o) not in seen]
    return optimizer


def state_per_block(
    optimizer: torch.optim.Optimizer, values: Tensor, rewiring: Rewiring
) -> dict[float, list[str]]:
    """The names of the state tensors of `values` with an entry per block, by the initial value of
    an entry.

    Raises:
        ValueError: as `rewire_state`.
    """
    optimizer = _holder(optimizer, values)
    keys_by_fill: dict[float, list[str]] = {}
    nnz, kind = rewiring.before.nnz, type(optimizer).__name__
    for key, state in optimizer.state.get(values, {}).items():
        if isinstance(state, Tensor) and state.dim() and len(state) == nnz:
            keys_by_fill.setdefault(_initial_entry(optimizer, values, key), []).append(key)
        elif not _is_shared(state):
            shape = f" of shape {list(state.shape)}" if isinstance(state, Tensor) else ""
            what = f"{kind} keeps the state {key!r}{shape}, "
            if not rewiring.keeps_slots:
                raise ValueError(
                    f"{what}which does not follow the {nnz} blocks of the layer: use an optimizer "
                    "that keeps one entry per weight"
                )
            if optimizer not in _warned:
                _warned.add(optimizer)
                warnings.warn(
                    f"{what}whose entries for grown weights are unknown: grown weights start with "
                    "what the dropped ones left there",
                    RuntimeWarning,
                    stacklevel=2,
                )
    return keys_by_fill


_warned: WeakSet[torch.optim.Optimizer] = WeakSet()


def _is_shared(state: Any) -> bool:
    """Whether none of it belongs to single weights, as a step count."""
    if isinstance(state, Tensor):
        return state.numel() <= 1
    if isinstance(state, Mapping):
        return all(map(_is_shared, state.values()))
    return not isinstance(state, (list, tuple)) or all(map(_is_shared, state))


def _initial_entry(optimizer: torch.optim.Optimizer, values: Tensor, key: str) -> float:
    """The initial value of an entry of the state `key`."""
    fresh = getattr(optimizer, "fresh", {})  # of adapters of other libraries' optimizers
    if key in fresh:
        return float(fresh[key])
    group = next(g for g in optimizer.param_groups if any(p is values for p in g["params"]))
    if isinstance(optimizer, torch.optim.Adagrad) and key == "sum":
        return float(group["initial_accumulator_value"])
    if isinstance(optimizer, torch.optim.Rprop) and key == "step_size":
        return float(group["lr"])
    return 0.0


def check_optimizer(optimizer: torch.optim.Optimizer, layers: dict[str, Tensor]) -> None:
    """Check that `optimizer` can train these values (name -> Parameter) while patterns change.

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
