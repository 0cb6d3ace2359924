"""Moving rows that do not fit a bucket to buckets that have room.

Full buckets give up rows from the end, the shortest first. These rows go to buckets with room:
first among the partners of the same (x, y) rectangle (Z), then of the same x (Y and Z), then
everywhere; in each range first whole rows, then rows cut in two. Buckets are tried against the
direction in which the propagation phase moves them, so that spilled data is used soonest.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from popsparse.encoding.buckets import Assignment, BucketLayout, Runs
from popsparse.planning.options import Options


class BucketOverflowError(ValueError):
    """The non-zeros do not fit the buckets, even after spilling.

    Attributes:
        left: blocks that found no room.
        growth: factor by which the buckets would have to grow, as far as known.
    """

    def __init__(self, message: str, left: int, growth: float) -> None:
        super().__init__(message)
        self.left, self.growth = left, growth


@dataclass
class _Overflow:
    """Rows of one bucket without a place; the longest first."""

    row: np.ndarray
    start: np.ndarray
    length: np.ndarray

    def __post_init__(self) -> None:
        self.total = np.cumsum(self.length)

    @property
    def nz(self) -> int:
        return int(self.total[-1]) if len(self.total) else 0


class _Move(NamedTuple):
    """Rows that went from one bucket's overflow to another bucket."""

    source: int
    target: int
    row: np.ndarray
    start: np.ndarray
    length: np.ndarray


