"""Thresholds for growth, judged by a sample of rows and columns."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dynsparse.ops.grow.selection import select
from dynsparse.pattern import SparsePattern

# About so many rows and columns (elements) are sampled. Twice as many take five milliseconds more,
# and spare one of what the wider thresholds cost.
_SIDE = 256

NO_GUESS = -1.0, float("inf")

SampleScores = Callable[[Tensor, Tensor], Tensor]
"""From block rows [r] and block columns [c] to the scores of the blocks where they cross, [r, c]"""


def guess_thresholds(
    scores_at: SampleScores,
    pattern: SparsePattern,
    exclude: Tensor,
    k: int,
    among: tuple[int, int] | None = None,
) -> tuple[float, float]:
    """A score that a few more than `k` free positions exceed, and one that a few less do; -1 and
    infinity where a sample cannot tell.

    The first spares most of the candidates that a running threshold lets through at first, the
    second the scores of most of those who join. Scores of one row or column are alike, so how far
    the sample's count may stray is judged by how it differs from row to row and from column to
    column; four standard deviations are allowed for.

    Args:
        among: the first block row that is looked at, and the one behind the last; all of them when
            left out. `scores_at` counts from the first, and `k` is how many of these.
    """
    first, last = (0, pattern.grid[0]) if among is None else among
    height, width, b = last - first, pattern.grid[1], pattern.block_size
    # A generator of its own: the random numbers of the training stay what they were.
    generator = torch.Generator().manual_seed(0)
    sides = [min(size, max(1, _SIDE // b)) for size in (height, width)]
    rows, cols = (
        torch.randperm(size, generator=generator)[:side].sort().values
        for size, side in zip((height, width), sides, strict=True)
    )
    scores = scores_at(rows, cols)
    taken_rows, taken_cols = _taken(pattern, exclude, rows + first, cols)
    scores[taken_rows.to(scores.device), taken_cols.to(scores.device)] = -1.0

    count = scores.numel()
    expected = count * k / (height * width)
    above = scores >= _of_rank(scores, int(expected))
    spread = sum(
        float(above.sum(axis).double().var(correction=0)) * side * (1 - side / size)
        for axis, side, size in zip((1, 0), sides, (height, width), strict=True)
    )
    margin = 4 * spread**0.5 + 4
    least, most = int(expected + margin), int(expected - margin)
    if least >= count:
        return NO_GUESS
    low = _of_rank(scores, least)
    # Scores of exactly zero tie by the thousand: they must stay within reach.
    if low <= 0:
        return NO_GUESS
    return low, _of_rank(scores, most) if most > 0 else float("inf")


def _of_rank(scores: Tensor, rank: int) -> float:
    """The score that `rank` others are at least as large as."""
    flat = scores.view(-1)
    return float(flat[select(flat, min(rank + 1, len(flat)))].min())


def _taken(
    pattern: SparsePattern, exclude: Tensor, rows: Tensor, cols: Tensor
) -> tuple[Tensor, Tensor]:
    """Which crossings of `rows` and `cols` are not free, as places in `rows` and in `cols`."""
    height, width = pattern.grid
    begin, end = pattern.row_ptr[rows], pattern.row_ptr[rows + 1]
    lengths = end - begin
    # A tenth of a million numbers of 4 bytes each: memory that is fetched anew takes the longest.
    held = torch.arange(len(rows), dtype=torch.int32).repeat_interleave(lengths)
    before = lengths.cumsum(0, dtype=torch.int32) - lengths
    slots = (begin - before).index_select(0, held)
    slots += torch.arange(len(held), dtype=torch.int32)
    place_of_col = torch.full((width,), -1, dtype=torch.int32)
    place_of_col[cols] = torch.arange(len(cols), dtype=torch.int32)
    places = place_of_col.index_select(0, pattern.sorted_cols.index_select(0, slots))
    sampled = (places >= 0).nonzero().flatten()
    held, places = held[sampled].long(), places[sampled].long()
    if len(exclude):
        place_of_row = torch.full((height,), -1)
        place_of_row[rows] = torch.arange(len(rows))
        also_rows, also_cols = place_of_row[exclude // width], place_of_col[exclude % width]
        sampled = (also_rows >= 0) & (also_cols >= 0)
        held = torch.cat([held, also_rows[sampled]])
        places = torch.cat([places, also_cols[sampled]])
    return held, places
