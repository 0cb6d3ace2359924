"""What grown weights start with when it is neither a number nor a function of the layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dynsparse.checks import check_not_negative
from dynsparse.nn import SparseLinear
from dynsparse.pattern import Rewiring, SparsePattern
from dynsparse.training.history import History
from dynsparse.training.steps import is_scaled


class GradientStep:
    """A grown weight starts with -scale * learning rate * its gradient.

    With scale 1 that is what one step of plain gradient descent would have made of a zero. The
    gradient is that of the trainer's history: of the step that ends in the update, or its momentum.
    The learning rate is the one the optimizer has for the layer at the update.

    Raises:
        ValueError: a scale that is negative or not finite.
    """

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = check_not_negative("scale", scale)

    def values(
        self, history: History, layer: str, grown: SparsePattern, learning_rate: float
    ) -> Tensor:
        """The start of the blocks of `grown`: [nnz] or [nnz, b, b]."""
        return self.of(history.at(layer, grown), learning_rate)

    def of(self, gradient: Tensor, learning_rate: float) -> Tensor:
        """The start of weights with this gradient."""
        return gradient * (-self.scale * learning_rate)


GrownValue = float | GradientStep | Callable[[SparseLinear, Rewiring], Tensor]
"""What grown weights start with: a number, a `GradientStep`, or a function that returns [grown] or
[grown, b, b], or an entry for each slot, [after.nnz] or [after.nnz, b, b], of which those of grown
ones count: on a device, where the host would wait to know which they are."""


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


def check_unscaled(value: Any) -> None:
    """Raise ValueError where grown weights would start with a step against a scaled gradient."""
    if isinstance(value, GradientStep) and is_scaled():
        raise ValueError(
            "expected grown weights that start with a number, got a GradientStep, which would go "
            "against the scaled gradient: use bfloat16, which needs no scaler"
        )
