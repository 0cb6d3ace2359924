"""Who waits for whom: tells a rank that cannot come to an update from one that is slow.

A rank that has left out a step of its trainer is in the next pass, in a collective, where it waits
for the others; they wait for it before the update. Nobody computes, and nobody ever will. So a
thread of each rank looks, once a second, at where the rank is when its trainer has taken no step
for a while, and tells the others through the store of torch.distributed how many ranks wait. Where
all do, over several looks, none can help another. A rank that computes, reads or sleeps may still
come.

A step costs this two assignments; nothing is sent while steps follow one another.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch

__all__ = ["Pulse", "pulse_of"]

LOOK = 1.0  # seconds between looks
STILL = 2.0  # without a step before a rank is looked at
LOOKS = 2  # in a row in which nothing has changed since all ranks wait, until that is for good

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OWN = os.path.dirname(os.path.dirname(__file__)) + os.sep
_PYTHONS = os.path.dirname(threading.__file__) + os.sep
LONG = 10  # the same where nobody can do more than say so

# Where Python is while a rank waits for others.
_MOVES = (
    os.path.join(_TORCH, "distributed", ""),
    os.path.join(_TORCH, "nn", "parallel", ""),
    os.path.join(_TORCH, "autograd", "graph.py"),
    os.path.join(_OWN, "ranks", ""),
)

_log = logging.getLogger(__name__)


class Pulse:
    """What this process knows of the ranks of its world, and tells them of itself.

    Args:
        store: of torch.distributed, for this alone.
        rank, size: in the world.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._last, self._steps = time.monotonic(), 0
        self._meets = False
        self._thread = 0  # the system's number of that which takes the steps
        self._ident = 0  # Python's
        self._spent = ""
        self._told = self._state = self._said = ""
        self._looks, self._seen = 0, (0, 0)
        threading.Thread(target=_watch, args=(ref(self),), daemon=True, name="pulse").start()

    def beat(self, steps: int) -> None:
        """The trainer of this rank has taken a step, in the thread that calls this."""
        self._last, self._steps = time.monotonic(), steps
        if self._ident != threading.get_ident():
            self._ident, self._thread = threading.get_ident(), threading.get_native_id()

    def meets(self, here: bool) -> None:
        """This rank waits for others before an update from now on; or no more."""
        self._meets, self._looks = here, 0

    def cannot_come(self, numbers: Sequence[int], what: str) -> str:
        """What to say of those of these ranks of the world that wait for ever, "" where that is
        open. To be asked every `LOOK` seconds by who waits for them.

        Args:
            what: they should have come for, and how it is mended.
        """
        line = self.line()
        if line:
            return line
        who = self.told_by(numbers, "waits") if self._all_wait() >= LOOKS else ""
        if not who:
            return ""
        line = f"every rank waits for others, and not all here: {who}; {what}"
        self._store.set("line", line)
        return line

    def _all_wait(self) -> int:
        """In how many looks in a row, this one left out, all ranks have waited."""
        now = self._store.add("waiting", 0), self._store.add("changes", 0)
        self._looks = self._looks + 1 if now == self._seen and now[0] == self._size else 0
        self._seen = now
        return self._looks

    def line(self) -> str:
        """What a rank that ends for that reason has said, which the others say as well."""
        found: str = self._store.get("line").decode() if self._store.check(["line"]) else ""
        return found

    def told_by(self, numbers: Sequence[int], *kinds: str) -> str:
        """What ranks of the world have told last of where they are, of those in such a state."""
        found = []
        for number in numbers:
            if self._store.check([str(number)]):
                kind, _, text = self._store.get(str(number)).decode().partition(" ")
                if kind in kinds:
                    found.append(f"rank {number} {text}")
        return "; ".join(found)

    def look(self) -> None:
        """Tell the others of this rank, if there is something new."""
        if not self._ident:
            return
        state = text = ""
        if time.monotonic() - self._last > STILL:
            state, text = self._where()
        if text != self._told:
            self._store.set(str(self._rank), text)
        stands, stood = (one in ("waits", "meets") for one in (state, self._state))
        if stands != stood:
            self._store.add("changes", 1)
            self._store.add("waiting", 1 if stands else -1)
        self._told, self._state = text, state
        if state == "waits":
            # Where no rank waits before an update, none can end it, and torch's limit holds.
            looks = self._all_wait()
            line = self.line() or (self._who_waits() if looks == LONG else "")
            if line and line != self._said:
                _log.error("%s", line)
                # The last that is heard of this rank, whether anybody listens to logs or not.
                print(line, file=sys.stderr, flush=True)
                self._said = line

    def _who_waits(self) -> str:
        who = self.told_by(range(self._size), "waits")
        return f"every rank waits for others: {who}; let all ranks make the same passes and moves"

    def _where(self) -> tuple[str, str]:
        """ "meets", "waits" or "works", and that with how far the rank has come and where it is."""
        spent, self._spent = self._spent, _spent(self._thread)
        frame = sys._current_frames().get(self._ident)
        if frame is None or not self._spent:
            return "", ""
        moves, place = _place(frame)
        if self._meets:
            state = "meets"
        else:
            state = "waits" if moves and spent == self._spent else "works"
        what = "is" if state == "works" else "waits for the others"
        return state, f"{state} has taken {self._steps} steps and {what} {place}"


def _watch(pulse: ref[Pulse]) -> None:
    """Looks as long as there is something to look at."""
    while True:
        time.sleep(LOOK)
        held = pulse()
        if held is None:
            return
        try:
            held.look()
        except Exception:  # the store is gone, and so is who kept it
            return
        del held


def _spent(thread: int) -> str:
    """What the system says of a thread that sleeps: how much it has computed; "" of others."""
    try:
        with open(f"/proc/self/task/{thread}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:  # it has ended; or another system, where all ranks may just be slow
        return ""
    return f"{fields[11]} {fields[12]}" if fields[0] == "S" else f"computes at {time.monotonic()}"


def _place(frame: FrameType) -> tuple[bool, str]:
    """Whether a stack is in a move among ranks, and where that was called from: the innermost line
    outside torch, Python's own modules and this library."""
    moves = False
    place: FrameType | None = frame
    while place is not None and place.f_code.co_filename.startswith((_TORCH, _OWN, _PYTHONS)):
        moves = moves or place.f_code.co_filename.startswith(_MOVES)
        place = place.f_back
    seen = place or frame
    file = os.path.basename(seen.f_code.co_filename)
    return moves, f"at {file}:{seen.f_lineno} in {seen.f_code.co_name}"


_known: WeakKeyDictionary[Any, Pulse] = WeakKeyDictionary()
_worlds = 0


def pulse_of() -> Pulse | None:
    """That of the world of torch.distributed; None where its store cannot be had."""
    global _worlds
    dist = torch.distributed
    world = dist.group.WORLD
    if world in _known:
        return _known[world]
    find: Any = getattr(dist.distributed_c10d, "_get_default_store", None)
    if world is None or find is None:
        return None
    _worlds += 1
    store = dist.PrefixStore(f"dynsparse/pulse/{_worlds}", find())
    made = _known[world] = Pulse(store, dist.get_rank(), dist.get_world_size())
    return made
