"""What may compute a layer's products in place of the operator of `ops.linear`.

A layer has one slot for it, `SparseLinear.executor`. The active subset of Top-KAST fills it, and so
does a backend: `import popsparse` registers the tile machine. A new one calls `register_backend`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from dynsparse.files.shorten import shortened
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


MakeExecutor = Callable[[Any, torch.dtype, Mapping[str, Any] | None], Executor]
"""From a target, the dtype of the values and options by name to what computes a layer."""


class _Backend(NamedTuple):
    targets: type
    make: MakeExecutor


_backends: dict[str, _Backend] = {}


def register_backend(name: str, targets: type, make: MakeExecutor) -> None:
    """Let layers compute on `target=` of the class `targets`.

    Args:
        name: of the backend; registering it again replaces it.
        targets: the class of its targets.
        make: makes what computes a layer.
    """
    _backends[name] = _Backend(targets, make)


def executor_for(
    target: Any, dtype: torch.dtype, options: Mapping[str, Any] | None = None
) -> Executor | None:
    """What computes a layer of this dtype on `target`; None without one.

    Args:
        target: a target of a registered backend, such as `popsparse.Target.bow()`.
        options: of the target, by name: see `SparseLinear`.

    Raises:
        TypeError: no target of a registered backend, or a dtype that it does not have.
        ValueError: an option that it does not have; options without a target.
    """
    if target is None:
        if options is not None:
            raise ValueError(
                "target_options are for a target: give target=, too, or leave them out"
            )
        return None
    for backend in _backends.values():
        if isinstance(target, backend.targets):
            return backend.make(target, dtype, options)
    missing = "" if _backends else ", after `import popsparse` registered its backend"
    raise TypeError(
        f"target must be a target such as popsparse.Target.bow(){missing}, got {shortened(target)}"
    )


def scores_of(layer: Any) -> Scores | None:
    """What computes the growth scores of a layer on its target; None where the host does."""
    made = getattr(layer.executor, "scores", None)
    return None if made is None else partial(made, layer)
