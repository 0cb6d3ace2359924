"""Which positions growth may not choose, and how many are left."""

from __future__ import annotations

import operator

import torch
from torch import Tensor

from dynsparse.pattern import SparsePattern

__all__ = ["check_count", "check_exclude", "taken_among"]


def check_exclude(exclude: Tensor | None, pattern: SparsePattern) -> Tensor:
    """The positions of `exclude` that the pattern does not hold anyway: sorted, distinct, int64."""
    if exclude is None:
        return torch.zeros(0, dtype=torch.int64)
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
    return exclude[~pattern.contains(exclude)]


def taken_among(
    pattern: SparsePattern, exclude: Tensor, first: int, last: int
) -> tuple[Tensor, Tensor]:
    """What pattern and `exclude` hold in the block rows [first, last), counted from there."""
    width = pattern.grid[1]
    rows = torch.tensor([first, last], dtype=torch.int32)
    low, high = torch.searchsorted(pattern.rows, rows).tolist()
    held = (pattern.rows[low:high].long() - first).mul_(width).add_(pattern.cols[low:high])
    low, high = torch.searchsorted(exclude, rows.long() * width).tolist()
    return held, exclude[low:high] - first * width


def check_count(k: int, pattern: SparsePattern, exclude: Tensor) -> int:
    """`k` as an integer that the free positions can satisfy."""
    try:
        count = operator.index(k)
    except TypeError:
        raise TypeError(f"k must be an integer, got {k!r}") from None
    if count < 0:
        raise ValueError(f"k must not be negative, got {count}")
    free = pattern.total - pattern.nnz - len(exclude)
    if count > free:
        raise ValueError(
            f"cannot grow {count} positions: only {free} of {pattern.total} are free in {pattern}; "
            "ask for fewer"
        )
    return count
