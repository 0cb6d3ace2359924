"""Recorders that wait for updates from devices, so that nobody misses these."""

from __future__ import annotations

import atexit
from typing import Protocol


class _Waits(Protocol):
    def flush(self) -> None: ...


unwritten: set[_Waits] = set()
"""Held until they have written what they wait for."""


def write_unwritten() -> None:
    """Let all of them wait and write: before a state is saved, which a record must lead to, and
    before a record is read."""
    for recorder in list(unwritten):
        recorder.flush()


atexit.register(write_unwritten)
