"""Search for the best free positions in block rows of a layer, chunk by chunk of the gradient.

A threshold from a sample and, for large layers of single elements, a screening in 16-bit integers
skip most of the work. Growth in one process and over ranks share this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dynsparse._core import native
from dynsparse.ops.conv.patches import are_patches
from dynsparse.ops.grow.free_positions import positions_in_rows
from dynsparse.ops.grow.scores import Pair, Scorer
from dynsparse.ops.grow.selection import select
from dynsparse.ops.linear.cpu import dot_products
from dynsparse.pattern import SparsePattern
from dynsparse.pattern.index_arrays import empty


@dataclass(frozen=True)
class Candidates:
    """Positions that may be among the best, int64, ascending; some of them without scores.

    Attributes:
        scores, flat: [any] each, of positions with scores.
        sure: [any], positions without scores, which join before all others unless more positions
            are `above` than join.
        above: number of positions that are sure, or whose score exceeds the upper threshold.
    """

    scores: Tensor
    flat: Tensor
    sure: Tensor
    above: int

    @classmethod
    def from_scores(cls, scores: Tensor, flat: Tensor) -> Candidates:
        """Make candidates that all have scores."""
        return cls(scores, flat, flat[:0], 0)

    @property
    def count(self) -> int:
        """Number of positions."""
        return len(self.flat) + len(self.sure)


# Large enough to keep the matrix product efficient, small enough to stay in the last-level cache.
CHUNK_BYTES = 8 << 20

# A threshold is guessed from a sample if the matrix has more than so many chunks.
_SAMPLE_FROM = 2


class RowSearch:
    """Searches the gradient of the block rows [first, last), chunk by chunk.

    Args:
        pairs: (x [batch, in], dY [batch, outputs of these rows]) of every micro-batch.
        pattern: the pattern of the full layer; its positions are not free.
        pooling: see `topk_outside`.
        dtype: the dtype in which the gradient is added up.
        first, last: block rows; default to all.
    """

    def __init__(
        self,
        pairs: Sequence[Pair],
        pattern: SparsePattern,
        pooling: str,
        dtype: torch.dtype,
        first: int = 0,
        last: int | None = None,
    ) -> None:
        self._pairs, self._pattern = pairs, pattern
        self._first, self._last = first, pattern.grid[0] if last is None else last
        self._rows = held = max(1, min(_chunk_rows(pattern, dtype), self._last - first))
        self._scorer = Scorer(pairs, pattern.block_size, pooling, dtype, held)

    @staticmethod
    def is_long(pattern: SparsePattern, dtype: torch.dtype) -> bool:
        """Whether `guess` saves time for a layer with this pattern."""
        return pattern.grid[0] > _SAMPLE_FROM * _chunk_rows(pattern, dtype)

    def guess(self, k: int) -> tuple[float, float]:
        """Guess a lower and an upper threshold, see `guess_thresholds`, for `k` positions."""
        if are_patches(*self._pairs[0]):
            return NO_GUESS
        rows = self._first, self._last
        return guess_thresholds(self._scorer.score_submatrix, self._pattern, k, rows)

    def find_best(self, k: int, low: float, high: float = torch.inf) -> Candidates:
        """Return the `k` best of the positions whose scores exceed `low`, or all of these.

        If at most `k` scores exceed `high`, positions that clearly do are returned without scores.
        """
        if low > 0 and self._pattern.block_size == 1 and self._scorer.is_compiled:
            candidates = self._screen(k, low, high)
            if candidates is not None:
                return candidates
        scorer, width = self._scorer, self._pattern.grid[1]
        best = RunningBest(k, self._rows * width, low, scorer.dtype, scorer.device)
        for begin in range(self._first, self._last, self._rows):
            end = min(begin + self._rows, self._last)
            chunk = scorer.score_rows(begin - self._first, end - self._first)
            best.add(chunk, self._pattern, begin)
        best.compact()
        return Candidates.from_scores(best.scores[: best.count], best.flat[: best.count])

    def _screen(self, k: int, low: float, high: float) -> Candidates | None:
        """Do the same as `find_best` by screening; return None where that is not faster."""
        if not can_screen(self._pairs, low):
            return None
        screened = screen_positions(self._pairs, self._pattern, k, low, high, self._first)
        if screened is None:
            return None
        scores, flat, sure = screened
        above = len(sure) + (int((scores > high).sum()) if len(sure) else 0)
        keep = select(scores, min(max(k - len(sure), 0), int((scores > low).sum())))
        return Candidates(scores[keep], flat[keep], sure, above)


def _chunk_rows(pattern: SparsePattern, dtype: torch.dtype) -> int:
    """Return the number of block rows of a chunk."""
    return max(1, CHUNK_BYTES // (pattern.shape[1] * pattern.block_size * dtype.itemsize))


# ---- the best so far ----


class RunningBest:
    """The best `k` free positions so far, in order of position, with room for one more chunk.

    Args:
        k: number of positions.
        chunk: upper bound of the scores in one call of `add`.
        threshold: scores up to it are skipped.
    """

    def __init__(
        self,
        k: int,
        chunk: int,
        threshold: float,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.k = k
        self.scores = empty(k + chunk, dtype=dtype, device=device)
        self.flat = empty(k + chunk, dtype=torch.int64, device=device)
        self.count = 0
        self.threshold = threshold
        on_cpu = device.type == "cpu" and dtype == torch.float32
        self._is_compiled = on_cpu and native.load() is not None

    def add(self, scores: Tensor, pattern: SparsePattern, first: int) -> None:
        """Add the scores [rows, in/b] of the block rows from `first` on, which are overwritten.

        Positions of the pattern are skipped. Signs do not matter.
        """
        # A score equal to the threshold is skipped: equal scores at smaller positions come first.
        offset = first * pattern.grid[1]
        if not self._is_compiled:
            flat = scores.view(-1).abs_()
            flat[positions_in_rows(pattern, first, first + len(scores)).to(scores.device)] = -1.0
            self._scan(flat, offset)
        else:
            self._scan_compiled(scores, pattern, first, offset)

    def _scan(self, scores: Tensor, offset: int) -> None:
        above = (scores > self.threshold).nonzero().flatten()
        if self.count + len(above) > len(self.scores):
            self._make_room()
            above = above[scores[above] > self.threshold]
        end = self.count + len(above)
        torch.index_select(scores, 0, above, out=self.scores[self.count : end])
        torch.add(above, offset, out=self.flat[self.count : end])
        self.count = end

    def _scan_compiled(
        self, scores: Tensor, pattern: SparsePattern, first: int, offset: int
    ) -> None:
        rows, width = scores.shape
        while True:
            room = len(self.scores) - self.count
            count = native.call(
                "dynsparse_grow_scan",
                *(scores, rows, width, pattern.row_ptr[first:], pattern.sorted_cols),
                *(self.threshold, self.k, offset, self.scores[self.count :]),
                *(self.flat[self.count :], room, torch.get_num_threads()),
            )
            if count < 0:
                raise MemoryError("no memory for a scan of growth scores")
            if count <= room:
                break
            self._make_room()
        self.count += count

    def _make_room(self) -> None:
        """Keep only the best `k`, and raise the threshold to the last of them."""
        self.compact()
        self.threshold = float(self.scores[: self.k].min())

    def compact(self) -> None:
        """Keep only the best `k`."""
        if self.count > self.k and self._is_compiled:
            threads = torch.get_num_threads()
            if native.call(
                "dynsparse_grow_compact", self.scores, self.flat, self.count, self.k, threads
            ):
                raise MemoryError("no memory to select the best of many scores")
        elif self.count > self.k:
            keep = select(self.scores[: self.count], self.k)
            self.scores[: self.k] = self.scores[keep]
            self.flat[: self.k] = self.flat[keep]
        self.count = min(self.count, self.k)


# ---- thresholds from a sample ----

# About so many rows and columns (elements) are sampled. Twice as many take five milliseconds more
# and save one.
_SIDE = 256

NO_GUESS = -1.0, float("inf")

SampleScores = Callable[[Tensor, Tensor], Tensor]
"""(block rows [r], block columns [c]) -> scores of that submatrix, [r, c]"""


def guess_thresholds(
    scores_at: SampleScores,
    pattern: SparsePattern,
    k: int,
    among: tuple[int, int] | None = None,
) -> tuple[float, float]:
    """Guess two thresholds from a sample of the scores.

    A few more than `k` free positions should exceed the lower one, and a few less the upper one.
    The first saves most of the candidates that a running threshold starts with, the second the
    scores of most positions that join. Scores of one row or column are correlated, so the error of
    the sample's count is estimated from its variance over rows and over columns; the margin is four
    standard deviations.

    Args:
        among: block rows [first, last) of the search; defaults to all. `scores_at` counts rows from
            `first`, and `k` is the number of positions in these rows.

    Returns:
        (lower, upper); `NO_GUESS`, which is -1 and infinity, if the sample is too small.
    """
    first, last = (0, pattern.grid[0]) if among is None else among
    height, width, b = last - first, pattern.grid[1], pattern.block_size
    # A separate generator, so that the random numbers of the training do not change.
    generator = torch.Generator().manual_seed(0)
    sides = [min(size, max(1, _SIDE // b)) for size in (height, width)]
    rows, cols = (
        torch.randperm(size, generator=generator, device="cpu")[:side].sort().values
        for size, side in zip((height, width), sides, strict=True)
    )
    scores = scores_at(rows, cols)
    taken_rows, taken_cols = _find_taken(pattern, rows + first, cols)
    scores[taken_rows.to(scores.device), taken_cols.to(scores.device)] = -1.0

    count = scores.numel()
    expected = count * k / (height * width)
    above = scores >= _score_at_rank(scores, int(expected))
    spread = sum(
        float(above.sum(axis).double().var(correction=0)) * side * (1 - side / size)
        for axis, side, size in zip((1, 0), sides, (height, width), strict=True)
    )
    margin = 4 * spread**0.5 + 4
    least, most = int(expected + margin), int(expected - margin)
    if least >= count:
        return NO_GUESS
    low = _score_at_rank(scores, least)
    # Thousands of scores may be exactly zero: they must stay candidates.
    if low <= 0:
        return NO_GUESS
    return low, _score_at_rank(scores, most) if most > 0 else float("inf")


def _score_at_rank(scores: Tensor, rank: int) -> float:
    """Return the score that `rank` others reach or exceed."""
    flat = scores.view(-1)
    return float(flat[select(flat, min(rank + 1, len(flat)))].min())


def _find_taken(pattern: SparsePattern, rows: Tensor, cols: Tensor) -> tuple[Tensor, Tensor]:
    """Return the entries of the submatrix `rows` x `cols` that are not free: rows and columns."""
    begin, end = pattern.row_ptr[rows], pattern.row_ptr[rows + 1]
    lengths = end - begin
    # int32: allocating fresh memory takes the longest.
    row_of = torch.arange(len(rows), dtype=torch.int32, device="cpu").repeat_interleave(lengths)
    before = lengths.cumsum(0, dtype=torch.int32) - lengths
    slots = (begin - before).index_select(0, row_of)
    slots += torch.arange(len(row_of), dtype=torch.int32, device="cpu")
    index_of_col = torch.full((pattern.grid[1],), -1, dtype=torch.int32, device="cpu")
    index_of_col[cols] = torch.arange(len(cols), dtype=torch.int32, device="cpu")
    col_of = index_of_col.index_select(0, pattern.sorted_cols.index_select(0, slots))
    sampled = (col_of >= 0).nonzero().flatten()
    return row_of[sampled].long(), col_of[sampled].long()


# ---- screening in 16-bit integers ----

# Multiply-adds of the gradient below which screening costs more than it saves.
_WORTHWHILE = 1 << 28

# Scores for at most twice the positions that are searched for, and for this share of all: beyond,
# float32 is as fast.
_MOST = 1 / 8

# Within these bounds nothing overflows, and underflow in products and squares stays below a
# thousandth of the threshold.
_LARGEST = 1e15
_UNDERFLOW = 1e-15


def can_screen(pairs: Sequence[Pair], threshold: float) -> bool:
    """Whether screening is faster on this processor and its error bound holds for the numbers."""
    library = native.load()
    if library is None or not library.dynsparse_grow_screens() or threshold <= 0:
        return False
    tensors = [tensor for pair in pairs for tensor in pair]
    samples = sum(len(x) for x, _ in pairs)
    if samples * pairs[0][0].shape[1] * pairs[0][1].shape[1] < _WORTHWHILE:
        return False
    if any(t.dtype != torch.float32 for t in tensors):
        return False
    largest = max(float(torch.stack(t.aminmax()).abs().max()) for t in tensors if len(t))
    return largest < _LARGEST and threshold > _UNDERFLOW * samples * largest


def screen_positions(
    pairs: Sequence[Pair],
    pattern: SparsePattern,
    k: int,
    low: float,
    high: float,
    offset: int = 0,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Find all free positions whose gradient exceeds `low` in magnitude, and some more.

    Most of the gradient is computed in products of 16-bit integers only, in half of the time that
    float32 takes, and only compared with two bounds, since the error of the products is bounded.
    This excludes most positions and includes most others; the gradient of those in between is
    computed in float32.

    Args:
        pairs: (x [batch, in], dY [batch, rows]) float32 on the CPU.
        pattern: a pattern of single elements; its positions are not free.
        k: number of positions searched for.
        low, high: 0 < low <= high. Positions that certainly exceed `high` are returned without
            scores; with infinity all have scores.
        offset: the row of the pattern at which dY begins.

    Returns:
        Float32 scores [any] and their positions, int64 [any], and positions without scores, int64
        [any]; both ascend. None if too many positions need float32 to be faster.
    """
    x, dy = (
        parts[0] if len(parts) == 1 else torch.cat(parts) for parts in zip(*pairs, strict=True)
    )
    height, width = dy.shape[1], pattern.shape[1]
    room = min(2 * k + (1 << 12), int(_MOST * height * width))
    counts = torch.zeros(height + 1, dtype=torch.int32, device="cpu")
    cols = empty(room, dtype=torch.int32, brief=True)
    sure = empty(0 if high == torch.inf else min(k, height * width), dtype=torch.int64, brief=True)
    numbers = torch.zeros(2, dtype=torch.int64, device="cpu")
    status = native.call(
        "dynsparse_grow_screen",
        *(x, *x.stride(), dy, *dy.stride(), len(x), height, width),
        *(pattern.row_ptr[offset:], pattern.sorted_cols),
        *(0.999 * low, 1.001 * high, counts[1:], cols, room, sure, len(sure), numbers),
        torch.get_num_threads(),
    )
    if status == 1:
        raise MemoryError("no memory to look for the largest gradients")
    if status:
        return None
    scored, unscored = numbers.tolist()
    cols, sure = cols[:scored], sure[:unscored].add_(offset * width)
    row_ptr = counts.cumsum(0, dtype=torch.int32)
    scores = dot_products(dy, x, row_ptr, cols).abs_()
    starts = torch.arange(offset, offset + height, device="cpu") * width
    flat = starts.repeat_interleave(counts[1:], output_size=scored).add_(cols)
    return scores, flat, sure
