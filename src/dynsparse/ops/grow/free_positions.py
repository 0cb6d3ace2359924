"""Free positions: how many there are, which are not, and random ones."""

from __future__ import annotations

import torch
from torch import Tensor

from dynsparse._core.checks import check_integer, check_types
from dynsparse.pattern import SparsePattern, sample_without_replacement
from dynsparse.pattern.on_device import flat_positions, to_device


def check_free_positions(pattern: SparsePattern, k: int) -> int:
    """Return `k` as an int, after checking that so many positions are free.

    Raises:
        TypeError: `k` is not an integer.
        ValueError: it is negative, or fewer positions are free.
    """
    count = check_integer("k", k)
    if count < 0:
        raise ValueError(f"k must not be negative, got {count}")
    free = pattern.total - pattern.nnz
    if count > free:
        raise ValueError(
            f"cannot grow {count} positions: only {free} of {pattern.total} are free in {pattern}; "
            "ask for fewer"
        )
    return count


def positions_in_rows(pattern: SparsePattern, first: int, last: int) -> Tensor:
    """Return the pattern's positions in the block rows [first, last), from row `first`, int64."""
    low, high = int(pattern.row_ptr[first]), int(pattern.row_ptr[last])
    row_ptr = pattern.row_ptr[first : last + 1]
    return flat_positions(row_ptr, pattern.sorted_cols[low:high], pattern.grid[1])


@check_types
def random_outside(
    pattern: SparsePattern,
    k: int,
    *,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw `k` distinct free positions, uniform over subsets: flat, sorted, int64 [k].

    Memory is in proportion to the pattern and `k`, not to the matrix. For a pattern on a device the
    result is there, without a host synchronisation, and the same.

    Args:
        pattern: its blocks are not free.
        k: number of positions.
        generator: draws the positions; defaults to torch's own.

    Raises:
        ValueError: `k` is larger than the number of free positions.
    """
    k = check_free_positions(pattern, k)
    device = pattern._device
    taken = pattern._sorted_flat_on(device)
    ranks = to_device(sample_without_replacement(pattern.total - len(taken), k, generator), device)
    # taken[j] - j positions are free before taken[j], so the free position of rank r comes after
    # every taken one with taken[j] - j <= r.
    free_before = taken - torch.arange(len(taken), device=device)
    return ranks + torch.searchsorted(free_before, ranks, right=True)
