"""Growth by rounded gradients that stays exact: what rounding leaves open is scored anew.

Each rank sends its pieces in bfloat16, and per row the largest error that this makes. So a score is
known up to a bound. Whoever is among the best whatever the errors are has won, whoever cannot be
has lost, and the few in between are scored in float32 from the samples.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dynsparse.ops.grow import select
from dynsparse.ops.grow.free_positions import positions_between, positions_in_rows
from dynsparse.ops.grow.scores import Pair, pool
from dynsparse.ops.linear import grad_weight
from dynsparse.pattern import SparsePattern
from dynsparse.ranks.consistency import DeferredError, collective_errors
from dynsparse.ranks.keys import sorting_keys
from dynsparse.ranks.ranks import Ranks
from dynsparse.ranks.select import kth_over_ranks


class Band:
    """The free positions of this rank's slab that may be among the best, with bounds of the scores.

    Args:
        pattern, exclude: positions that are not free.
        k: how many of all ranks' positions join.
        device: of the gradients.
        total: positions of the layer, of which the pattern may be that of a rectangle.

    Attributes:
        wanted: `k`.
        area, total: weights of a block, see above.
        scores, flat: after `settle`: what a selection over ranks shall choose from; infinity where
            a position has won already.
    """

    def __init__(
        self, pattern: SparsePattern, exclude: Tensor, k: int, device: torch.device, total: int
    ) -> None:
        self._pattern, self._exclude, self.wanted = pattern, exclude, k
        self.area, self.total = pattern.block_size**2, total
        self._low = torch.zeros(0, device=device)
        self._high = torch.zeros(0, device=device)
        self._least = -torch.inf
        self.flat = torch.zeros(0, dtype=torch.int64, device=device)
        self.scores = self._low
        self._open = torch.zeros(0, dtype=torch.bool, device=device)

    def add(self, grad: Tensor, errors: Tensor, ranks: int, first: int, pooling: str) -> None:
        """Take in the rounded gradient [rows * b, in] of block rows from `first` on.

        Args:
            errors: no entry of a row is off by more: [rows * b].
            ranks: how many pieces were added up.
        """
        pattern, b = self._pattern, self._pattern.block_size
        magnitude = grad.abs()
        # Sums of float32 round too, in the pieces and here; far less than bfloat16 does.
        off = (errors[:, None] * 1.001).expand_as(grad) + magnitude * (ranks * 2.0**-22)
        score = magnitude if b == 1 else pool(magnitude, pooling, b)
        bound = off if b == 1 else pool(off, pooling, b) * 1.001
        offset = first * pattern.grid[1]
        free = torch.ones(score.numel(), dtype=torch.bool, device=grad.device)
        rows = len(score)
        free[positions_in_rows(pattern, first, first + rows).to(grad.device)] = False
        excluded = positions_between(self._exclude, offset, offset + score.numel())
        free[excluded.to(grad.device)] = False
        low, high = (score - bound).view(-1), (score + bound).view(-1)
        found = (free & (high >= self._least)).nonzero().flatten()
        self._low = torch.cat([self._low, low[found]])
        self._high = torch.cat([self._high, high[found]])
        self.flat = torch.cat([self.flat, found + offset])
        if len(self._low) > self.wanted:
            # Here alone so many are better than this: nobody below joins.
            self._least = float(self._low[select(self._low, self.wanted)].min())
            self._keep(self._high >= self._least)

    def _keep(self, which: Tensor) -> None:
        self._low, self._high = self._low[which], self._high[which]
        self.flat = self.flat[which]

    def narrow(self, least: int, most: int) -> Tensor:
        """Keep what may be among the best; the positions that are open, flat [any].

        Args:
            least: the sorting key of the lower bound that as many as can join reach.
            most: that of the upper bound: whose lower bound is higher has won.
        """
        self._keep(sorting_keys(self._high, True)[0] >= least)
        self._open = sorting_keys(self._low, True)[0] <= most
        self.scores = torch.full_like(self._low, torch.inf)
        return self.flat[self._open]

    def take(self, scores: Tensor) -> None:
        """The scores of what was open."""
        self.scores[self._open] = scores

    def bounds(self) -> tuple[Tensor, Tensor]:
        """Sorting keys of the lower and the upper bounds."""
        return sorting_keys(self._low, True)[0], sorting_keys(self._high, True)[0]

    def gradient(self, flat: Tensor, pairs: Sequence[Pair]) -> Tensor:
        """This rank's gradient at blocks [n], in any order: [n * b * b]."""
        shape, b = self._pattern.shape, self._pattern.block_size
        total = torch.zeros(len(flat), b * b, device=flat.device)
        if not len(flat):
            return total.view(-1)
        asked = SparsePattern.from_flat(flat.cpu(), shape=shape, block_size=b)
        index = asked._index_on(flat.device)
        like = torch.empty(asked.values_shape, device=flat.device)
        for x, dy in pairs:
            total += grad_weight(dy.float(), x.float(), like, index).view(-1, b * b)
        return total.view(-1)

    def pooled(self, gradient: Tensor, pooling: str) -> Tensor:
        """The scores [n] of a gradient [n * b * b]."""
        # The blocks below one another: [n * b, b] becomes [n, 1].
        b = self._pattern.block_size
        return pool(gradient.abs().view(-1, b), pooling, b).view(-1)


