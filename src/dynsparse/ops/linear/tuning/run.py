"""A measurement, what is concluded from it, and where it is kept."""

from __future__ import annotations

import datetime
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from dynsparse import native
from dynsparse.files.cache import cache_folder
from dynsparse.ops.linear.costs import Table
from dynsparse.ops.linear.measured import Measured, keep_measured, kept_measured
from dynsparse.ops.linear.tables import shipped
from dynsparse.ops.linear.tuning.cells import MANY, QUICK, Cell, Timing, rounds
from dynsparse.ops.linear.tuning.fit import MOST_ERROR, above_best, fit

_log = logging.getLogger(__name__)

_LEAST_ROUNDS, _MOST_ROUNDS = 3, 9
_ENOUGH = 0.1  # seconds for a cell, once it has its least rounds
_SECONDS, _QUICK_SECONDS = 50.0, 1.8  # no cell is begun after these


def conclude(timings: Sequence[Timing], table: Table) -> Measured:
    """What the times of some cells, forward and backward in turn, come to.

    How well the constants choose is seen at cells that they were not fitted to: those of one half
    at those of the other.

    Args:
        table: that came with the library.

    Raises:
        ValueError: no times.
    """
    found = fit(timings, table.costs)
    halves = [[t for i, t in enumerate(timings) if i // 2 % 2 == half] for half in (0, 1)]
    measured = above_best(timings, found.costs)
    if all(halves):
        fits = [fit(half, table.costs) for half in halves]
        others = [above_best(halves[1 - i], one.costs) for i, one in enumerate(fits)]
        measured = sum(others) / 2
    above = {"shipped": above_best(timings, table.costs), "measured": measured}
    gained = f"{above['measured']:.1%} over the best kinds, in place of {above['shipped']:.1%}"
    if found.error > MOST_ERROR:
        words = f"no constants explain the times (their mean error is {found.error:.0%})"
        verdict = False, f"{words}: measure again when nothing else runs"
    elif measured >= above["shipped"]:
        verdict = False, f"the table {table.name} chooses as well: {gained}"
    else:
        verdict = True, gained
    return Measured(
        date=datetime.date.today().isoformat(),
        costs=found.costs,
        error=found.error,
        above=above,
        in_force=verdict[0],
        because=verdict[1],
    )


def tune(quick: bool = False, tell: Callable[[int, int], None] | None = None) -> Measured:
    """Measure this processor, on one thread, and keep what it comes to.

    It comes into force in the processes to come, see `in_force`; one that is not to be used leaves
    an earlier one that is.

    Args:
        quick: in under two seconds rather than under a minute.
        tell: called with how many cells are measured, and how many there are.

    Raises:
        ValueError: there is nothing to choose, or the result cannot be kept.
    """
    if native.load() is None:
        raise ValueError("nothing is measured: there are no compiled kernels here to choose from")
    cells = QUICK if quick else MANY
    limit = time.perf_counter() + (_QUICK_SECONDS if quick else _SECONDS)
    timings: list[Timing] = []
    for done, cell in enumerate(cells):
        if time.perf_counter() > limit:
            break
        timings += _timed(cell, 0.0 if quick else _ENOUGH)
        if tell is not None:
            tell(done + 1, len(cells))
    found = conclude(timings, shipped())
    before = kept_measured()
    if not found.in_force and before is not None and before.in_force:
        return replace(found, because=f"{found.because}; that of {before.date} stays in force")
    try:
        keep_measured(found)
    except OSError as error:
        raise ValueError(
            f"what was measured cannot be kept in {cache_folder()} ({error}): make the folder one "
            "that can be written, or set DYNSPARSE_CACHE_DIR"
        ) from error
    _log.info("measured %d layers: %s", len(timings) // 2, found.because)
    return found


def _timed(cell: Cell, enough: float) -> list[Timing]:
    """Forward and backward of a cell, of so many seconds if its least rounds take no more."""
    begin = time.perf_counter()
    found: list[Timing] = []
    for turn, least in enumerate(rounds(cell, _MOST_ROUNDS), -1):
        found = least
        if turn >= _LEAST_ROUNDS and time.perf_counter() - begin > enough:
            break
    return found
