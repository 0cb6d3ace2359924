"""What may compute a layer's products in place of the operator of `ops.linear`.

A layer has one slot for it, `SparseLinear.executor`. The active subset of Top-KAST fills it, and so
does a target such as the tile machine. A new target is a new case of `executor_for`.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from dynsparse.pattern import SparsePattern

__all__ = ["Executor", "executor_for"]


class Executor(Protocol):
    """What computes the products of one layer."""

    @property
    def target(self) -> Any:
        """Where it computes, as given to the layer; None for where the values are."""

    def __call__(self, layer: Any, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out] of a `SparseLinear`, differentiable in x, values and bias.

        Backward records x and dY in `ops.capture` where growth waits for them.
        """

    def kernel(self, batch: int, backward: bool) -> str:
        """What computes a pass over `batch` samples, for people to read."""

    def after(self, pattern: SparsePattern) -> Executor | None:
        """What computes once the layer has another pattern; None for the operator."""


def executor_for(target: Any, dtype: torch.dtype) -> Executor:
    """What computes a layer of this dtype on `target`, a `machine.Target`.

    Raises:
        TypeError: no such target, or a dtype that it does not have.
    """
    # The one door to a floor above this one, opened only by those who ask for a target.
    from dynsparse.popsparse.torch_layer import TileMachine

    return TileMachine(target, dtype)
