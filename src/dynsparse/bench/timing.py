"""Times of contenders side by side, round by round, and again where others disturbed them."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dynsparse.bench.load import CpuTimes, foreign_share, read_cpu_times

__all__ = ["Effort", "Spread", "Timing", "Work", "measure", "spread"]

Work = Callable[[], object]

# What takes less is called several times per sample: the clock costs a tenth of a microsecond.
_SHORTEST_SAMPLE = 200e-6


@dataclass(frozen=True)
class Effort:
    """How long to measure and how often to try again.

    seconds, rounds: a cell takes at least this long and at least so many rounds.
    foreign: the share of the machine that others may take; above it a cell is measured again.
    repeats: how often at most.
    """

    seconds: float = 1.0
    rounds: int = 5
    foreign: float = 0.05
    repeats: int = 2


@dataclass(frozen=True)
class Spread:
    """Median and quartiles."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Timing:
    """Seconds per call of every contender, and each one's time over the reference's.

    `foreign` is what others took of the machine, None where that is not known; `disturbed` whether
    it stayed above the limit in every attempt.
    """

    times: dict[str, Spread]
    ratios: dict[str, Spread]
    rounds: int
    foreign: float | None
    disturbed: bool


def spread(samples: list[float]) -> Spread:
    """Of at least one sample."""
    if len(samples) == 1:
        return Spread(samples[0], samples[0], samples[0])
    low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
    return Spread(median, low, high)


def measure(
    contenders: Mapping[str, Work],
    reference: str,
    effort: Effort,
    *,
    read: Callable[[], CpuTimes | None] = read_cpu_times,
) -> Timing:
    """Time `contenders` interleaved: every round runs each of them once, in an order of its own.

    Ratios are taken within a round, so that what slows a whole round down cancels out. An attempt
    in which others took more than `effort.foreign` of the machine is thrown away for a better one.
    """
    inner = {name: _calls_per_sample(work) for name, work in contenders.items()}
    best: tuple[float | None, dict[str, list[float]]] | None = None
    for _ in range(1 + effort.repeats):
        before = read()
        samples = _rounds(contenders, inner, effort)
        foreign = foreign_share(before, read())
        if best is None or (foreign or 0.0) < (best[0] or 0.0):
            best = foreign, samples
        if (foreign or 0.0) <= effort.foreign:
            break
    assert best is not None
    foreign, samples = best
    own = samples[reference]
    return Timing(
        times={name: spread(taken) for name, taken in samples.items()},
        ratios={
            name: spread([other / mine for other, mine in zip(taken, own, strict=True)])
            for name, taken in samples.items()
            if name != reference
        },
        rounds=len(own),
        foreign=foreign,
        disturbed=(foreign or 0.0) > effort.foreign,
    )


def _calls_per_sample(work: Work) -> int:
    """Also warms up: allocations, kernels chosen at the first call, threads."""
    work()
    start = time.perf_counter()
    work()
    taken = time.perf_counter() - start
    if taken >= _SHORTEST_SAMPLE:
        return 1
    return math.ceil(_SHORTEST_SAMPLE / max(taken, 1e-7))


def _rounds(
    contenders: Mapping[str, Work], inner: Mapping[str, int], effort: Effort
) -> dict[str, list[float]]:
    names = list(contenders)
    samples: dict[str, list[float]] = {name: [] for name in names}
    order = random.Random(0)
    start = time.perf_counter()
    done = 0
    while done < effort.rounds or time.perf_counter() - start < effort.seconds:
        # Nobody always follows the same one, whose data then fill the caches.
        for name in order.sample(names, len(names)):
            work = contenders[name]
            before = time.perf_counter()
            for _ in range(inner[name]):
                work()
            samples[name].append((time.perf_counter() - before) / inner[name])
        done += 1
    return samples
