"""What the tests of rectangles share: grids of ranks that are threads of one process."""

from __future__ import annotations

import threading
from itertools import product

from fake_ranks import BrokenMoveError, ThreadRanks, _Meeting

from dynsparse.ranks import ALONE, RankGrid

GRIDS = [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (1, 2, 2)]
"""Those of x, y and z that every case is tried on."""


def on_grid(sizes, work, seconds=20.0):
    """(x, y, z) -> what `work(grid)` returns on that rank; the first error is raised."""
    places = list(product(*map(range, sizes)))
    meetings = {}

    def line(place, axis):
        """The rank of `place` along an axis, or along all of them."""
        if axis is None:
            size, rank, key = len(places), places.index(place), "all_ranks"
        else:
            size, rank = sizes[axis], place[axis]
            key = axis, *place[:axis], *place[axis + 1 :]
        if size == 1:
            return ALONE
        return ThreadRanks(rank, meetings.setdefault(key, _Meeting(size, seconds)))

    grids = {place: RankGrid(*(line(place, axis) for axis in (0, 1, 2, None))) for place in places}
    results = {}

    def run(place):
        try:
            results[place] = work(grids[place])
        except BaseException as error:
            results[place] = error
        finally:
            for ranks in vars(grids[place]).values():
                if isinstance(ranks, ThreadRanks):
                    ranks._meeting.leave(ranks.rank)

    threads = [threading.Thread(target=run, args=(place,), daemon=True) for place in places]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors = [r for r in results.values() if isinstance(r, BaseException)]
    for error in sorted(errors, key=lambda e: isinstance(e, BrokenMoveError)):
        raise error
    return results
