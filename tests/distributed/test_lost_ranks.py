"""A rank that is lost: the others hear of it within seconds, whatever became of it."""

from __future__ import annotations

import re
import signal
import threading

import lost_ranks as work
import pytest
import torch
from processes import ends

from dynsparse.ranks import pulse

SOON = 30.0  # seconds: eight, and what a busy machine adds; the limit is at a hundred and more
ENDED = r"Connection closed by peer|Connection reset by peer|one of them has ended"
NEVER = (
    r"every rank waits for others, and not all here: rank {} has taken 2 steps and waits for the "
    r"others at rank_trainings\.py:\d+ in backward; step 3 of this rank ends in an update; call "
    r"trainer\.step\(\) as often on every rank"
)


def check(found, who, pattern):
    """One rank raises such a line, in time."""
    assert found[who]["code"] == 1
    assert re.search(pattern, found[who]["line"]), found[who]
    assert found[who]["after"] < SOON


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
@pytest.mark.parametrize(
    ("way", "kind", "lost"),
    [("replicas", "no backward", 0), *((way, "no step", 1) for way in work.WAYS)],
)
def test_who_waits_elsewhere_is_told_from_who_is_slow(way, kind, lost):
    """One rank waits before the update, and raises; the other waits in a pass, where it logs the
    same line, and ends as the first has."""
    found = ends(2, work.lost, way, kind)
    check(found, 1 - lost, NEVER.format(lost))
    check(found, lost, ENDED)
    assert [f"RuntimeError: {line}" for line in found[lost]["log"]] == [found[1 - lost]["line"]]


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_in_stages_all_hear_who_has_left_out_a_step(replicas):
    found = ends(2 * replicas, work.left_out_in_stages, replicas)
    who = 2 * replicas - 1
    line = rf"every rank waits for others, and not all here: rank {who} has taken \d steps and"
    told = [[one["line"].removeprefix("RuntimeError: "), *one["log"]] for one in found]
    said = [{text for text in texts if re.match(line, text)} for texts in told]
    assert all(texts == said[0] and len(texts) == 1 for texts in said), found
    assert all(one["code"] == 1 and one["after"] < SOON for one in found), found


@pytest.mark.slow
def test_who_sleeps_is_waited_for_and_named():
    found = ends(2, work.lost, "replicas", "sleeps")
    check(found, 0, r"not all ranks came within 6 s: rank 1 has taken 2 steps and is at "
                    r"lost_ranks\.py:\d+ in lost; step 3 of this rank ends")  # fmt: skip


@pytest.mark.slow
def test_where_no_rank_can_end_it_all_say_where_they_wait():
    found = ends(2, work.lost, "replicas", "has no more batches", wait=25)
    line = (
        r"every rank waits for others: rank 0 has taken 2 steps and waits for the others at "
        r"rank_trainings\.py:\d+ in backward; rank 1 has taken 2 steps and waits for the others at "
        r"lost_ranks\.py:\d+ in lost; let all ranks make the same passes and moves"
    )
    for one in found:
        assert len(one["log"]) == 1
        assert re.fullmatch(line, one["log"][0])
        assert one["code"] == 1  # by torch's limit


class World:
    """Two ranks whose pulses are looked at by hand; each takes its steps in a thread."""

    def __init__(self, monkeypatch, *stays):
        monkeypatch.setattr(pulse, "LOOK", 3600.0)
        monkeypatch.setattr(pulse, "STILL", 0.0)
        monkeypatch.setattr(pulse, "_spent", lambda thread: self.spent.get(thread, "0"))
        store = torch.distributed.HashStore()
        self.spent = {}
        self.pulses = [pulse.Pulse(store, rank, 2) for rank in range(2)]
        self.over = threading.Event()
        self.threads = []
        for own, stay in zip(self.pulses, stays, strict=True):
            begun = threading.Event()
            thread = threading.Thread(target=self.live, args=(own, stay, begun), daemon=True)
            thread.start()
            assert begun.wait(10)
            self.threads.append(thread.native_id)

    def live(self, own, stay, begun):
        own.beat(7)
        begun.set()
        stay(self.over)

    def look(self):
        for own in self.pulses:
            own.look()
        return self.pulses[0].cannot_come([0, 1], "come")


def in_a_move(over):
    """As a rank does that waits in a collective: by its file."""
    code = compile("over.wait(60)", torch.distributed.__file__, "exec")
    exec(code, {"over": over})


def elsewhere(over):
    over.wait(60)


@pytest.fixture
def world(monkeypatch):
    made = []

    def make(*stays):
        made.append(World(monkeypatch, *stays))
        return made[-1]

    yield make
    for one in made:
        one.over.set()


def test_all_that_wait_are_named_after_some_looks(world):
    both = world(in_a_move, in_a_move)
    both.pulses[0].meets(True)
    lines = [both.look() for _ in range(5)]
    assert lines[:2] == ["", ""]
    assert re.fullmatch(
        r"every rank waits for others, and not all here: rank 1 has taken 7 steps and waits for "
        r"the others at test_lost_ranks\.py:\d+ in in_a_move; come", lines[-1],
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["elsewhere", "computes", "steps"])
def test_who_may_come_is_waited_for(world, kind):
    both = world(in_a_move, elsewhere if kind == "elsewhere" else in_a_move)
    both.pulses[0].meets(True)
    for i in range(8):
        if kind == "computes":
            both.spent[both.threads[1]] = str(i)
        if kind == "steps" and i % 2:
            both.pulses[1]._last = float("inf")
        elif kind == "steps":
            both.pulses[1]._last = 0.0
        assert both.look() == ""
    if kind != "steps":
        told = both.pulses[0].told_by([1], "works")
        assert told.startswith("rank 1 has taken 7 steps and is at test_lost_ranks.py:")
