"""Ranks without peers that count bytes: what a move among thousands would send."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dynsparse.ranks.ranks import Ranks

__all__ = ["CountingRanks"]


class CountingRanks(Ranks):
    """One of `size` ranks of which the others bring exactly what this one brings.

    What comes out is right for that case: sums are multiples, gathered parts are copies. `sent` and
    `calls` are those of a real rank.
    """

    def __init__(self, size: int, rank: int = 0) -> None:
        super().__init__(rank, size)

    def _reduce(self, tensor: Tensor, how: str) -> None:
        if how == "sum":
            tensor.mul_(self.size)

    def _exchange(
        self, out: Tensor, tensor: Tensor, coming: Sequence[int], sizes: Sequence[int]
    ) -> None:
        own = tensor.split(list(sizes))[self.rank]
        for piece in out.split(list(coming)):
            piece.copy_(own[: len(piece)])
