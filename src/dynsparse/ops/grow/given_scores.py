"""The best free positions where the scores of all are known already."""

from __future__ import annotations

import torch
from torch import Tensor

from dynsparse.checks import check_tensor
from dynsparse.ops.grow.free_positions import check_free_positions
from dynsparse.ops.grow.selection import select
from dynsparse.pattern import SparsePattern
from dynsparse.typed import typed


@typed
def best_free(scores: Tensor, pattern: SparsePattern, k: int) -> Tensor:
    """The `k` positions of the largest scores that are not in `pattern`: flat, int64 [k], in order.

    What `topk_outside` chooses, for targets that make the scores themselves. Equal scores: the
    smaller position first.

    Args:
        scores: of all blocks, [out / b, in / b], none negative.
        pattern: positions that are taken.
        k: how many positions.

    Raises:
        ValueError: scores of another shape, more positions asked for than are free.
    """
    check_tensor("scores", scores)
    if tuple(scores.shape) != tuple(pattern.grid):
        raise ValueError(f"expected scores {list(pattern.grid)}, got {list(scores.shape)}")
    k, _ = check_free_positions(pattern, k, None)
    free = scores.flatten().clone()
    free[pattern.flat.to(free.device)] = -torch.inf
    return select(free, k)
