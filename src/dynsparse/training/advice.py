"""What is allowed, and hardly meant: said once, when a trainer is made."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch

from dynsparse.nn import SparseLinear
from dynsparse.training.schedule import Schedule, is_due_within


def advise(
    schedule: Schedule | None,
    optimizer: torch.optim.Optimizer,
    layers: Mapping[str, SparseLinear],
) -> None:
    """Warn of a schedule without any update, and of values that lose their weight decay."""
    if schedule is not None and not is_due_within(schedule, 1, None):
        warnings.warn(
            f"the pattern never changes: {schedule!r} has no update: lower update_interval, raise "
            "total_steps or drop_fraction, or use Static",
            stacklevel=4,
        )
    lost = _without_decay(optimizer, layers)
    if lost:
        more = f" and of {len(lost) - 1} layers more" if len(lost) > 1 else ""
        warnings.warn(
            f"the values of layer {lost[0]!r}{more} do not decay, while matrices do: they have one "
            "dimension, so a choice by dimensions takes them for biases: make the groups with "
            "dynsparse.param_groups(model, weight_decay=...)",
            stacklevel=4,
        )


def _without_decay(
    optimizer: torch.optim.Optimizer, layers: Mapping[str, SparseLinear]
) -> list[str]:
    """Layers whose values are among vectors that do not decay, while all that decays has more
    dimensions: groups that were chosen by dimensions."""
    groups = [(group.get("weight_decay", 0), group["params"]) for group in optimizer.param_groups]
    decaying = [parameters for decay, parameters in groups if decay]
    if not decaying or any(p.dim() < 2 for parameters in decaying for p in parameters):
        return []
    vectors = [p for decay, parameters in groups if not decay for p in parameters]
    if any(p.dim() > 1 for p in vectors):
        return []
    lost = {id(p) for p in vectors}
    return [name for name, layer in layers.items() if id(layer.values) in lost]
