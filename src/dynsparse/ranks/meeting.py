"""A barrier before an update: who waits there looks around, and does not wait for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from dynsparse.files.shorten import shortened
from dynsparse.ranks.pulse import LOOK, Pulse

__all__ = ["first_line", "meet"]


def meet(group: Any, pulse: Pulse | None, what: str, patience: float) -> None:
    """Wait until all ranks of a group of gloo are here.

    Args:
        pulse: that of this process, where there is one.
        what: for the error: what they are here for, and how it is mended.
        patience: seconds.

    Raises:
        RuntimeError: some did not come in this time, or never will, since they wait for others.
    """
    barrier = _Barrier(group, patience)
    who = ""
    if pulse is None:
        barrier.wait()
    else:
        numbers = torch.distributed.get_process_group_ranks(group)
        pulse.meets(True)
        try:
            while not barrier.wait(LOOK):
                line = pulse.cannot_come(numbers, what)
                if line:
                    time.sleep(1.5 * LOOK)  # so that those who wait elsewhere can say so, too
                    raise RuntimeError(line)
            if barrier.error is not None:
                who = _heard(pulse, numbers)
        finally:
            pulse.meets(False)
    if barrier.error is not None:
        raise RuntimeError(
            f"not all ranks came within {patience:g} s: {who and who + '; '}{what}; torch says: "
            f"{first_line(barrier.error)}"
        ) from barrier.error


def _heard(pulse: Pulse, numbers: Sequence[int]) -> str:
    """Where those are that are not here.

    Raises:
        RuntimeError: a rank that waited here has said why nobody comes.
    """
    try:
        line, who = pulse.line(), pulse.told_by(numbers, "works", "waits")
    except RuntimeError:  # who kept the store has ended
        return ""
    if line:
        raise RuntimeError(line)
    return who


class _Barrier:
    """In a thread of its own, so that who waits is free."""

    def __init__(self, group: Any, seconds: float) -> None:
        self.error: RuntimeError | None = None
        self._over = threading.Event()
        arguments = group, timedelta(seconds=seconds)
        threading.Thread(target=self._meet, args=arguments, daemon=True, name="meeting").start()

    def _meet(self, group: Any, limit: timedelta) -> None:
        try:
            torch.distributed.monitored_barrier(group, timeout=limit, wait_all_ranks=True)
        except RuntimeError as error:
            self.error = error
        finally:
            self._over.set()

    def wait(self, seconds: float | None = None) -> bool:
        """Whether it is over, within so long."""
        return self._over.wait(seconds)


def first_line(error: BaseException) -> str:
    """Of what torch says, shortened."""
    return shortened(str(error).partition("\n")[0])[1:-1]
