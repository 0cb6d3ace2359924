"""Schedules, compared with hand-computed values."""

import math
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynsparse.training import (
    ConstantSchedule,
    CosineSchedule,
    ElasticSchedule,
    GradualSchedule,
)
from dynsparse.training.schedule import is_due_within

application = partial(CosineSchedule, end_fraction=1.0, rounding="up")
"""The schedule of Graphcore's application."""


def due(schedule, steps):
    return [t for t in range(1, steps + 1) if schedule.is_due(t)]


def test_cosine_values_of_the_paper():
    schedule = CosineSchedule(total_steps=400, update_interval=100, drop_fraction=0.4)
    assert due(schedule, 400) == [100, 200]  # T_end = 300
    # 0.2 (1 + cos(pi/3)) = 0.3 and 0.2 (1 + cos(2 pi/3)) = 0.1
    assert schedule.fraction(100) == pytest.approx(0.3)
    assert [schedule.drop_count(t, 1000) for t in (100, 200, 300)] == [300, 100, 0]
    assert schedule.drop_count(100, 9) == 2  # 2.7, rounded down


def test_cosine_until_the_last_step():
    schedule = CosineSchedule(200, 40, 0.5, end_fraction=1.0)
    assert due(schedule, 200) == [40, 80, 120, 160]


def test_nothing_to_drop_is_never_due():
    assert due(CosineSchedule(100, 10, 0.0), 100) == []
    assert due(ConstantSchedule(100, 10, 0.0), 100) == []


def test_constant():
    schedule = ConstantSchedule(total_steps=30, update_interval=10, drop_fraction=0.29)
    assert due(schedule, 60) == [10, 20]
    assert schedule.drop_count(10, 100) == 29  # though 0.29 * 100 < 29 in floating point
    assert schedule.drop_count(20, 10) == 2


def test_application_cosine():
    schedule = application(total_steps=50, update_interval=1, drop_fraction=0.3)
    assert due(schedule, 50) == list(range(1, 50))
    assert schedule.share(25) == pytest.approx(0.5)
    # ceil(ceil(0.3 * 101) * 0.5) = ceil(31 * 0.5)
    assert schedule.drop_count(25, 101) == 16
    assert schedule.drop_count(50, 101) == 0
    assert schedule.drop_count(49, 1000) == math.ceil(300 * 0.5 * (1 + math.cos(math.pi * 0.98)))


def test_application_cosine_rounded_down():
    schedule = application(total_steps=50, update_interval=1, drop_fraction=0.3, rounding="down")
    # 0.3 * 101 * 0.5 = 15.15; 0.3 * 0.9 = 0.27 of the share at step 10
    assert schedule.drop_count(25, 101) == 15
    assert [schedule.drop_count(t, 6) for t in (1, 25, 49)] == [1, 0, 0]
    assert {schedule.drop_count(t, 2) for t in range(1, 50)} == {0}
    assert due(schedule, 50) == list(range(1, 50))


def test_application_cosine_delay_and_period():
    schedule = application(
        total_steps=110, update_interval=5, zero_steps=10, phase_delay=math.pi, period=1.0
    )
    assert due(schedule, 30) == [10, 15, 20, 25, 30]
    assert schedule.share(5) == 0
    assert schedule.share(10) == pytest.approx(0)  # 0.5 (1 + cos(pi))
    assert schedule.share(60) == pytest.approx(1)  # half of a whole turn later


@pytest.mark.parametrize("kind", [CosineSchedule, ConstantSchedule])
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"total_steps": 0}, ValueError, "total_steps must be an integer of at least 1, got 0"),
        ({"total_steps": "9"}, TypeError, "total_steps must be an integer, got '9'"),
        ({"total_steps": True}, ValueError, "total_steps must be an integer"),
        ({"update_interval": -1}, ValueError, "update_interval must be an integer of at least 1"),
        (
            {"drop_fraction": -0.1},
            ValueError,
            r"drop_fraction must be a number in \[0, 1\], got -0\.1",
        ),
        ({"drop_fraction": "0.3"}, TypeError, "drop_fraction must be a number"),
    ],
)
def test_bad_arguments_of_every_schedule(kind, arguments, error, message):
    with pytest.raises(error, match=message):
        kind(**{"total_steps": 10, **arguments})


