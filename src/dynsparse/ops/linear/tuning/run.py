"""A measurement in short steps, what is concluded from it, and where it is kept."""

from __future__ import annotations

import datetime
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from dynsparse import native
from dynsparse.files.cache import open_cache
from dynsparse.ops.linear.costs import Table
from dynsparse.ops.linear.measured import Measured, keep_measured, kept_measured
from dynsparse.ops.linear.tables import shipped
from dynsparse.ops.linear.tuning.cells import MANY, QUICK, Timing, rounds
from dynsparse.ops.linear.tuning.fit import MOST_ERROR, above_best, fit

__all__ = ["Tuning", "conclude", "tune", "why_not"]

_log = logging.getLogger(__name__)

_LEAST_ROUNDS, _MOST_ROUNDS = 3, 9
_ENOUGH = 0.1  # seconds for a cell, once it has its least rounds
_WORTH = 0.05  # a table whose choice takes more than that over the best is worth replacing unasked


class Tuning:
    """A measurement under way, a round of a cell at each step.

    Args:
        quick: a few cells in under two seconds; otherwise many, in under a minute.

    Attributes:
        cells: how many there are; done: how many of them are measured.
        timings: of these, forward and backward in turn.
    """

    def __init__(self, quick: bool) -> None:
        self._cells = QUICK if quick else MANY
        self._limit = 1.8 if quick else 50.0  # seconds
        self._enough = 0.0 if quick else _ENOUGH
        self.cells, self.done = len(self._cells), 0
        self.timings: list[Timing] = []
        self._steps = self._all()
        self._spent = 0.0

    def step(self) -> bool:
        """Measure a little; whether there is more to do."""
        if self._spent >= self._limit:
            return False
        begin = time.perf_counter()
        more = next(self._steps, False)
        self._spent += time.perf_counter() - begin
        return more

    def _all(self) -> Iterator[bool]:
        for cell in self._cells:
            begin = self._spent
            found: list[Timing] = []
            for turn, least in enumerate(rounds(cell, _MOST_ROUNDS), -1):
                found = least
                yield True
                if turn >= _LEAST_ROUNDS and self._spent - begin > self._enough:
                    break
            self.timings += found
            self.done += 1


def conclude(timings: Sequence[Timing], table: Table, asked: bool) -> Measured:
    """What the times of some cells, forward and backward in turn, come to.

    How well the constants choose is seen at cells that they were not fitted to: those of one half
    at those of the other.

    Args:
        table: that came with the library.
        asked: whether somebody called for it. Otherwise kernels change only where the table takes
            more than 5 % over the best, and half of that or more is gained.

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
    elif not asked and not (above["shipped"] > _WORTH and measured <= above["shipped"] / 2):
        verdict = False, f"the table {table.name} serves well enough: {gained}"
    else:
        verdict = True, gained
    return Measured(
        date=datetime.date.today().isoformat(),
        asked=asked,
        costs=found.costs,
        error=found.error,
        above=above,
        in_force=verdict[0],
        because=verdict[1],
    )


def why_not() -> str:
    """Why nothing can be measured and kept here; empty where it can."""
    if native.load() is None:
        return "there are no compiled kernels here to choose from"
    if not open_cache().limit:
        return "the cache is off: set DYNSPARSE_CACHE_SIZE to some bytes, or leave it out"
    return ""


def tune(quick: bool = False, tell: Callable[[int, int], None] | None = None) -> Measured:
    """Measure this processor, on one thread, and keep what it comes to.

    It comes into force in the processes to come, see `in_force`; one that is not to be used leaves
    an earlier one that is.

    Args:
        quick: in under two seconds rather than under a minute.
        tell: called with how many cells are measured, and how many there are.

    Raises:
        ValueError: there is nothing to choose, or no cache.
    """
    reason = why_not()
    if reason:
        raise ValueError(f"nothing is measured: {reason}")
    tuning = Tuning(quick)
    while tuning.step():
        if tell is not None:
            tell(tuning.done, tuning.cells)
    found = conclude(tuning.timings, shipped(), asked=True)
    before = kept_measured()
    if not found.in_force and before is not None and before.in_force:
        return replace(found, because=f"{found.because}; that of {before.date} stays in force")
    if not keep_measured(found):
        raise ValueError(
            f"what was measured cannot be kept in {open_cache().folder}: make the folder one that "
            "can be written, or set DYNSPARSE_CACHE_DIR"
        )
    _log.info("measured %d layers: %s", tuning.done, found.because)
    return found
