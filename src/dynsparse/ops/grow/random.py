"""Random positions outside a pattern."""

from __future__ import annotations

import torch
from torch import Tensor

from dynsparse.ops.grow.free_positions import check_free_positions
from dynsparse.pattern import SparsePattern, sample_without_replacement
from dynsparse.pattern.on_device import sent
from dynsparse.typed import typed


@typed
def random_outside(
    pattern: SparsePattern,
    k: int,
    *,
    exclude: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """`k` distinct free positions, uniform over subsets: flat block positions, sorted, int64 [k].

    Memory is in proportion to the pattern and `k`, not to the matrix. Where the pattern lives on a
    device the same positions come out there, and nothing waits for it.

    Args:
        pattern: its blocks are not free.
        k: how many.
        exclude: further positions that are not free: int64 [any], sorted and distinct.
        generator: draws the positions; torch's own when left out.

    Raises:
        ValueError: more positions asked for than are free, or a bad `exclude`.
    """
    k, exclude = check_free_positions(pattern, k, exclude)
    device = pattern._device
    taken = pattern._sorted_flat_on(device)
    if len(exclude):
        taken = torch.cat([taken, exclude.to(device)]).sort().values
    ranks = sent(sample_without_replacement(pattern.total - len(taken), k, generator), device)
    # taken[j] - j positions are free before taken[j], so the free position of rank r lies behind
    # every taken one with taken[j] - j <= r.
    free_before = taken - torch.arange(len(taken), device=device)
    return ranks + torch.searchsorted(free_before, ranks, right=True)
