"""Which bucket each non-zero starts in, before anything spills.

X and Y are cut into equal chunks of blocks. The blocks of a rectangle, in row-major order, are cut
into one contiguous piece for each of its Z partners; a piece's rows are kept in order of decreasing
length, so that what is trimmed from the end is short (sections 3 and 4 of the PopSparse note).
All of it is sorting and running sums over arrays: no loop over buckets or rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from popsparse.encoding.block_lists import stable_order
from popsparse.encoding.layout import BucketLayout


def expand(starts: np.ndarray, lengths: np.ndarray, step: int = 1) -> np.ndarray:
    """start, start + step, ... (length of them) for each pair, one after the other: int64."""
    before = np.cumsum(lengths) - lengths
    out = np.repeat(starts - step * before, lengths)
    ramp = np.arange(len(out), dtype=np.int64)
    out += ramp if step == 1 else step * ramp
    return out


@dataclass(frozen=True)
class Runs:
    """Rows of pieces: `length` consecutive blocks of one row of one rectangle. int64 [runs].

    `piece` is the bucket the run starts in, `row` the block row inside the rectangle, `start` where
    its blocks begin in the order of `Assignment`.
    """

    piece: np.ndarray
    row: np.ndarray
    start: np.ndarray
    length: np.ndarray

    def __getitem__(self, at: np.ndarray) -> Runs:
        return Runs(self.piece[at], self.row[at], self.start[at], self.length[at])

    def __len__(self) -> int:
        return len(self.piece)


@dataclass(frozen=True)
class Assignment:
    """Blocks in order of rectangles: `order` [nnz] gives their slots in the pattern, `col` [nnz]
    their block column inside the rectangle; `runs` are sorted by (bucket, decreasing length, row).
    """

    order: np.ndarray
    col: np.ndarray
    runs: Runs


def _piece_bounds(counts: np.ndarray, pieces: int) -> np.ndarray:
    """Where each piece starts, [rectangles * pieces + 1].

    A rectangle of T blocks makes ceil(T / ceil(T / pieces)) equal pieces and leaves the rest empty.
    """
    chunk = np.maximum(-(-counts // pieces), 1)
    used = np.maximum(-(-counts // chunk), 1)
    index = np.minimum(np.arange(pieces)[None, :], used[:, None])
    cuts = index * counts[:, None] // used[:, None]
    starts = (np.cumsum(counts) - counts)[:, None] + cuts
    return np.append(starts.ravel(), counts.sum())


def assign(rows: np.ndarray, cols: np.ndarray, layout: BucketLayout) -> Assignment:
    """Assign blocks to buckets.

    Args:
        rows, cols: block coordinates, integers [nnz], sorted row-major, distinct, in range.
        layout: how the matrix is cut.
    """
    part_x, part_y, _ = layout.part
    parts_y, parts_z = layout.partition[1:]
    rectangle = rows // part_x * parts_y
    if parts_y > 1:
        rectangle = rectangle + cols // part_y
        order = stable_order(rectangle)
        rows, cols = rows[order], cols[order]
        col = cols % part_y
    else:
        order, col = np.arange(len(rows), dtype=np.int64), cols
    bounds = _piece_bounds(np.bincount(rectangle, minlength=layout.rectangles), parts_z)
    first = np.zeros(len(rows), bool)
    first[bounds[bounds < len(rows)]] = True
    first[1:] |= rows[1:] != rows[:-1]
    start = np.flatnonzero(first)
    length = np.diff(np.append(start, len(rows)))
    piece = np.searchsorted(bounds, start, side="right") - 1
    runs = Runs(piece, rows[start].astype(np.int64) % part_x, start, length)
    if len(runs):
        by_length = stable_order(length.max() - length)
        runs = runs[by_length[stable_order(piece[by_length])]]
    return Assignment(order, col, runs)
