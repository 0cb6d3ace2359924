"""What may compute a layer's products in place of the operator of `ops.linear`.

A layer has one slot for it, `SparseLinear.executor`. The active subset of Top-KAST fills it, and so
does a target such as the tile machine. A new target is a new case of `executor_for`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from dynsparse.pattern import SparsePattern

Scores = Callable[[Sequence[tuple[Tensor, Tensor]], str], Tensor]
"""From pairs (x [batch, in], dY [batch, out]) whose dY^T X add up to the gradient, and "sum",
"avg", "max" or "none", to the magnitudes of blocks [out / b, in / b]; "none" is pooled as "sum"."""


class Executor(Protocol):
    """What computes the products of one layer.

    One with a target also has `embed(layer, ids)`, the rows of a table, and may have
    `scores(layer, pairs, pooling)`, see `Scores`.
    """

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


def executor_for(
    target: Any, dtype: torch.dtype, options: Mapping[str, Any] | None = None
) -> Executor | None:
    """What computes a layer of this dtype on `target`, a `machine.Target`; None without one.

    Args:
        options: of the target, by name: see `SparseLinear`.

    Raises:
        TypeError: no such target, or a dtype that it does not have.
        ValueError: an option that it does not have; options without a target.
    """
    if target is None:
        if options is not None:
            raise ValueError(
                "target_options are for a target: give target=, too, or leave them out"
            )
        return None
    # The one door to a floor above this one, opened only by those who ask for a target.
    from dynsparse.popsparse.torch_layer import TileMachine

    return TileMachine(target, dtype, options)


def scores_of(layer: Any) -> Scores | None:
    """What computes the growth scores of a layer on its target; None where the host does."""
    made = getattr(layer.executor, "scores", None)
    return None if made is None else partial(made, layer)
