"""How a known pattern is cut: bands of columns, tiles for each, columns of the dense operand."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

_LEAST_SHARE = 0.1  # Of the mean count; rows and columns with no more are set apart.


class Interval(NamedTuple):
    begin: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.begin


class Bands(NamedTuple):
    """Column bands: bounds [bands + 1] in (permuted) block columns, blocks of each, and the most
    non-empty columns of one."""

    bounds: np.ndarray
    blocks: tuple[int, ...]
    widest: int


def kept_first(counts: np.ndarray, preprocess: bool) -> tuple[np.ndarray, int]:
    """An order of rows (or columns) with those worth planning for first, and how many they are.

    Kept are those with more than a tenth of the mean count, in their own order; the others follow,
    fullest first.
    """
    order = np.arange(len(counts))
    if not preprocess:
        return order, len(counts)
    kept = counts > _LEAST_SHARE * counts.sum() / len(counts)
    others = order[~kept]
    others = others[np.argsort(-counts[others], kind="stable")]
    return np.concatenate([order[kept], others]), max(1, int(kept.sum()))


def column_bands(counts: np.ndarray, wanted: int) -> Bands:
    """At most `wanted` bands, each closed by the column with which it has its even share."""
    total = int(counts.sum())
    share = -(-total // wanted)
    before = np.concatenate([[0], np.cumsum(counts)])
    bounds = [0]
    while len(bounds) <= wanted and before[bounds[-1]] < total:
        goal = int(before[bounds[-1]]) + share
        bounds.append(min(int(np.searchsorted(before, goal)), len(counts)))
    if len(bounds) == 1:
        bounds.append(len(counts))
    edges = np.asarray(bounds)
    filled = np.concatenate([[0], np.cumsum(counts > 0)])
    widest = int(np.diff(filled[edges]).max())
    return Bands(edges, tuple(np.diff(before[edges]).tolist()), widest)


def split_n(n: int, parts: int, grain: int) -> list[Interval]:
    """n columns (whole grains) in at most `parts` equal parts; the last may be shorter."""
    step = -(-(n // grain) // parts) * grain
    return [Interval(begin, min(begin + step, n)) for begin in range(0, n, step)]


def split_tiles(parts: list[Interval], tiles: int, grain: int) -> list[Interval]:
    """Tiles for each part of n, in proportion to its width and in whole grains."""
    width = 1 + sum(part.size for part in parts)
    grains = -(-tiles // grain)
    least = -(-grains // len(parts))
    found: list[Interval] = []
    begin = 0
    for part in parts:
        more = max(-(-grains * part.size // width) - 1, least)
        end = min(begin + more * grain, tiles)
        found.append(Interval(begin, end))
        begin = end
    found[-1] = Interval(found[-1].begin, tiles)
    return found


def tiles_of(blocks: tuple[int, ...], tiles: int, grain: int) -> tuple[int, ...] | None:
    """Tiles for each band, in proportion to its blocks and in whole grains; None if too few."""
    total, used = sum(blocks), 0
    found = []
    for place, count in enumerate(blocks):
        if place == len(blocks) - 1:
            share = tiles - used
        else:
            share = count * tiles // max(total, 1) or min(tiles, grain)
            needed = -(-count // -(-count // share))
            share = min(-(-needed // grain) * grain, share)
        share = max(share // grain * grain, grain)
        later = (len(blocks) - 1 - place) * grain
        share = min(share, tiles - used, tiles - later)
        if share <= 0:
            return None
        found.append(share)
        used += share
    return tuple(found)