def settle(
    ranks: Ranks,
    bands: Sequence[Band],
    pairs: Sequence[Sequence[Pair]],
    pooling: str,
    counts: Sequence[bool],
) -> None:
    """Score what is open in all bands; every rank calls it with its own samples.

    Args:
        ranks: with other samples for the same positions; everyone of their mesh ranks together.
        counts: whether what these ranks have of each layer counts, or is a copy.
    """
    if not bands:
        return
    keys = [
        key if own else key[:0]
        for band, own in zip(bands, counts, strict=True)
        for key in band.bounds()
    ]
    most = max(band.total for band in bands)
    wanted = [band.wanted for band in bands for _ in range(2)]
    ends, _, _ = kth_over_ranks(ranks.all_ranks, keys, wanted, 32, most)
    asked = [b.narrow(*ends[2 * i : 2 * i + 2]) for i, b in enumerate(bands)]
    own = torch.tensor([len(flat) for flat in asked], device=ranks.device)
    table = torch.stack(ranks.all_gather(own, [len(bands)] * ranks.size)).tolist()
    lines = ranks.all_gather(torch.cat(asked), [sum(of_rank) for of_rank in table])
    by_rank = [line.split(of_rank) for line, of_rank in zip(lines, table, strict=True)]
    areas = [band.area for band in bands]
    sizes = [sum(n * a for n, a in zip(of, areas, strict=True)) for of in table]
    sent = torch.zeros(sum(sizes), device=asked[0].device)
    failed = DeferredError()
    with failed:
        # Slabs ascend with the ranks: joined, the positions of a layer are in order.
        made = [
            band.gradient(torch.cat([of[i] for of in by_rank]), pairs[i]).split(
                [of[i] * areas[i] for of in table]
            )
            for i, band in enumerate(bands)
        ]
        torch.cat([of[owner] for owner in range(ranks.size) for of in made], out=sent)
    mine = sizes[ranks.rank]
    got = ranks.all_to_all(sent, sizes, [mine] * ranks.size).view(ranks.size, mine)
    with failed:
        total = got[0].clone()
        for piece in got[1:]:
            total += piece
        own_sizes = [n * a for n, a in zip(table[ranks.rank], areas, strict=True)]
        for band, part in zip(bands, total.split(own_sizes), strict=True):
            band.take(band.pooled(part, pooling))
    with collective_errors(ranks):
        failed.raise_pending()
