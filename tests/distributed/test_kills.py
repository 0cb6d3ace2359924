"""Trainings whose ranks are killed at random moments resume exactly."""

import kills
import pytest


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "wait"), [("ddp", True), ("fsdp", False)])
def test_killed_ranks_resume_to_the_same_bits(kind, wait):
    expected, _ = kills.run(kind, 2, 0)
    assert len(set(expected)) == 1
    killed = 0
    for _ in range(6):  # a training may be over before its ranks' moments come
        found, now = kills.run(kind, 2, 4, wait=wait)
        assert found == expected
        killed += now
        if killed:
            break
    assert killed > 0
