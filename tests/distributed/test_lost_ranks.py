"""If a rank exits, is killed or misses an update, the others raise."""

from __future__ import annotations

import re
import signal

import lost_ranks as work
import pytest
from processes import run_to_failure

ENDED = r"Connection closed by peer|Connection reset by peer|one of them has ended"
MISSING = (
    r"not all ranks came in time: step {} of this rank ends in an update; call "
    r"trainer\.step\(\) as often on every rank; torch says: .*[Rr]ank.*{}"
)


def check_error(found, who, pattern):
    """Check that rank `who` exits with code 1 and an error that matches `pattern`."""
    assert found[who]["code"] == 1
    assert re.search(pattern, found[who]["line"]), found[who]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "kind", "code"),
    [
        ("replicas", "raises", 1),
        ("replicas", "exits at once", 4),
        *((way, "is killed", -signal.SIGKILL) for way in work.WAYS),
    ],
)
def test_other_ranks_detect_an_ended_rank(way, kind, code):
    found = run_to_failure(2, work.train_until_rank_is_lost, way, kind)
    check_error(found, 0, ENDED)
    assert found[1]["code"] == code


@pytest.mark.slow
@pytest.mark.parametrize("way", work.WAYS)
def test_rank_missing_from_an_update_is_named(way):
    """Rank 0 times out before the update and raises; rank 1 waits in its next pass and fails once
    rank 0 has ended."""
    found = run_to_failure(2, work.train_until_rank_is_lost, way, "no step")
    check_error(found, 0, MISSING.format(3, 1))
    check_error(found, 1, ENDED)


@pytest.mark.slow
def test_first_rank_missing_from_a_backward_pass_times_out():
    """Which rank times out first is open: each waits for the other in a different collective."""
    found = run_to_failure(2, work.train_until_rank_is_lost, "replicas", "no backward", wait=10)
    check_error(found, 0, rf"{ENDED}|[Tt]imed? ?out")
    check_error(found, 1, rf"{MISSING.format(3, 0)}|{ENDED}")


@pytest.mark.slow
def test_skipped_step_ends_all_pipeline_stages():
    found = run_to_failure(4, work.skip_a_step_in_a_pipeline)
    assert any(
        re.search("not all ranks came in time: step 2 of this", one["line"]) for one in found
    )
    assert "not all ranks" not in found[3]["line"], found
    assert all(one["code"] == 1 for one in found), found


@pytest.mark.slow
def test_sleeping_rank_is_named_after_the_timeout():
    found = run_to_failure(2, work.train_until_rank_is_lost, "replicas", "sleeps")
    check_error(found, 0, MISSING.format(3, 1))
