"""What happened while a trace was on, by thread."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

Mark = tuple[str, int, int | None, Any]
"""A span: its name, begin and end in nanoseconds, and what is said of it, a dict or None.

A counter: its name, when it got a value, None, and the value."""


class Lane:
    """One thread's spans and counters, in the order of their ends; the last `limit` of them.

    Attributes:
        thread, name: its number in the system, and what Python calls it.
    """

    def __init__(self, limit: int) -> None:
        self.thread = threading.get_native_id()
        self.name = threading.current_thread().name
        self.marks: deque[Mark] = deque(maxlen=limit)

    @property
    def is_full(self) -> bool:
        """Whether earlier ones may have been let go of."""
        return len(self.marks) == self.marks.maxlen


class Recorder(threading.local):
    """All lanes of a trace.

    Times are those of `time.perf_counter_ns`, which the processes of one machine share on Linux.

    Attributes:
        lanes: of all threads that have marked something.
        mark: adds a mark to the lane of the thread that asks. It is one call of C: a span that is
            among the kernels of a step finds none of Python's code in the processor's caches, and
            every line counts several times what it would in a loop.
        forwards: when the calls of watched models under way in this thread began.
    """

    lanes: list[Lane]
    begin: int

    def __init__(self, limit: int, lanes: list[Lane], begin: int) -> None:
        # Called in each thread that asks, with the same arguments.
        self.lanes, self.begin = lanes, begin
        self.forwards: list[int] = []
        lane = Lane(limit)
        lanes.append(lane)
        self.mark: Callable[[Mark], None] = lane.marks.append

    @classmethod
    def started(cls, limit: int) -> Recorder:
        """One that begins now."""
        return cls(limit, [], time.perf_counter_ns())
