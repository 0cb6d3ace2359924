"""Grids of ranks for the tests of tensor-parallel layers; each rank is a thread."""

from __future__ import annotations

import threading
from itertools import product

from fake_ranks import BrokenCollectiveError, ThreadRanks, _Rendezvous

from dynsparse.ranks import ALONE, RankGrid

GRIDS = [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (1, 2, 2)]
"""Mesh sizes (x, y, z) that every case runs on."""


def on_grid(sizes, work, seconds=20.0):
    """Return {(x, y, z): what `work(grid)` returns on that rank}; raise the first error."""
    places = list(product(*map(range, sizes)))
    meetings = {}

    def ranks_along(place, axis):
        """Return the ranks along an axis through `place`, or along all axes if it is None."""
        if axis is None:
            size, rank, key = len(places), places.index(place), "all_ranks"
        else:
            size, rank = sizes[axis], place[axis]
            key = axis, *place[:axis], *place[axis + 1 :]
        if size == 1:
            return ALONE
        return ThreadRanks(rank, meetings.setdefault(key, _Rendezvous(size, seconds)))

    grids = {
        place: RankGrid(*(ranks_along(place, axis) for axis in (0, 1, 2, None))) for place in places
    }
    results = {}

    def run(place):
        try:
            results[place] = work(grids[place])
        except BaseException as error:
            results[place] = error
        finally:
            for ranks in vars(grids[place]).values():
                if isinstance(ranks, ThreadRanks):
                    ranks._rendezvous.leave(ranks.rank)

    threads = [threading.Thread(target=run, args=(place,), daemon=True) for place in places]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors = [r for r in results.values() if isinstance(r, BaseException)]
    for error in sorted(errors, key=lambda e: isinstance(e, BrokenCollectiveError)):
        raise error
    return results
