"""A rank that is lost: the others raise, whatever became of it."""

from __future__ import annotations

import re
import signal

import lost_ranks as work
import pytest
from processes import ends

ENDED = r"Connection closed by peer|Connection reset by peer|one of them has ended"
MISSING = (
    r"not all ranks came in time: step {} of this rank ends in an update; call "
    r"trainer\.step\(\) as often on every rank; torch says: .*[Rr]ank.*{}"
)


def check(found, who, pattern):
    """One rank raises such a line."""
    assert found[who]["code"] == 1
    assert re.search(pattern, found[who]["line"]), found[who]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "kind", "code"),
    [
        ("replicas", "raises", 1),
        ("replicas", "exits", 3),
        ("replicas", "exits at once", 4),
        *((way, "is killed", -signal.SIGKILL) for way in work.WAYS),
    ],
)
def test_who_has_ended_is_known_at_once(way, kind, code):
    found = ends(2, work.lost, way, kind)
    check(found, 0, ENDED)
    assert found[1]["code"] == code


@pytest.mark.slow
@pytest.mark.parametrize("way", work.WAYS)
def test_who_does_not_come_to_an_update_is_named(way):
    """The first rank waits before the update, and raises; the other waits in a pass, and ends as
    the first has."""
    found = ends(2, work.lost, way, "no step")
    check(found, 0, MISSING.format(3, 1))
    check(found, 1, ENDED)


@pytest.mark.slow
def test_where_the_first_rank_does_not_come_the_limit_of_the_group_holds():
    """It waits in a pass for the other, which waits for it before the update."""
    found = ends(2, work.lost, "replicas", "no backward", wait=10)
    check(found, 0, rf"{ENDED}|[Tt]imed? ?out")
    check(found, 1, rf"{MISSING.format(3, 0)}|{ENDED}")


@pytest.mark.slow
def test_a_step_left_out_ends_all_stages():
    found = ends(4, work.left_out_in_stages)
    assert any(
        re.search("not all ranks came in time: step 2 of this", one["line"]) for one in found
    )
    assert "not all ranks" not in found[3]["line"], found
    assert all(one["code"] == 1 for one in found), found


@pytest.mark.slow
def test_who_sleeps_is_waited_for_and_named():
    found = ends(2, work.lost, "replicas", "sleeps")
    check(found, 0, MISSING.format(3, 1))
