"""Rounds, ratios and attempts of measurements, with a simulated clock."""

import itertools

import pytest

from dynsparse.bench.host import CpuTimes
from dynsparse.bench.timing import Effort, measure, spread


class Clock:
    """A replacement for time.perf_counter that only simulated work advances."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr("dynsparse.bench.timing.time.perf_counter", lambda: self.now)

    def work(self, seconds, log=None, name=""):
        def call():
            self.now += seconds
            if log is not None:
                log.append(name)

        return call


def readings(*shares):
    """Make a pair of readings per attempt, with the given shares taken by other processes."""
    times = []
    for i, share in enumerate(shares):
        times.append(CpuTimes(10.0 * i, 10.0 * i, 0.0))
        times.append(CpuTimes(10.0 * i + 10, 10.0 * i + 10 * share, 0.0))
    remaining = iter(times)
    return lambda: next(remaining)


def test_every_contender_runs_once_per_round_in_varying_order(monkeypatch):
    log = []
    clock = Clock(monkeypatch)
    work = {name: clock.work(1.0, log, name) for name in "abc"}
    timing = measure(work, "a", Effort(0.0, 12, 1.0, 0), read=lambda: None)
    assert timing.rounds == 12
    text = "".join(log)
    assert text[:6] == "aabbcc"  # warming up
    rounds = [text[i : i + 3] for i in range(6, len(text), 3)]
    assert {"".join(sorted(one)) for one in rounds} == {"abc"}
    assert len(set(rounds)) > 3


def test_ratios_to_the_reference_and_times_per_call(monkeypatch):
    clock = Clock(monkeypatch)
    work = {"own": clock.work(0.002), "other": clock.work(0.006), "small": clock.work(5e-6)}
    timing = measure(work, "own", Effort(0.0, 4, 1.0, 0), read=lambda: None)
    assert timing.times["own"].median == pytest.approx(0.002)
    assert timing.times["small"].median == pytest.approx(5e-6)
    assert timing.ratios["other"].median == pytest.approx(3)
    assert timing.ratios["other"].low == pytest.approx(3)
    assert timing.ratios["small"].median == pytest.approx(0.0025)
    assert "own" not in timing.ratios


def test_cell_runs_for_its_seconds_and_minimum_rounds(monkeypatch):
    clock = Clock(monkeypatch)
    work = {"a": clock.work(0.5)}
    assert measure(work, "a", Effort(3.0, 2, 1.0, 0), read=lambda: None).rounds == 6
    assert measure(work, "a", Effort(0.1, 2, 1.0, 0), read=lambda: None).rounds == 2


def test_undisturbed_cell_is_measured_once(monkeypatch):
    clock = Clock(monkeypatch)
    timing = measure({"a": clock.work(1.0)}, "a", Effort(0, 1, 0.05, 3), read=readings(0.04))
    assert (timing.foreign, timing.disturbed) == (pytest.approx(0.04), False)


def test_disturbed_cell_is_measured_again(monkeypatch):
    clock = Clock(monkeypatch)
    taken = itertools.chain([9.0] * 3, itertools.repeat(1.0))

    def work():
        clock.now += next(taken)

    timing = measure({"a": work}, "a", Effort(0, 1, 0.05, 3), read=readings(0.5, 0.01))
    assert (timing.foreign, timing.disturbed) == (pytest.approx(0.01), False)
    assert timing.times["a"].median == 1.0


def test_cell_that_stays_disturbed_keeps_its_best_attempt(monkeypatch):
    clock = Clock(monkeypatch)
    timing = measure(
        {"a": clock.work(1.0)}, "a", Effort(0, 1, 0.05, 2), read=readings(0.5, 0.2, 0.3)
    )
    assert (timing.foreign, timing.disturbed) == (pytest.approx(0.2), True)


def test_unknown_load_repeats_nothing(monkeypatch):
    clock = Clock(monkeypatch)
    timing = measure({"a": clock.work(1.0)}, "a", Effort(0, 1, 0.05, 5), read=lambda: None)
    assert (timing.rounds, timing.foreign, timing.disturbed) == (1, None, False)


def test_spread_is_median_and_quartiles():
    assert spread([4.0]).median == spread([4.0]).low == spread([4.0]).high == 4.0
    found = spread([5.0, 1.0, 2.0, 4.0, 3.0])
    assert (found.low, found.median, found.high) == (2.0, 3.0, 4.0)
