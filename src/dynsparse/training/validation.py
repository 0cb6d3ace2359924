"""Checks of a trainer's layers, components, settings and saved state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dynsparse._core import logs
from dynsparse._core.checks import is_number, shorten
from dynsparse.nn import SparseLinear
from dynsparse.nn.quantized import refuse_int8
from dynsparse.training.grow import GradientStep
from dynsparse.training.schedule import Schedule, is_due_within

# Duck typing, so that custom components work: the attributes of each, and what it is.
_COMPONENTS = {
    "schedule": (("is_due",), "a schedule, such as CosineSchedule"),
    "growth": (("choose", "needs_gradients"), "a Growth, such as GradientGrowth"),
    "budget": (("counts", "begin"), "a Budget, such as LayerBudget"),
    "history": (("observe", "window"), "a History, such as LastStep"),
}


def find_sparse_layers(model: nn.Module) -> dict[str, SparseLinear]:
    """name -> layer, in the order of `model.named_modules()`.

    Raises:
        TypeError: not a module.
        ValueError: no sparse layer, or two that share their values but not their pattern.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, DistributedDataParallel):
        model = model.module  # names are those of the model
    layers = {name: m for name, m in model.named_modules() if isinstance(m, SparseLinear)}
    if not layers:
        refuse_int8(model)
        raise ValueError(
            "the model has no sparse layers: use dynsparse.nn.SparseLinear, or dynsparse.sparsify"
        )
    owners: dict[int, str] = {}
    for name, layer in layers.items():
        other = owners.setdefault(id(layer.values), name)
        if other != name:
            raise ValueError(
                f"the layers {other!r} and {name!r} share their values but not their pattern: "
                "use one module in both places"
            )
    return layers


def check_components(
    schedule: Any, growth: Any, budget: Any, history: Any, drop_score: Any, initial_value: Any
) -> None:
    """Raise unless a trainer can be made of these.

    Raises:
        TypeError: a component that is not None lacks what a trainer calls; a `drop_score` that
            cannot be called; an `initial_value` of another kind.
        ValueError: a growth without a schedule or a schedule without a growth; an `initial_value`
            that is not finite.
    """
    if (schedule is None) != (growth is None):
        raise ValueError("give both a schedule and a growth, or neither for a static pattern")
    components = {"schedule": schedule, "growth": growth, "budget": budget, "history": history}
    for name, component in components.items():
        attributes, expected = _COMPONENTS[name]
        if component is not None and (
            isinstance(component, type) or not all(hasattr(component, a) for a in attributes)
        ):
            raise TypeError(f"{name} must be {expected}, got {shorten(component)}")
    if is_number(initial_value):
        if not math.isfinite(initial_value):
            raise ValueError(f"initial_value must be finite, got {initial_value!r}")
    elif isinstance(initial_value, type) or not (
        callable(initial_value) or isinstance(initial_value, GradientStep)
    ):
        raise TypeError(
            f"initial_value must be a number or a function, got {shorten(initial_value)}"
        )
    if not callable(drop_score):
        raise TypeError(f"drop_score must be a function of the values, got {drop_score!r}")


def check_description(state: Any, description: Mapping[str, Any]) -> None:
    """Raise ValueError unless a trainer's `state` is complete and agrees with `description`."""
    states = ("growth_state", "budget_state", "history_state", "own_state")
    needed = {*description, "steps", "updates", *states}
    if not isinstance(state, dict) or not needed <= state.keys():
        raise ValueError(f"not the state of a trainer: expected the entries {sorted(needed)}")
    for key, value in description.items():
        try:
            agrees = bool(state[key] == value)
        except (RuntimeError, TypeError, ValueError):  # tensors in the place of plain types
            agrees = False
        if not agrees:
            saved = state[key]
            if isinstance(saved, dict) and isinstance(value, dict) and saved.keys() == value.keys():
                key = next(name for name in value if saved[name] != value[name])
                saved, value = saved[key], value[key]
            raise ValueError(
                f"the state does not fit this trainer: its {key} is {saved!r}, here it is {value!r}"
            )
    for key in ("steps", "updates"):
        count = state[key]
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise ValueError(f"the {key} of the state must be a number from 0 on, got {count!r}")


def warn_of_settings(
    schedule: Schedule | None,
    optimizer: torch.optim.Optimizer,
    layers: Mapping[str, SparseLinear],
) -> None:
    """Warn of legal but probably unintended settings: a schedule without any update, layers of
    which none can be trained, and values that lose their weight decay."""
    if schedule is not None and not is_due_within(schedule, 1, None):
        logs.warn(
            f"the pattern never changes: {schedule!r} has no update: lower update_interval, raise "
            "total_steps or drop_fraction, or use Static",
        )
    elif schedule is not None and not layers:
        logs.warn(
            "none of the sparse layers' values require a gradient, so no pattern can change: "
            "adapters and dynsparse.freeze leave them so; call requires_grad_() for the values to "
            "train, or use Static",
        )
    lost = _find_undecayed(optimizer, layers)
    if lost:
        more = f" and of {len(lost) - 1} layers more" if len(lost) > 1 else ""
        logs.warn(
            f"the values of layer {lost[0]!r}{more} do not decay, while matrices do: they have one "
            "dimension, so a choice by dimensions takes them for biases: make the groups with "
            "dynsparse.param_groups(model, weight_decay=...)",
        )


def warn_at_end(schedule: Schedule | None, step: int) -> None:
    """Warn, once, of the first step after the last one of the schedule."""
    total = getattr(schedule, "total_steps", None)
    if total is not None and step == total + 1:
        logs.warn(
            f"this is step {step:,} of a schedule for total_steps={total:,}: the patterns no "
            "longer change; pass the number of steps of the whole training as total_steps",
        )


def _find_undecayed(
    optimizer: torch.optim.Optimizer, layers: Mapping[str, SparseLinear]
) -> list[str]:
    """Layers whose values are among vectors that do not decay, while everything that decays has
    more dimensions: groups that were chosen by dimensions."""
    groups = [(group.get("weight_decay", 0), group["params"]) for group in optimizer.param_groups]
    decaying = [parameters for decay, parameters in groups if decay]
    if not decaying or any(p.dim() < 2 for parameters in decaying for p in parameters):
        return []
    vectors = [p for decay, parameters in groups if not decay for p in parameters]
    if any(p.dim() > 1 for p in vectors):
        return []
    lost = {id(p) for p in vectors}
    return [name for name, layer in layers.items() if id(layer.values) in lost]
