"""How much of the machine other processes took while something was timed."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# user nice system irq softirq steal: the columns of /proc/stat in which a CPU is taken. Time that
# a hypervisor gave to others is as foreign as any.
_BUSY = (0, 1, 2, 5, 6, 7)


@dataclass(frozen=True)
class CpuTimes:
    """CPU seconds since some fixed moment: of the whole machine, taken by anyone, by ourselves."""

    total: float
    busy: float
    own: float


def read_cpu_times(
    stat: Path = Path("/proc/stat"), own: Callable[[], os.times_result] = os.times
) -> CpuTimes | None:
    """The times now; None where the system has no readable /proc/stat."""
    try:
        fields = stat.read_text().splitlines()[0].split()
        ticks = [int(field) for field in fields[1:9]]
    except (OSError, ValueError, IndexError):
        return None
    if fields[0] != "cpu" or len(ticks) < 8:
        return None
    second = os.sysconf("SC_CLK_TCK")
    mine = own()
    return CpuTimes(
        total=sum(ticks) / second,
        busy=sum(ticks[column] for column in _BUSY) / second,
        own=mine.user + mine.system,
    )


def foreign_share(before: CpuTimes | None, after: CpuTimes | None) -> float | None:
    """The share, in [0, 1], of the machine's CPU time that others took between two readings.

    None where it is not known: no readings, or so close together that no tick lies between.
    Readings come in ticks of 10 ms, so spans below half a second say little.
    """
    if before is None or after is None or after.total <= before.total:
        return None
    foreign = (after.busy - before.busy) - (after.own - before.own)
    return min(1.0, max(0.0, foreign / (after.total - before.total)))
