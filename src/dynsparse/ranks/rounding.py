"""Growth by gradients that are rounded to bfloat16, with the result of exact gradients.

Each rank sends its gradient in bfloat16, and the largest rounding error of each row. This bounds
every score. Positions that are among the best for any error join, positions that are not for any
error do not, and the few ambiguous ones are scored again in float32 from the samples.
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
from dynsparse.ranks.ranks import Ranks
from dynsparse.ranks.select import kth_over_ranks, sorting_keys


class RoundedScores:
    """The free positions in this rank's rows that may be among the best, with bounds of the scores.

    Args:
        pattern, exclude: positions that are not free.
        k: how many positions of all ranks join.
        device: of the gradients.
        total: number of positions of the full layer, of which the pattern may be that of a shard.

    Attributes:
        k, total: as above.
        area: weights of a block.
        scores, flat: after `rescore_ambiguous`: the candidates for a selection over ranks; the
            score is infinite where a position joins for any error.
    """

    def __init__(
        self, pattern: SparsePattern, exclude: Tensor, k: int, device: torch.device, total: int
    ) -> None:
        self._pattern, self._exclude, self.k = pattern, exclude, k
        self.area, self.total = pattern.block_size**2, total
        self._low = torch.zeros(0, device=device)
        self._high = torch.zeros(0, device=device)
        self._least = -torch.inf
        self.flat = torch.zeros(0, dtype=torch.int64, device=device)
        self.scores = self._low
        self._ambiguous = torch.zeros(0, dtype=torch.bool, device=device)

    def add(self, grad: Tensor, errors: Tensor, ranks: int, first: int, pooling: str) -> None:
        """Add the rounded gradient [rows * b, in] of the block rows from `first` on.

        Args:
            errors: largest error of each row: [rows * b].
            ranks: number of ranks whose gradients were added up.
        """
        pattern, b = self._pattern, self._pattern.block_size
        magnitude = grad.abs()
        # Sums in float32 are rounded too, far less than bfloat16.
        error = (errors[:, None] * 1.001).expand_as(grad) + magnitude * (ranks * 2.0**-22)
        score = magnitude if b == 1 else pool(magnitude, pooling, b)
        bound = error if b == 1 else pool(error, pooling, b) * 1.001
        offset = first * pattern.grid[1]
        free = torch.ones(score.numel(), dtype=torch.bool, device=grad.device)
        rows = len(score)
        free[positions_in_rows(pattern, first, first + rows).to(grad.device)] = False
        excluded = positions_between(self._exclude, offset, offset + score.numel())
        free[excluded.to(grad.device)] = False
        low, high = (score - bound).view(-1), (score + bound).view(-1)
        kept = (free & (high >= self._least)).nonzero().flatten()
        self._low = torch.cat([self._low, low[kept]])
        self._high = torch.cat([self._high, high[kept]])
        self.flat = torch.cat([self.flat, kept + offset])
        if len(self._low) > self.k:
            # k positions of this rank are better: none below joins.
            self._least = float(self._low[select(self._low, self.k)].min())
            self._keep(self._high >= self._least)

    def _keep(self, mask: Tensor) -> None:
        self._low, self._high = self._low[mask], self._high[mask]
        self.flat = self.flat[mask]

    def narrow(self, least: int, most: int) -> Tensor:
        """Keep the positions that may be among the best; returns the ambiguous ones, flat [any].

        Args:
            least: the sorting key of the k-th largest lower bound: lower upper bounds do not join.
            most: that of the k-th largest upper bound: larger lower bounds join.
        """
        self._keep(sorting_keys(self._high, True)[0] >= least)
        self._ambiguous = sorting_keys(self._low, True)[0] <= most
        self.scores = torch.full_like(self._low, torch.inf)
        return self.flat[self._ambiguous]

    def set_ambiguous(self, scores: Tensor) -> None:
        """Set the exact scores of the ambiguous positions."""
        self.scores[self._ambiguous] = scores

    def bounds(self) -> tuple[Tensor, Tensor]:
        """Sorting keys of the lower and the upper bounds."""
        return sorting_keys(self._low, True)[0], sorting_keys(self._high, True)[0]

    def gradient(self, flat: Tensor, pairs: Sequence[Pair]) -> Tensor:
        """This rank's gradient at blocks [n], in any order: [n * b * b]."""
        shape, b = self._pattern.shape, self._pattern.block_size
        total = torch.zeros(len(flat), b * b, device=flat.device)
        if not len(flat):
            return total.view(-1)
        pattern = SparsePattern.from_flat(flat.cpu(), shape=shape, block_size=b)
        index = pattern._index_on(flat.device)
        like = torch.empty(pattern.values_shape, device=flat.device)
        for x, dy in pairs:
            total += grad_weight(dy.float(), x.float(), like, index).view(-1, b * b)
        return total.view(-1)

    def pooled(self, gradient: Tensor, pooling: str) -> Tensor:
        """The scores [n] of a gradient [n * b * b]."""
        # The blocks stacked, [n * b, b], are pooled to [n, 1].
        b = self._pattern.block_size
        return pool(gradient.abs().view(-1, b), pooling, b).view(-1)


def rescore_ambiguous(
    ranks: Ranks,
    layers: Sequence[RoundedScores],
    pairs: Sequence[Sequence[Pair]],
    pooling: str,
    counts: Sequence[bool],
) -> None:
    """Score the ambiguous positions of all layers; every rank calls it with its own samples.

    Args:
        ranks: with other samples for the same positions; all ranks of their mesh select together.
        counts: for each layer whether the scores of these ranks count, or are copies.
    """
    if not layers:
        return
    keys = [
        key if counted else key[:0]
        for layer, counted in zip(layers, counts, strict=True)
        for key in layer.bounds()
    ]
    most = max(layer.total for layer in layers)
    twice = [layer.k for layer in layers for _ in range(2)]
    ends, _, _ = kth_over_ranks(ranks.all_ranks, keys, twice, 32, most)
    ambiguous = [layer.narrow(*ends[2 * i : 2 * i + 2]) for i, layer in enumerate(layers)]
    # All ranks learn all ambiguous positions, and send their gradients there to the owners.
    counted = torch.tensor([len(flat) for flat in ambiguous], device=ranks.device)
    table = torch.stack(ranks.all_gather(counted, [len(layers)] * ranks.size)).tolist()
    lines = ranks.all_gather(torch.cat(ambiguous), [sum(of_rank) for of_rank in table])
    by_rank = [line.split(of_rank) for line, of_rank in zip(lines, table, strict=True)]
    areas = [layer.area for layer in layers]
    sizes = [sum(n * a for n, a in zip(of, areas, strict=True)) for of in table]
    sent = torch.zeros(sum(sizes), device=ambiguous[0].device)
    failed = DeferredError()
    with failed:
        # Rows ascend with the ranks: concatenated, the positions of a layer are in order.
        grads = [
            layer.gradient(torch.cat([of[i] for of in by_rank]), pairs[i]).split(
                [of[i] * areas[i] for of in table]
            )
            for i, layer in enumerate(layers)
        ]
        torch.cat([of[owner] for owner in range(ranks.size) for of in grads], out=sent)
    received = sizes[ranks.rank]
    got = ranks.all_to_all(sent, sizes, [received] * ranks.size).view(ranks.size, received)
    with failed:
        total = got[0].clone()
        for part in got[1:]:
            total += part
        split = [n * a for n, a in zip(table[ranks.rank], areas, strict=True)]
        for layer, part in zip(layers, total.split(split), strict=True):
            layer.set_ambiguous(layer.pooled(part, pooling))
    with collective_errors(ranks):
        failed.raise_pending()
