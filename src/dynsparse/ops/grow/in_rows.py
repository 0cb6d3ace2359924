"""The best free positions in some block rows of a layer: what growth alone and over ranks share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dynsparse.ops.conv.patches import are_patches
from dynsparse.ops.grow import screen
from dynsparse.ops.grow.best import Best
from dynsparse.ops.grow.scores import Pair, Scorer
from dynsparse.ops.grow.selection import select
from dynsparse.ops.grow.threshold import NO_GUESS, guess_thresholds
from dynsparse.pattern import SparsePattern


@dataclass(frozen=True)
class Found:
    """Positions that may be among the best, int64, ascending, of which some need no scores.

    Attributes:
        scores, flat: [any] each, of those that are ranked.
        sure: [any]: these join before all others, if no more than join are `above`.
        above: how many are sure, or rank above where these begin.
    """

    scores: Tensor
    flat: Tensor
    sure: Tensor
    above: int

    @classmethod
    def of(cls, scores: Tensor, flat: Tensor) -> Found:
        """All of them ranked."""
        return cls(scores, flat, flat[:0], 0)

    @property
    def count(self) -> int:
        """How many positions there are."""
        return len(self.flat) + len(self.sure)


# Large enough to keep the matrix product efficient, small enough to stay in the last-level cache.
CHUNK_BYTES = 8 << 20

# The threshold is guessed from a sample where the matrix has more than so many chunks.
_SAMPLE_FROM = 2


class RowSearch:
    """Looks through the gradient of block rows [first, last), chunk by chunk.

    Args:
        pairs: (x [batch, in], dY [batch, outputs of these rows]) of every micro-batch.
        pattern: of the whole layer; its positions are not free.
        exclude: further positions that are not: int64 [any], sorted.
        pooling: see `topk_outside`.
        dtype: in which the gradient is added up.
        first, last: block rows; all of them when left out.
    """

    def __init__(
        self,
        pairs: Sequence[Pair],
        pattern: SparsePattern,
        exclude: Tensor,
        pooling: str,
        dtype: torch.dtype,
        first: int = 0,
        last: int | None = None,
    ) -> None:
        self._pairs, self._pattern, self._exclude = pairs, pattern, exclude
        self._first, self._last = first, pattern.grid[0] if last is None else last
        self._rows = _rows(pattern, dtype)
        held = min(self._rows, self._last - first)
        self._scorer = Scorer(pairs, pattern.block_size, pooling, dtype, held)

    @staticmethod
    def is_long(pattern: SparsePattern, dtype: torch.dtype) -> bool:
        """Whether a guess pays for a layer with this pattern."""
        return pattern.grid[0] > _SAMPLE_FROM * _rows(pattern, dtype)

    def guess(self, k: int) -> tuple[float, float]:
        """Scores that a few more and a few less than `k` positions exceed, probably; -1 and
        infinity: it cannot be told."""
        if are_patches(*self._pairs[0]):
            return NO_GUESS
        rows = self._first, self._last
        return guess_thresholds(self._scorer.sample, self._pattern, self._exclude, k, rows)

    def best(self, k: int, low: float, high: float = torch.inf) -> Found:
        """The `k` best of the positions whose scores exceed `low`; fewer, where fewer do.

        Where no more than `k` exceed `high`, those that do so by far need no scores.
        """
        if low > 0 and self._pattern.block_size == 1 and self._scorer.library is not None:
            found = self._screened(k, low, high)
            if found is not None:
                return found
        scorer, width = self._scorer, self._pattern.grid[1]
        best = Best(k, self._rows * width, low, scorer.dtype, scorer.device, scorer.library)
        for begin in range(self._first, self._last, self._rows):
            end = min(begin + self._rows, self._last)
            chunk = scorer.chunk(begin - self._first, end - self._first)
            best.add(chunk, self._pattern, self._exclude, begin)
        best.compact()
        return Found.of(best.scores[: best.count], best.flat[: best.count])

    def _screened(self, k: int, low: float, high: float) -> Found | None:
        """As `best`; None where that does not pay."""
        if not screen.serves(self._pairs, low):
            return None
        found = screen.screened(
            self._pairs, self._pattern, self._exclude, k, low, high, self._first
        )
        if found is None:
            return None
        scores, flat, sure = found
        above = len(sure) + (int((scores > high).sum()) if len(sure) else 0)
        keep = select(scores, min(max(k - len(sure), 0), int((scores > low).sum())))
        return Found(scores[keep], flat[keep], sure, above)


def _rows(pattern: SparsePattern, dtype: torch.dtype) -> int:
    """Block rows whose gradient is a chunk."""
    return max(1, CHUNK_BYTES // (pattern.shape[1] * pattern.block_size * dtype.itemsize))
