"""The best free positions in some block rows of a layer: what growth alone and over ranks share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dynsparse.ops.grow import screen
from dynsparse.ops.grow.best import Best
from dynsparse.ops.grow.scores import Pair, Scorer
from dynsparse.ops.grow.selection import select
from dynsparse.ops.grow.threshold import guess_threshold
from dynsparse.pattern import SparsePattern

__all__ = ["RowSearch"]

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

    def guess(self, k: int) -> float:
        """A score that a few more than `k` positions exceed, probably; -1: it cannot be told."""
        rows = self._first, self._last
        return guess_threshold(self._scorer.sample, self._pattern, self._exclude, k, rows)

    def best(self, k: int, threshold: float) -> tuple[Tensor, Tensor]:
        """The `k` best of the positions whose scores exceed the threshold; fewer, where fewer do.

        Scores [any] and flat positions in the whole layer, int64 [any], in order of position.
        """
        scorer, width = self._scorer, self._pattern.grid[1]
        if threshold > 0 and self._pattern.block_size == 1 and scorer.library is not None:
            found = self._screened(threshold)
            if found is not None:
                flat, scores = found
                keep = select(scores, min(k, int((scores > threshold).sum())))
                return scores[keep], flat[keep]
        best = Best(k, self._rows * width, threshold, scorer.dtype, scorer.device, scorer.library)
        for begin in range(self._first, self._last, self._rows):
            end = min(begin + self._rows, self._last)
            chunk = scorer.chunk(begin - self._first, end - self._first)
            best.add(chunk, self._pattern, self._exclude, begin)
        best.compact()
        return best.scores[: best.count], best.flat[: best.count]

    def _screened(self, threshold: float) -> tuple[Tensor, Tensor] | None:
        if not screen.serves(self._pairs, threshold):
            return None
        return screen.candidates(self._pairs, self._pattern, self._exclude, threshold, self._first)


def _rows(pattern: SparsePattern, dtype: torch.dtype) -> int:
    """Block rows whose gradient is a chunk."""
    return max(1, CHUNK_BYTES // (pattern.shape[1] * pattern.block_size * dtype.itemsize))
