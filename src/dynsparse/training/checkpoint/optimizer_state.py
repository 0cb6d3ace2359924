"""States of optimizers and learning-rate schedulers, checked before anything is changed."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dynsparse._core.checks import shortened
from dynsparse.nn.sharded import local_part

# What they keep for a parameter is not of its shape.
_OTHER_SHAPES = ("Adafactor", "LBFGS")


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, state: dict[str, Any], shapes: Mapping[int, torch.Size]
) -> dict[str, Any]:
    """The attributes of `optimizer` with `state` loaded, made beside it.

    Args:
        shapes: those that its parameters will have, by the `id` of the parameter.

    Raises:
        ValueError: a state that is damaged, or with which it could make no step.
    """
    try:
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        if numbers != list(range(len(numbers))) or not set(state["state"]) <= set(numbers):
            raise ValueError("expected its parameters in their order")
        beside = copy.copy(optimizer)
        # Its own load puts the groups' parameters in place, but not their other entries' types.
        beside.load_state_dict(copy.deepcopy(state))
        for own, saved in zip(optimizer.param_groups, beside.param_groups, strict=True):
            _check_same_kind("its group", _options(own), _options(saved))
            _check_ranges(optimizer, own, saved)
        for group in beside.param_groups:
            for parameter in group["params"]:
                shape = shapes.get(id(parameter), parameter.shape)
                _check_entries(optimizer, beside.state.get(parameter, {}), shape)
    except Exception as error:  # of any kind: the values are untrusted
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ValueError(f"the state of the optimizer is damaged ({reason})") from None
    # Hooks belong to the optimizer itself.
    return {name: own for name, own in vars(beside).items() if not name.endswith("_hooks")}


def check_finite(state: Mapping[Tensor, Any], names: Mapping[int, str]) -> None:
    """Raise ValueError where what an optimizer keeps of a parameter holds NaN or infinity.

    Args:
        state: of an optimizer, by parameter.
        names: of the parameters, by their `id`.
    """
    for parameter, entries in state.items():
        for key, value in entries.items():
            if not isinstance(value, Tensor) or not value.is_floating_point():
                continue
            value = local_part(value)
            if not bool((value.float() if value.itemsize < 2 else value).isfinite().all()):
                name = names.get(id(parameter), "a parameter that is not the model's")
                raise ValueError(
                    f"the optimizer's {key} of {name!r} holds NaN or infinity: the training has "
                    "diverged"
                )


def _options(group: dict[str, Any]) -> dict[str, Any]:
    # A scheduler adds this one when it is made.
    return {name: v for name, v in group.items() if name not in ("params", "initial_lr")}


def _check_ranges(
    optimizer: torch.optim.Optimizer, own: dict[str, Any], saved: dict[str, Any]
) -> None:
    """Torch's own optimizers know the ranges of their arguments, when they are made."""
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim."):
        return
    taken = inspect.signature(kind).parameters
    for group in (own, saved):
        arguments = {name: value for name, value in _options(group).items() if name in taken}
        try:
            kind([torch.zeros(1, requires_grad=True)], **arguments)
        except Exception as error:  # of any kind: torch has several
            if group is own:
                return  # made in a way that is not known here
            raise ValueError(f"its group: {error}") from None


def _check_entries(
    optimizer: torch.optim.Optimizer, entries: dict[str, Any], shape: torch.Size
) -> None:
    if not isinstance(entries, dict) or not all(isinstance(name, str) for name in entries):
        raise ValueError(f"expected names and values, got {shortened(entries)}")
    needed = _needed(optimizer)
    if entries and (missing := needed - entries.keys()):
        raise ValueError(f"expected {sorted(missing)}, got {shortened(sorted(entries))}")
    for name, value in entries.items():
        if name == "step":
            number = value if isinstance(value, (int, float)) else _to_number(value)
            if not math.isfinite(number) or number < 0:
                raise ValueError(f"expected a step of at least 0, got {number}")
        elif isinstance(value, Tensor):
            exact = type(optimizer).__name__ not in _OTHER_SHAPES
            if exact and (value.dim() or name in needed) and value.shape != shape:
                raise ValueError(f"expected {name} of {list(shape)}, got {list(value.shape)}")
            if exact and value.is_complex():
                raise ValueError(f"expected {name} of real numbers, got {value.dtype}")
        elif name in needed and not (value is None and name == "momentum_buffer"):
            raise ValueError(f"expected {name} to be a tensor, got {shortened(value)}")


def _needed(optimizer: torch.optim.Optimizer) -> set[str]:
    """What a parameter's state always has, for the optimizers that trainings use most."""
    if isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW)):
        return {"step", "exp_avg", "exp_avg_sq"}
    return {"momentum_buffer"} if isinstance(optimizer, torch.optim.SGD) else set()


def _to_number(value: Any) -> float:
    if not isinstance(value, Tensor) or value.numel() != 1 or value.is_complex():
        raise ValueError(f"expected a step of one number, got {shortened(value)}")
    return float(value)


def check_scheduler(state: Any, scheduler: Any) -> None:
    """Raise ValueError for a state of other entries, types or lengths than the scheduler's own."""
    _check_same_kind("the scheduler", scheduler.state_dict(), state)


def _check_same_kind(what: str, own: Any, saved: Any) -> None:
    """Raise ValueError if `saved` could not stand where `own` does."""
    number = (int, float, Tensor)
    if own is None or isinstance(own, bool):
        # Switches of torch's optimizers are None where they are left to it.
        if not (saved is None or isinstance(saved, bool)):
            raise ValueError(f"{what}: expected {shortened(own)}, got {shortened(saved)}")
    elif isinstance(own, number):
        alone = saved.numel() == 1 if isinstance(saved, Tensor) else isinstance(saved, number)
        if not alone or isinstance(saved, bool) or not math.isfinite(float(saved)):
            raise ValueError(f"{what}: expected a number, got {shortened(saved)}")
    elif isinstance(own, dict):
        if not isinstance(saved, dict) or not own.keys() <= saved.keys():
            raise ValueError(f"{what}: expected {shortened(own)}, got {shortened(saved)}")
        for key in own:
            _check_same_kind(f"{what}, {key}", own[key], saved[key])
    elif isinstance(own, (list, tuple)):
        if not isinstance(saved, (list, tuple)) or len(own) != len(saved):
            raise ValueError(f"{what}: expected {len(own)} values, got {shortened(saved)}")
        for one, other in zip(own, saved, strict=True):
            _check_same_kind(what, one, other)
    elif not isinstance(saved, type(own)):
        raise ValueError(f"{what}: expected {shortened(own)}, got {shortened(saved)}")
