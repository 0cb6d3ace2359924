"""The ranks of a mesh in every stage of a pipeline, as one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dynsparse.ranks.ranks import Ranks


class StackedRanks(Ranks):
    """What all inner ranks have, of all that lie along the outer ones: each move is one along the
    inner ranks and one along the outer.

    Args:
        inner: everyone of this stage's mesh, or one rank alone.
        outer: this rank's counterparts in all stages.
    """

    def __init__(self, inner: Ranks, outer: Ranks) -> None:
        device = outer.device if inner.alone else inner.device
        super().__init__(
            outer.rank * inner.size + inner.rank, outer.size * inner.size, device
        )  # fmt: skip
        self._inner, self._outer = inner, outer

    def _reduce(self, tensor: Tensor, how: str) -> None:
        for ranks in (self._inner, self._outer):
            if how == "sum":
                ranks.sum(tensor)
            else:
                ranks.max(tensor)

    def _broadcast(self, tensor: Tensor, source: int) -> None:
        stage, rank = divmod(source, self._inner.size)
        self._inner.broadcast(tensor, rank)
        self._outer.broadcast(tensor, stage)

    def _gather(self, out: Tensor, tensor: Tensor) -> None:
        out.copy_(_stacked(self._outer, _stacked(self._inner, tensor)).view(out.shape))

    def _exchange(
        self, out: Tensor, tensor: Tensor, coming: Sequence[int], sizes: Sequence[int]
    ) -> None:
        raise TypeError("stages of a pipeline exchange nothing with each other")


def _stacked(ranks: Ranks, tensor: Tensor) -> Tensor:
    """What every rank has, [ranks, ...]."""
    return torch.cat(ranks.all_gather(tensor[None], [1] * ranks.size))
