"""Which positions growth may not choose, and how many are left."""

from __future__ import annotations

import torch
from torch import Tensor

from dynsparse.checks import check_integer
from dynsparse.pattern import SparsePattern
from dynsparse.pattern.on_device import positions


def check_free_positions(
    pattern: SparsePattern, k: int, exclude: Tensor | None
) -> tuple[int, Tensor]:
    """`k` as an int, and the positions of `exclude` that the pattern does not hold anyway.

    Raises:
        TypeError: `k` is no integer, or `exclude` is not int64 [any].
        ValueError: positions that are out of range or not sorted and distinct; fewer than `k` free
            ones are left.
    """
    exclude = torch.zeros(0, dtype=torch.int64) if exclude is None else exclude
    if exclude.dtype != torch.int64 or exclude.dim() != 1:
        raise TypeError(
            f"exclude must be flat block positions, int64 [any], got {exclude.dtype} "
            f"{list(exclude.shape)}"
        )
    if len(exclude):
        exclude = exclude.cpu()
        if int(exclude[0]) < 0 or int(exclude[-1]) >= pattern.total:
            raise ValueError(f"exclude must hold positions in [0, {pattern.total})")
        if not bool((exclude[1:] > exclude[:-1]).all()):
            raise ValueError(
                "exclude must be sorted and without duplicates: sort it, or use unique()"
            )
        exclude = exclude[~pattern.contains(exclude)]
    count = check_integer("k", k)
    if count < 0:
        raise ValueError(f"k must not be negative, got {count}")
    free = pattern.total - pattern.nnz - len(exclude)
    if count > free:
        raise ValueError(
            f"cannot grow {count} positions: only {free} of {pattern.total} are free in {pattern}; "
            "ask for fewer"
        )
    return count, exclude


def positions_in_rows(pattern: SparsePattern, first: int, last: int) -> Tensor:
    """What the pattern holds in the block rows [first, last): flat positions from there, int64."""
    low, high = int(pattern.row_ptr[first]), int(pattern.row_ptr[last])
    row_ptr = pattern.row_ptr[first : last + 1]
    return positions(row_ptr, pattern.sorted_cols[low:high], pattern.grid[1])


def positions_between(flat: Tensor, begin: int, end: int) -> Tensor:
    """The positions of `flat` (sorted) that lie in [begin, end), counted from `begin`."""
    if not len(flat):
        return flat
    low, high = torch.searchsorted(flat, torch.tensor([begin, end])).tolist()
    return flat[low:high] - begin
