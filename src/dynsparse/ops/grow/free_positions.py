"""Free positions: how many there are, which are not, and random ones."""

from __future__ import annotations

import torch
from torch import Tensor

from dynsparse._core.checks import check_integer, typed
from dynsparse.pattern import SparsePattern, sample_without_replacement
from dynsparse.pattern.on_device import flat_positions, to_device


def check_free_positions(
    pattern: SparsePattern, k: int, exclude: Tensor | None
) -> tuple[int, Tensor]:
    """`k` as an int, and the positions of `exclude` that are not in the pattern.

    Raises:
        TypeError: `k` is not an integer, or `exclude` is not int64 [any].
        ValueError: positions that are out of range or not sorted and distinct; fewer than `k` free
            positions.
    """
    exclude = torch.zeros(0, dtype=torch.int64, device="cpu") if exclude is None else exclude
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
    """The pattern's positions in the block rows [first, last), counted from row `first`, int64."""
    low, high = int(pattern.row_ptr[first]), int(pattern.row_ptr[last])
    row_ptr = pattern.row_ptr[first : last + 1]
    return flat_positions(row_ptr, pattern.sorted_cols[low:high], pattern.grid[1])


def positions_between(flat: Tensor, begin: int, end: int) -> Tensor:
    """The positions of `flat` (sorted) that lie in [begin, end), counted from `begin`."""
    if not len(flat):
        return flat
    low, high = torch.searchsorted(flat, torch.tensor([begin, end], device="cpu")).tolist()
    return flat[low:high] - begin


@typed
def random_outside(
    pattern: SparsePattern,
    k: int,
    *,
    exclude: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """`k` distinct free positions, uniform over subsets: flat block positions, sorted, int64 [k].

    Memory is in proportion to the pattern and `k`, not to the matrix. For a pattern on a device the
    result is there, without a host synchronisation, and the same.

    Args:
        pattern: its blocks are not free.
        k: number of positions.
        exclude: further positions that are not free: int64 [any], sorted and distinct.
        generator: draws the positions; defaults to torch's own.

    Raises:
        ValueError: `k` is larger than the number of free positions, or a bad `exclude`.
    """
    k, exclude = check_free_positions(pattern, k, exclude)
    device = pattern._device
    taken = pattern._sorted_flat_on(device)
    if len(exclude):
        taken = torch.cat([taken, exclude.to(device)]).sort().values
    ranks = to_device(sample_without_replacement(pattern.total - len(taken), k, generator), device)
    # taken[j] - j positions are free before taken[j], so the free position of rank r comes after
    # every taken one with taken[j] - j <= r.
    free_before = taken - torch.arange(len(taken), device=device)
    return ranks + torch.searchsorted(free_before, ranks, right=True)