def test_bad_arguments_of_single_schedules():
    with pytest.raises(ValueError, match=r"end_fraction must be a number in \(0, 1\], got 0"):
        CosineSchedule(10, end_fraction=0)
    with pytest.raises(ValueError, match=r"zero_steps must be below .* = 10, got 10"):
        CosineSchedule(10, end_fraction=1.0, zero_steps=10)
    with pytest.raises(ValueError, match="period must be a finite number, got inf"):
        CosineSchedule(10, period=math.inf)
    with pytest.raises(ValueError, match="phase_delay must be a finite number, got None"):
        CosineSchedule(10, phase_delay=None)
    with pytest.raises(ValueError, match="rounding"):
        CosineSchedule(10, rounding="nearest")


def test_elastic_schedule_ends_without_drops():
    schedule = ElasticSchedule(total_steps=100, update_interval=20, drop_fraction=0.5)
    assert [t for t in range(1, 101) if schedule.is_due(t)] == [20, 40, 60, 75]
    assert schedule.drop_count(60, 100) > 0
    assert schedule.drop_count(75, 100) == 0
    assert not ElasticSchedule(total_steps=100, drop_fraction=0.0).is_due(75)


def test_gradual_schedule():
    schedule = GradualSchedule(100, 20, start_fraction=0.1, end_fraction=0.75)
    assert [t for t in range(1, 101) if schedule.is_due(t)] == [20, 40, 60, 75]
    assert [schedule.remaining(t) for t in (0, 10, 75, 90)] == [1, 1, 0, 0]
    assert schedule.remaining(36) == pytest.approx((1 - 0.4) ** 3)
    assert schedule.drop_count(20, 1000) == 0
    schedule = GradualSchedule(100, 20, end_fraction=0.75, drop_fraction=0.5)
    assert [t for t in range(1, 101) if schedule.is_due(t)] == [20, 40, 60, 75, 80]
    assert schedule.drop_count(50, 1000) == 250


def test_bad_gradual_schedules():
    with pytest.raises(ValueError, match=r"start_fraction 0\.8 and end_fraction 0\.75"):
        GradualSchedule(100, start_fraction=0.8)
    with pytest.raises(ValueError, match=r"end_fraction must be a number in \(0, 1\], got 0"):
        GradualSchedule(100, end_fraction=0)
    with pytest.raises(TypeError, match=r"start_fraction must be a number in .*, got 'x'"):
        GradualSchedule(100, start_fraction="x")


steps = st.integers(1, 60)
shares = st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.75, 1.0])
schedules = st.one_of(
    st.builds(CosineSchedule, steps, steps, shares, st.sampled_from([0.1, 0.29, 0.75, 1.0])),
    st.builds(ElasticSchedule, steps, steps, shares, st.sampled_from([0.1, 0.29, 0.75, 1.0])),
    st.builds(ConstantSchedule, steps, steps, shares),
    st.builds(application, st.just(60), steps, shares, zero_steps=st.integers(0, 59)),
    st.builds(GradualSchedule, st.just(60), steps, shares.map(lambda s: s / 3),
              st.sampled_from([0.4, 0.75, 1.0]), shares),
)  # fmt: skip


@given(schedules, st.integers(1, 70), st.one_of(st.none(), st.integers(1, 100)))
@settings(max_examples=500, deadline=None)
def test_next_due_is_the_first_due_step(schedule, step, window):
    expected = next((s for s in range(step, 200) if schedule.is_due(s)), None)
    assert schedule.next_due(step) == expected
    end = 200 if window is None else step + window
    assert is_due_within(schedule, step, window) == any(map(schedule.is_due, range(step, end)))


def test_next_due_of_a_custom_schedule():
    class Twice(ConstantSchedule):
        def is_due(self, step):
            return step in (3, 7)

    class Endless:
        def is_due(self, step):
            return step == 3

    assert [is_due_within(Twice(9), s, 2) for s in range(1, 9)] == [
        False, True, True, False, False, True, True, False,
    ]  # fmt: skip
    assert [is_due_within(Twice(9), s, None) for s in (1, 7, 8)] == [True, True, False]
    assert is_due_within(Endless(), 9, None)  # it does not say how long the training is
    assert not is_due_within(Endless(), 9, 5)
