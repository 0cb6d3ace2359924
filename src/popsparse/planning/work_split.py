"""How the rows and batch of a sub-group are shared among a tile's worker threads."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from popsparse.planning.parts import ceil_div


class WorkPieces(NamedTuple):
    """Pieces of work in order of sub-groups: row and batch-grain ranges. int64 [pieces].

    `group` names the sub-group, `number` counts the pieces inside it, rows count inside it too.
    """

    group: np.ndarray
    number: np.ndarray
    row: np.ndarray
    rows: np.ndarray
    grain: np.ndarray
    grains: np.ndarray


@lru_cache(maxsize=1 << 16)
def grid_split(rows: int, grains: int, workers: int) -> tuple[tuple[int, int, int, int], ...]:
    """A rectangle of rows x grains cut for workers: (row, rows, grain, grains) of each piece.

    A near-square grid of pieces, then the largest is halved, along rows where it has more rows than
    grains, until every worker has one; ties among the largest go to the earliest. See
    section 2.3 of docs/popsparse-formulas.md.
    """
    area = ceil_div(rows * grains, workers)
    tall = min(ceil_div(area, grains), rows)
    wide = min(ceil_div(area, tall), grains)
    xs = [*range(0, rows - tall + 1, tall)]
    zs = [*range(0, grains - wide + 1, wide)]
    heights = [b - a for a, b in zip(xs, [*xs[1:], rows], strict=True)]
    widths = [b - a for a, b in zip(zs, [*zs[1:], grains], strict=True)]
    pieces = [
        (x, height, z, width)
        for x, height in zip(xs, heights, strict=True)
        for z, width in zip(zs, widths, strict=True)
    ]
    while len(pieces) < workers:
        at = max(range(len(pieces)), key=lambda k: pieces[k][1] * pieces[k][3])
        x, height, z, width = pieces[at]
        if height > width:
            half = height // 2
            pieces[at] = (x, half, z, width)
            pieces.append((x + half, height - half, z, width))
        elif width > 1:
            half = width // 2
            pieces[at] = (x, height, z, half)
            pieces.append((x, height, z + half, width - half))
        else:
            break
    return tuple(sorted(pieces))


def grid_splits(
    rows: np.ndarray, grains: np.ndarray, workers: int
) -> tuple[np.ndarray, np.ndarray]:
    """The rows and grains of the pieces of many rectangles: two arrays [workers, len(rows)].

    Idle workers repeat the first piece.
    """
    grains = np.broadcast_to(grains, rows.shape)
    span = int(grains.max()) + 1
    keys, place = np.unique(rows * span + grains, return_inverse=True)
    table = np.empty((2, workers, len(keys)), np.int64)
    for i, key in enumerate(keys.tolist()):
        pieces = grid_split(key // span, key % span, workers)
        for j in range(workers):
            _, table[0, j, i], _, table[1, j, i] = pieces[j] if j < len(pieces) else pieces[0]
    return table[0][:, place], table[1][:, place]


def even_split(count: np.ndarray, workers: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`count` [groups] things cut evenly: (group, begin, size) of each non-empty piece."""
    used = np.minimum(count, workers)
    group = np.repeat(np.arange(len(count)), used)
    index = np.arange(len(group)) - np.repeat(np.cumsum(used) - used, used)
    begin = index * count[group] // used[group]
    end = (index + 1) * count[group] // used[group]
    return group, begin, end - begin


def split_rows(group_rows: np.ndarray, row_nz: np.ndarray, grains: int, workers: int) -> WorkPieces:
    """Share every sub-group's rows among workers.

    More than twice as many rows as workers are cut by their non-zeros, the whole batch staying
    together; fewer are cut as a grid of rows x batch grains.

    Args:
        group_rows: rows of each sub-group, int64 [groups], none of them 0.
        row_nz: non-zeros of each row, int64 [sum of group_rows], in order of sub-groups.
        grains: batch grains of a tile.
    """
    parts: list[np.ndarray] = []
    many = np.flatnonzero(group_rows > 2 * workers)
    first = np.cumsum(group_rows) - group_rows
    if len(many):
        before = np.append(0, np.cumsum(row_nz))
        base = before[first[many]]
        total = before[first[many] + group_rows[many]] - base
        # Row boundaries nearest above the ideal share of each worker.
        ideal = base[:, None] + np.arange(workers + 1) * total[:, None] // workers
        cut = np.searchsorted(before, ideal) - first[many][:, None]
        sizes = np.diff(cut, axis=1)
        which, _ = np.nonzero(sizes)
        rows = sizes[sizes > 0]
        parts.append(np.stack([many[which], cut[:, :-1][sizes > 0], rows,
                               np.zeros_like(rows), np.full_like(rows, grains)]))  # fmt: skip
    for rows in np.unique(group_rows[group_rows <= 2 * workers]):
        groups = np.flatnonzero(group_rows == rows)
        pieces = np.array(grid_split(int(rows), grains, workers), np.int64).T
        tiled = np.tile(pieces, len(groups))
        parts.append(np.vstack([np.repeat(groups, pieces.shape[1])[None], tiled]))
    if not parts:
        empty = np.zeros(0, np.int64)
        return WorkPieces(empty, empty, empty, empty, empty, empty)
    table = np.concatenate(parts, axis=1)
    table = table[:, np.argsort(table[0], kind="stable")]
    counts = np.bincount(table[0], minlength=len(group_rows))
    index = np.arange(table.shape[1]) - np.repeat(np.cumsum(counts) - counts, counts)
    return WorkPieces(table[0], index, *table[1:])