@dataclass
class _Balancer:
    layout: BucketLayout
    limit: np.ndarray
    actual_workers: bool
    words: np.ndarray
    nz: np.ndarray
    pending: dict[int, _Overflow]
    moves: list[_Move] = field(default_factory=list)

    def cost(self, rows: np.ndarray | int, nz: np.ndarray | int) -> np.ndarray | int:
        return self.layout.sub_group_words(rows, nz, self.actual_workers)

    def free_space(self, bucket: np.ndarray | int) -> tuple[np.ndarray, np.ndarray]:
        room = self.layout.meta_info_words - 1
        return room - self.words[bucket], self.limit[bucket] - self.nz[bucket]

    def rebalance(self, span: int, cut_rows: bool, speed: bool, force: bool) -> None:
        """Place pending rows inside ranges of `span` buckets, the largest overflow first."""

        def largest(bucket: int) -> tuple[int, int, int, int]:
            rest = self.pending[bucket]
            return (bucket // span, -int(self.cost(len(rest.row), rest.nz)), -rest.nz, bucket)

        for bucket in sorted(self.pending, key=largest):
            base = bucket // span * span
            ring = np.arange(span)
            if force:
                order = base + (bucket - base + ring[1:]) % span
            elif speed:
                order = base + (bucket - base - ring) % span
            else:
                inside = slice(base, base + span)
                order = base + np.lexsort((self.nz[inside], self.words[inside]))
            self.place(bucket, order, cut_rows)
            if not len(self.pending[bucket].row):
                del self.pending[bucket]

    def place(self, source: int, order: np.ndarray, cut_rows: bool) -> None:
        """Move as much of `source`'s overflow as fits into the buckets of `order`, in turn."""
        while len(order) and len(self.pending[source].row):
            first = 1 if cut_rows else int(self.pending[source].length[0])
            words, nz = self.free_space(order)
            fits = (words >= self.cost(1, first)) & (nz >= first)
            at = int(fits.argmax())
            if not fits[at]:
                return
            self.move(source, int(order[at]), cut_rows)
            order = order[at + 1 :]

    def move(self, source: int, target: int, cut_rows: bool) -> None:
        rest = self.pending[source]
        words, nz = (int(free) for free in self.free_space(target))
        costs = self.cost(np.arange(1, len(rest.row) + 1), rest.total)
        full = int(min(np.searchsorted(costs, words, "right"),
                        np.searchsorted(rest.total, nz, "right")))  # fmt: skip
        row, start, length = rest.row[:full], rest.start[:full], rest.length[:full]
        placed = int(length.sum())
        tail_start, tail_length = rest.start[full:], rest.length[full:]
        if cut_rows and full < len(rest.row):
            part = min(nz - placed, words - int(self.cost(full + 1, placed)))
            while part > 0 and int(self.cost(full + 1, placed + part)) > words:
                part -= 1
            if part > 0:
                # The end of the row moves; its beginning waits for the next bucket.
                tail_length = tail_length.copy()
                tail_length[0] -= part
                row = rest.row[: full + 1]
                start = np.append(start, tail_start[0] + tail_length[0])
                length = np.append(length, part)
                placed += part
        self.moves.append(_Move(source, target, row, start, length))
        self.words[target] += int(self.cost(len(row), placed))
        self.nz[target] += placed
        self.pending[source] = _Overflow(rest.row[full:], tail_start, tail_length)


def spill(
    assignment: Assignment,
    layout: BucketLayout,
    limit: np.ndarray,
    options: Options,
) -> tuple[Runs, np.ndarray, np.ndarray]:
    """Move rows between buckets until every bucket fits.

    Args:
        assignment: rows in the buckets they start in.
        limit: blocks each bucket may hold, int64 [buckets].
        options: `optimise_for_speed` tries buckets in the order the propagation phase meets them,
            otherwise the emptiest first; `force_bucket_spills` empties every bucket into others,
            those of the same x last; `use_actual_worker_split_costs` counts only the workers a
            sub-group uses (`BucketLayout.sub_group_words`).

    Returns:
        All rows, the bucket each ended up in and its arrival there: see `SubGroups.collect`.

    Raises:
        BucketOverflowError: some rows found no room.
    """
    runs = assignment.runs
    buckets = layout.buckets
    force, actual_workers = options.force_bucket_spills, options.use_actual_worker_split_costs
    first = np.searchsorted(runs.piece, np.arange(buckets))
    before_nz = np.cumsum(runs.length)
    nz = before_nz - (before_nz - runs.length)[first[runs.piece]]
    rows = np.arange(len(runs)) - first[runs.piece] + 1
    words = np.asarray(layout.sub_group_words(rows, nz, actual_workers))
    # Costs rise along a piece, so the part that fits is its beginning.
    stays = (words <= layout.meta_info_words - 1) & (nz <= limit[runs.piece]) & (not force)
    if stays.all():
        return runs, runs.piece, np.zeros(len(runs), np.int64)
    stay = runs[stays]
    spilled = runs[~stays]
    last = np.flatnonzero(stays)
    last = last[np.append(stay.piece[1:] != stay.piece[:-1], True)] if len(last) else last
    used_words, used_nz = np.zeros(buckets, np.int64), np.zeros(buckets, np.int64)
    used_words[runs.piece[last]], used_nz[runs.piece[last]] = words[last], nz[last]
    balancer = _Balancer(layout, limit, actual_workers, used_words, used_nz, {})
    sources, at = np.unique(spilled.piece, return_index=True)
    for source, begin, end in zip(sources, at, [*at[1:], len(spilled)], strict=True):
        part = slice(begin, end)
        balancer.pending[int(source)] = _Overflow(
            spilled.row[part], spilled.start[part], spilled.length[part]
        )
    parts_z = layout.partition[2]
    spans = [parts_z, parts_z * layout.partition[1], buckets]
    if force:
        spans[1:] = spans[:0:-1]
    for span in spans:
        for cut_rows in (False, True):
            balancer.rebalance(span, cut_rows, options.optimise_for_speed, force)
    if balancer.pending:
        raise _overflow_error(balancer, int(runs.length.sum()), force)
    return _join(stay, balancer.moves)


def _join(kept: Runs, moves: list[_Move]) -> tuple[Runs, np.ndarray, np.ndarray]:
    """Join the rows that stayed and those that moved."""
    sizes = [len(move.row) for move in moves]
    runs = Runs(
        np.concatenate([kept.piece, np.repeat([move.source for move in moves], sizes)]),
        np.concatenate([kept.row, *(move.row for move in moves)]),
        np.concatenate([kept.start, *(move.start for move in moves)]),
        np.concatenate([kept.length, *(move.length for move in moves)]),
    )
    bucket = np.concatenate([kept.piece, np.repeat([move.target for move in moves], sizes)])
    arrival = np.repeat(np.arange(len(moves) + 1), [len(kept), *sizes])
    return runs, bucket, arrival


def _overflow_error(balancer: _Balancer, total: int, force: bool) -> BucketOverflowError:
    layout, pending = balancer.layout, balancer.pending
    left = sum(rest.nz for rest in pending.values())
    words = sum(int(balancer.cost(len(rest.row), rest.nz)) for rest in pending.values())
    room = layout.buckets * (layout.meta_info_words - 1)
    need_nz = total / max(layout.buckets * layout.capacity, 1)
    need_words = (int(balancer.words.sum()) + words) / room
    # Even if the sums fit, a bucket must have room for a row of one non-zero.
    growth = max(need_nz, need_words, 1.0) * 1.05
    word_growth = float(balancer.cost(1, 1)) / max(layout.meta_info_words - 1, 1)
    growth = max(growth, word_growth)
    unit = "non-zeros" if layout.element_format else "blocks"
    why = " (with forced spills nothing may stay in its own bucket)" if force else ""
    return BucketOverflowError(
        f"buckets overflow: {left} of {total} {unit}, from {len(pending)} of {layout.buckets} "
        f"buckets, found no room after spilling{why}; they need {words} words of meta-info and "
        f"{left * layout.area} values, all buckets together hold {room} words and "
        f"{layout.buckets * layout.capacity * layout.area} values, {int(balancer.words.sum())} and "
        f"{int(balancer.nz.sum()) * layout.area} of them taken",
        left,
        growth,
    )
