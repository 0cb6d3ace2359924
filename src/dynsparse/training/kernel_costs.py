"""What kernels cost, as far as trainings are concerned: which constants they begin and go on with,
and the first measurement of a processor, in pauses of the first long training on it.

A training must not change its kernels under way, so what is measured is for the next process.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from dynsparse.nn import SparseLinear
from dynsparse.ops.linear import in_force
from dynsparse.ops.linear.choice import put_in_force
from dynsparse.ops.linear.costs import Table
from dynsparse.ops.linear.tables import shipped
from dynsparse.ranks import Ranks

__all__ = ["begin_with", "check", "go_on_with", "measure_in_pauses", "told"]

_log = logging.getLogger(__name__)

# A training is long from so many steps and seconds on.
_STEPS, _SECONDS = 100, 20.0

_SHARE = 0.05  # of the time, until it is done


def begin_with(ranks: Ranks) -> None:
    """Put the constants of a training in force: of several ranks those that come with the library,
    which do not differ by chance."""
    if not ranks.alone:
        _put(shipped())


def told() -> dict[str, Any]:
    """What is in force, for the state of a training."""
    return in_force.state()


def check(told: Any) -> None:
    """Raise ValueError where that is damaged."""
    in_force.check_state(told)


def go_on_with(ranks: Ranks, told: Any) -> None:
    """Put in force what a state of a training tells; see `in_force.resumed`."""
    _put(in_force.resumed(told) if ranks.alone else shipped())


def _put(table: Table) -> None:
    if table != in_force.table():
        put_in_force(table)


class _First:
    """The first measurement, of which there is one in a process."""

    def __init__(self) -> None:
        self.over = False
        self._steps = 0
        self._begun = 0.0
        self._tuning: Any = None
        self._spent = 0.0

    def step(self, layers: Mapping[str, SparseLinear]) -> None:
        """Measure a little, if it is time to."""
        now = time.monotonic()
        if not self._steps:
            self._begun = now
        self._steps += 1
        if self._tuning is None:
            if self._steps < _STEPS or now - self._begun < _SECONDS:
                return
            if not _is_wanted(layers):
                self.over = True
                return
            # Not for trainings that end before.
            from dynsparse.ops.linear.tuning import Tuning

            self._tuning, self._begun = Tuning(quick=True), now
        if self._spent > _SHARE * (now - self._begun):
            return
        more = self._tuning.step()
        self._spent += time.monotonic() - now
        if not more:
            self.over = True
            self._conclude()

    def _conclude(self) -> None:
        from dynsparse.ops.linear import measured
        from dynsparse.ops.linear.tuning import conclude

        found = conclude(self._tuning.timings, shipped(), asked=False)
        measured.keep_measured(found)
        _log.info("the kernels were measured in %.1f seconds: %s", self._spent, found.because)


_first = _First()


def _is_wanted(layers: Mapping[str, SparseLinear]) -> bool:
    from dynsparse.ops.linear import measured
    from dynsparse.ops.linear.tuning import why_not

    return (
        in_force.mode() == "auto"
        and any(layer.values.is_cpu for layer in layers.values())
        and not why_not()
        and measured.kept_measured() is None
    )


def measure_in_pauses(ranks: Ranks, layers: Mapping[str, SparseLinear]) -> None:
    """Called behind every step: in a long training alone on a CPU that was never measured, times
    some kernels for a moment. Nothing of it is seen in the training, whatever happens."""
    if _first.over or not ranks.alone:
        return
    try:
        _first.step(layers)
    except Exception as error:
        _first.over = True
        _log.info("the kernels were not measured: %s", error)
