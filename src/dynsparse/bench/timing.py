"""Times of contenders side by side, round by round; repeated where others disturbed them."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from dynsparse.bench.host import CpuTimes, foreign_share, read_cpu_times
from dynsparse.options import integer, number, option

Work = Callable[[], object]
Sample = TypeVar("Sample")

# Shorter work is called several times per sample, as the clock costs a tenth of a microsecond.
_SHORTEST_SAMPLE = 200e-6


@dataclass(frozen=True)
class Effort:
    """How long to measure and how often to try again."""

    seconds: float = option(1.0, "A cell takes at least this long.", number(0, 3600))
    rounds: int = option(5, "A cell takes at least this many rounds.", integer(1))
    foreign: float = option(
        0.05, "Largest share of the machine for others; above it a cell is repeated.", number(0, 1)
    )
    repeats: int = option(2, "Largest number of repetitions.", integer(0))


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
    """The median and quartiles of at least one sample."""
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

    def attempt() -> dict[str, list[float]]:
        samples: dict[str, list[float]] = {name: [] for name in contenders}

        def sample(name: str) -> None:
            before = time.perf_counter()
            for _ in range(inner[name]):
                contenders[name]()
            samples[name].append((time.perf_counter() - before) / inner[name])

        run_rounds(contenders, sample, effort)
        return samples

    samples, foreign = run_least_disturbed(attempt, effort, read=read)
    return timing_of(samples, reference, foreign, effort)


def run_least_disturbed(
    attempt: Callable[[], Sample],
    effort: Effort,
    *,
    read: Callable[[], CpuTimes | None] = read_cpu_times,
) -> tuple[Sample, float | None]:
    """Run attempts; return the result of the least disturbed one, and the share that others took.

    There is more than one attempt only where others took more than `effort.foreign`.
    """
    best: tuple[Sample, float | None] | None = None
    for _ in range(1 + effort.repeats):
        before = read()
        sample = attempt()
        foreign = foreign_share(before, read())
        if best is None or (foreign or 0.0) < (best[1] or 0.0):
            best = sample, foreign
        if (foreign or 0.0) <= effort.foreign:
            break
    assert best is not None
    return best


def timing_of(
    samples: Mapping[str, list[float]], reference: str, foreign: float | None, effort: Effort
) -> Timing:
    """The `Timing` of the seconds that every contender took in the same rounds."""
    reference_times = samples[reference]
    return Timing(
        times={name: spread(times) for name, times in samples.items()},
        ratios={
            name: spread([a / b for a, b in zip(times, reference_times, strict=True)])
            for name, times in samples.items()
            if name != reference
        },
        rounds=len(reference_times),
        foreign=foreign,
        disturbed=(foreign or 0.0) > effort.foreign,
    )


def _calls_per_sample(work: Work) -> int:
    """How many calls a sample takes; warms up allocations, choices of kernels and threads, too."""
    work()
    start = time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    if seconds >= _SHORTEST_SAMPLE:
        return 1
    return math.ceil(_SHORTEST_SAMPLE / max(seconds, 1e-7))


def run_rounds(names: Iterable[str], sample: Callable[[str], object], effort: Effort) -> None:
    """Call `sample` once a round with every name, for the time and rounds of the effort."""
    names = list(names)
    order = random.Random(0)
    start = time.perf_counter()
    rounds_done = 0
    while rounds_done < effort.rounds or time.perf_counter() - start < effort.seconds:
        # In random order: what ran before has filled the caches.
        for name in order.sample(names, len(names)):
            sample(name)
        rounds_done += 1
