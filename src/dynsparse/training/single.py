"""What an update cannot follow: other optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from dynsparse.nn import SparseLinear


class _Trainer(Protocol):
    optimizer: torch.optim.Optimizer
    layers: dict[str, SparseLinear]
    steps: int


def check_one_optimizer(
    optimizer: torch.optim.Optimizer,
    layers: Mapping[str, SparseLinear],
    steps: Mapping[Any, int],
    others: Iterable[_Trainer],
) -> None:
    """Raise RuntimeError where another trainer steps another optimizer over one of the layers.

    The state of that optimizer would not follow the pattern, and belong to other weights.

    Args:
        optimizer: whose state follows.
        layers: by name, those that an update may change.
        steps: of other trainers, up to which they do not matter; 0 where they are not named.
        others: all trainers.
    """
    own = {id(layer.values): name for name, layer in layers.items()}
    for other in list(others):
        if other.optimizer is optimizer or other.steps <= steps.get(other, 0):
            continue
        for layer in other.layers.values():
            name = own.get(id(layer.values))
            state = other.optimizer.state.get(layer.values, {})
            if name is not None and any(isinstance(t, Tensor) and t.dim() for t in state.values()):
                raise RuntimeError(
                    f"layer {name!r} is also trained by another trainer with another optimizer "
                    f"({type(other.optimizer).__name__}), whose state would not follow the new "
                    "pattern: let one optimizer train a layer"
                )
