"""Which positions growth may not choose, and how many are left."""

from __future__ import annotations

import operator

import torch
from torch import Tensor

from dynsparse.pattern import SparsePattern

__all__ = ["check_count", "taken_positions"]


def taken_positions(pattern: SparsePattern, exclude: Tensor | None) -> Tensor:
    """The pattern's positions and those of `exclude`: sorted, distinct, int64."""
    if exclude is None:
        return pattern.flat
    if exclude.dtype != torch.int64 or exclude.dim() != 1:
        raise TypeError(
            f"exclude must be flat block positions, int64 [any], got {exclude.dtype} "
            f"{list(exclude.shape)}"
        )
    exclude = exclude.cpu()
    if len(exclude) and (int(exclude[0]) < 0 or int(exclude[-1]) >= pattern.total):
        raise ValueError(f"exclude must hold positions in [0, {pattern.total})")
    if not bool((exclude[1:] > exclude[:-1]).all()):
        raise ValueError("exclude must be sorted and without duplicates: sort it, or use unique()")
    return torch.cat([pattern.flat, exclude[~pattern.contains(exclude)]]).sort().values


def check_count(k: int, pattern: SparsePattern, taken: Tensor) -> int:
    """`k` as an integer that the free positions can satisfy."""
    try:
        count = operator.index(k)
    except TypeError:
        raise TypeError(f"k must be an integer, got {k!r}") from None
    if count < 0:
        raise ValueError(f"k must not be negative, got {count}")
    free = pattern.total - len(taken)
    if count > free:
        raise ValueError(
            f"cannot grow {count} positions: only {free} of {pattern.total} are free in {pattern}; "
            "ask for fewer"
        )
    return count
