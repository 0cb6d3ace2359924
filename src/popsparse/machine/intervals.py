"""Runs of consecutive elements, as arrays: how regions of memory are compared and counted.

An address is an element's number in the memory of its type. A region is two int64 arrays: where
its runs start and how long they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

IntArray = np.ndarray

# Mean elements of a run.
_LONG = 1024


def expand(starts: IntArray, lengths: IntArray, step: int = 1) -> IntArray:
    """The `length` numbers start, start + step, ... of each pair, concatenated: int64."""
    before = np.cumsum(lengths) - lengths
    out = np.repeat(starts - step * before, lengths)
    ramp = np.arange(len(out), dtype=np.int64)
    out += ramp if step == 1 else step * ramp
    return out


def ranks(counts: IntArray) -> IntArray:
    """0 to count - 1 for each count, concatenated: int64."""
    return expand(np.zeros(len(counts), np.int64), counts)


def offsets_of(counts: IntArray) -> IntArray:
    """Where each of consecutive parts of these sizes begins, and where the last one ends."""
    return np.append(0, np.cumsum(counts))


class Runs(NamedTuple):
    """Consecutive elements, in the order in which a tensor lists them."""

    starts: IntArray
    lengths: IntArray

    @property
    def ends(self) -> IntArray:
        return self.starts + self.lengths

    @property
    def are_long(self) -> bool:
        """Whether there are runs, long enough that iterating over them beats going by address."""
        return int(self.lengths.sum()) >= _LONG * len(self.starts) > 0

    def addresses(self) -> IntArray:
        """Every address, in order."""
        return expand(self.starts, self.lengths)

    def join(self, *keys: IntArray) -> tuple[Runs, IntArray]:
        """Join each run to the one before it if it goes on where that ends, with equal keys.

        Returns the joined runs, and the number of the first run of each.
        """
        is_new = _mark_changes(len(self.starts), keys)
        is_new[1:] |= self.starts[1:] != self.ends[:-1]
        first = np.flatnonzero(is_new)
        lengths = np.add.reduceat(self.lengths, first) if len(first) else self.lengths
        return Runs(self.starts[first], lengths), first


def _mark_changes(count: int, columns: Iterable[IntArray]) -> np.ndarray:
    """Which of `count` entries differ from the one before in any array, bool; the first does."""
    is_new = np.zeros(count, bool)
    is_new[:1] = True
    for column in columns:
        is_new[1:] |= column[1:] != column[:-1]
    return is_new


def equal_runs(*columns: IntArray) -> Runs:
    """The runs of entries that are equal in all of these arrays of one length."""
    count = len(columns[0])
    starts = np.flatnonzero(_mark_changes(count, columns))
    return Runs(starts, np.diff(np.append(starts, count)))


class Pieces(NamedTuple):
    """Runs cut where the tile changes. `run` is the run a piece comes from; tile -1 is unmapped."""

    run: IntArray
    starts: IntArray
    lengths: IntArray
    tiles: IntArray


def _sort_unique(parts: list[IntArray]) -> IntArray:
    """The distinct values of several arrays in order. A stable sort merges presorted parts in one
    pass, which NumPy's hashing `unique` does not."""
    values = np.sort(np.concatenate(parts), kind="stable")
    return values[np.concatenate([[True], values[1:] != values[:-1]])]


class TileMap:
    """Which tile each address lives on: sorted `bounds` [k + 1] and `tiles` [k], -1 for none."""

    def __init__(self, bounds: IntArray, tiles: IntArray) -> None:
        self.bounds = bounds
        self.tiles = tiles

    @classmethod
    def from_assignments(cls, size: int, parts: list[tuple[Runs, IntArray]]) -> TileMap:
        """Create a map from runs and their tiles; where two parts overlap, the later one wins."""
        if not parts:
            return cls(np.array([0, size]), np.array([-1]))
        starts = np.concatenate([runs.starts for runs, _ in parts])
        ends = starts + np.concatenate([runs.lengths for runs, _ in parts])
        tiles = np.concatenate([np.broadcast_to(t, r.starts.shape) for r, t in parts])
        order = np.argsort(starts, kind="stable")
        apart = bool((starts[order[1:]] >= ends[order[:-1]]).all())
        bounds = _sort_unique([starts, ends, np.array([0, size])])
        owner = np.full(len(bounds) - 1, -1, np.int64)
        low, high = np.searchsorted(bounds, starts), np.searchsorted(bounds, ends)
        if apart:
            # No bound lies inside a run, so each run is exactly one segment.
            owner[low] = tiles
        else:
            for i in range(len(starts)):
                owner[low[i] : high[i]] = tiles[i]
        change = np.flatnonzero(np.diff(owner)) + 1
        keep = np.concatenate([[0], change])
        return cls(np.append(bounds[keep], size), owner[keep])

    def split(self, runs: Runs) -> Pieces:
        """The runs cut at every change of tile."""
        first = np.searchsorted(self.bounds, runs.starts, "right") - 1
        last = np.searchsorted(self.bounds, runs.ends, "left") - 1
        inside = last - first
        if not inside.any():
            return Pieces(np.arange(len(first)), runs.starts, runs.lengths, self.tiles[first])
        run = np.repeat(np.arange(len(inside)), inside + 1)
        segment = first[run] + ranks(inside + 1)
        starts = np.maximum(runs.starts[run], self.bounds[segment])
        ends = np.minimum(runs.ends[run], self.bounds[segment + 1])
        return Pieces(run, starts, ends - starts, self.tiles[segment])


def refine(a: Runs, b: Runs) -> tuple[IntArray, IntArray, IntArray]:
    """Two regions of the same size, matched element by element, as runs of both at once.

    Returns the starts in `a`, the starts in `b` and the lengths.
    """
    if len(a.lengths) == len(b.lengths) and np.array_equal(a.lengths, b.lengths):
        return a.starts, b.starts, a.lengths
    if len(b.lengths) == 1:
        return a.starts, b.starts + np.cumsum(a.lengths) - a.lengths, a.lengths
    if len(a.lengths) == 1:
        return a.starts + np.cumsum(b.lengths) - b.lengths, b.starts, b.lengths
    ends_a, ends_b = np.cumsum(a.lengths), np.cumsum(b.lengths)
    ends = _sort_unique([ends_a, ends_b])
    at = np.concatenate([[0], ends[:-1]])
    run_a = np.searchsorted(ends_a, at, "right")
    run_b = np.searchsorted(ends_b, at, "right")
    start_a = a.starts[run_a] + at - (ends_a - a.lengths)[run_a]
    start_b = b.starts[run_b] + at - (ends_b - b.lengths)[run_b]
    return start_a, start_b, ends - at


def union_lengths(
    starts: IntArray, lengths: IntArray, groups: IntArray, group_count: int
) -> IntArray:
    """How many distinct addresses the runs of each group cover: int64 [group_count]."""
    if not len(starts):
        return np.zeros(group_count, np.int64)
    span = int((starts + lengths).max()) + 1
    key = groups.astype(np.int64) * span + starts
    order = np.argsort(key, kind="stable")
    key, groups = key[order], groups[order]
    reach = np.maximum.accumulate(key + lengths[order])
    before = np.concatenate([key[:1], reach[:-1]])
    fresh = np.maximum(reach - np.maximum(key, before), 0)
    return np.bincount(groups, weights=fresh, minlength=group_count).astype(np.int64)
