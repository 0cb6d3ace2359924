"""Load by other processes, from simulated readings."""

import os

import pytest

from dynsparse.bench.host import CpuTimes, foreign_share, read_cpu_times

TICK = 1 / os.sysconf("SC_CLK_TCK")


def times_result(user, system):
    return os.times_result((user, system, 0.0, 0.0, 0.0))


def test_reading_sums_the_busy_columns(tmp_path):
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 10 20 1000 40 3 2 5 7 7\ncpu0 1 1 1 1 1 1 1 1 1 1\n")
    found = read_cpu_times(stat, lambda: times_result(0.5, 0.25))
    assert found is not None
    assert found.total == pytest.approx(1180 * TICK)
    assert found.busy == pytest.approx(140 * TICK)
    assert found.own == 0.75


@pytest.mark.parametrize("text", ["", "cpu", "cpu 1 2 3", "intr 1 2 3 4 5 6 7 8 9", "cpu a b c d"])
def test_unreadable_text_gives_none(tmp_path, text):
    stat = tmp_path / "stat"
    stat.write_text(text)
    assert read_cpu_times(stat) is None
    assert read_cpu_times(tmp_path / "missing") is None


@pytest.mark.parametrize(
    ("busy", "own", "share"),
    [(2.0, 2.0, 0.0), (3.0, 2.0, 0.25), (4.0, 0.0, 1.0), (1.98, 2.0, 0.0)],
)
def test_share_of_other_processes(busy, own, share):
    before = CpuTimes(total=100.0, busy=50.0, own=7.0)
    after = CpuTimes(total=104.0, busy=50.0 + busy, own=7.0 + own)
    assert foreign_share(before, after) == pytest.approx(share)


def test_share_without_readings_is_none():
    now = CpuTimes(1.0, 1.0, 1.0)
    assert foreign_share(None, now) is None
    assert foreign_share(now, None) is None
    assert foreign_share(now, now) is None


def test_reading_of_this_machine():
    found = read_cpu_times()
    assert found is None or found.total >= found.busy >= 0
