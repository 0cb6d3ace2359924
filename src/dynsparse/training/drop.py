"""Which connections leave: a score per block, and the lowest scores go."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dynsparse.ops.grow.select import select

__all__ = ["DropScore", "lowest", "magnitude"]

DropScore = Callable[[Tensor], Tensor]
"""From a layer's values [nnz] or [nnz, b, b] to one score per block [nnz]; low scores leave."""


def magnitude(values: Tensor) -> Tensor:
    """|w| of an element, the sum of |w| of a block: [nnz].

    Source: Mocanu et al. 2018 (SET) and Evci et al. 2020 (RigL) drop the smallest magnitudes; the
    sum over a block follows Graphcore's dynamic sparsity application.
    """
    return values.detach().abs() if values.dim() == 1 else values.detach().abs().sum((1, 2))


def lowest(scores: Tensor, count: int) -> Tensor:
    """The slots of the `count` lowest of `scores` [nnz], ascending, int64 [count], on the CPU.

    Among equal scores the smaller slots leave.

    Raises:
        ValueError: scores that are not one per slot, NaN among them, or too large a count.
    """
    if scores.dim() != 1:
        raise ValueError(f"expected one drop score per block, [nnz], got {list(scores.shape)}")
    if not 0 <= count <= len(scores):
        raise ValueError(f"cannot drop {count} of {len(scores)} blocks")
    if len(scores) and bool(torch.isnan(scores.min())):
        raise ValueError("drop scores hold NaN, so blocks cannot be ranked: the training diverged")
    return select(scores, count, largest=False).cpu()
