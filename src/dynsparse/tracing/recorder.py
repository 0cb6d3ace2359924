"""What happened while a trace was on, by thread."""

from __future__ import annotations

import threading
import time
from typing import Any, NamedTuple

__all__ = ["Lane", "Mark", "Recorder"]


class Mark(NamedTuple):
    """A span [begin, end] in nanoseconds, or a counter's value at `begin`.

    `about` is what is said of a span beside its name; `end` is None for counters.
    """

    name: str
    begin: int
    end: int | None
    about: Any


class Lane:
    """One thread's spans and counters, in the order of their ends.

    Attributes:
        thread, name: its number in the system, and what Python calls it.
        marks: as tuples of `Mark`'s fields, which take a third of the time to make.
        open: the names of the spans under way, outermost first.
        left_out: how many came after the lane was full.
        forwards: when the calls of watched models under way began; None for those inside others.
    """

    __slots__ = ("forwards", "left_out", "limit", "marks", "name", "open", "thread")

    def __init__(self, limit: int) -> None:
        self.thread = threading.get_native_id()
        self.name = threading.current_thread().name
        self.limit = limit
        self.marks: list[tuple[str, int, int | None, Any]] = []
        self.open: list[str] = []
        self.forwards: list[int | None] = []
        self.left_out = 0

    def add(self, name: str, begin: int, end: int | None, about: Any = None) -> None:
        if len(self.marks) < self.limit:
            self.marks.append((name, begin, end, about))
        else:
            self.left_out += 1


class Recorder:
    """All lanes of a trace.

    Times are those of `time.perf_counter_ns`, which the processes of one machine share on Linux.

    Args:
        limit: how many spans and counters a lane holds; those that come later are counted only.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.lanes: list[Lane] = []
        self.begin = time.perf_counter_ns()
        self._own = threading.local()

    def lane(self) -> Lane:
        """Of the thread that asks."""
        try:
            lane: Lane = self._own.lane
        except AttributeError:
            lane = self._own.lane = Lane(self.limit)
            self.lanes.append(lane)
        return lane
