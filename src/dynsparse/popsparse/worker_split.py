"""How a rectangle of rows x batch grains is shared among the workers of a tile."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

__all__ = ["split_rectangle", "split_rectangles"]


@lru_cache(maxsize=1 << 16)
def split_rectangle(rows: int, columns: int, workers: int) -> tuple[tuple[int, int], ...]:
    """The (rows, columns) of each worker in use: a near-square grid, then the largest halved.

    Ties among the largest go to the earliest. Source: section 4.5 of the design inventory.
    """
    grains = -(-rows * columns // workers)
    tall = min(-(-grains // columns), rows)
    wide = min(-(-grains // tall), columns)
    across, down = columns // wide, rows // tall
    pieces = [
        (
            tall if i < down - 1 else rows - tall * (down - 1),
            wide if j < across - 1 else columns - wide * (across - 1),
        )
        for i in range(down)
        for j in range(across)
    ]
    while len(pieces) < workers:
        largest = max(range(len(pieces)), key=lambda i: pieces[i][0] * pieces[i][1])
        r, c = pieces[largest]
        if r > c:
            halves = (((r + 1) // 2, c), (r // 2, c))
        elif c > 1:
            halves = ((r, (c + 1) // 2), (r, c // 2))
        else:
            break
        pieces[largest] = halves[1]
        pieces.append(halves[0])
    return tuple(pieces)


def split_rectangles(
    rows: np.ndarray, columns: np.ndarray, workers: int
) -> tuple[np.ndarray, np.ndarray]:
    """`split_rectangle` of many: two arrays [workers, len(rows)], idle workers repeat the first."""
    columns = np.broadcast_to(columns, rows.shape)
    span = int(columns.max()) + 1
    keys, place = np.unique(rows * span + columns, return_inverse=True)
    table = np.empty((2, workers, len(keys)), np.int64)
    for i, key in enumerate(keys.tolist()):
        pieces = split_rectangle(key // span, key % span, workers)
        for j in range(workers):
            table[:, j, i] = pieces[j] if j < len(pieces) else pieces[0]
    return table[0][:, place], table[1][:, place]
