"""Changes that a signal must not split."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

# Those that programs turn into exceptions: Ctrl-C, and being asked to end.
_SIGNALS = (int(signal.SIGINT), int(signal.SIGTERM))

# The functions behind those of `signal`, which make enumerations of numbers at ten times the cost.
_get, _set = signal._signal.getsignal, signal._signal.signal  # type: ignore[attr-defined]

_inside = False
_handlers: dict[int, Any] = {}
"""What handles a signal where `_note` stands in for it."""
_caught: dict[int, FrameType | None] = {}
"""Where each signal came that waits; as in the system, several of a kind are one."""


class uninterrupted:
    """Signals whose handlers are Python functions wait until the block has ended.

    Python runs such handlers in the main thread, between any two of its instructions: there Ctrl-C
    becomes a KeyboardInterrupt. In other threads, and inside another such block, this does nothing.
    It costs one to two microseconds.
    """

    __slots__ = ("_outermost",)

    def __enter__(self) -> None:
        global _inside
        self._outermost = False
        if _inside or threading.get_ident() != threading.main_thread().ident:
            return
        # A signal may come here, too. Then the block does not begin, and a stand-in that is left
        # behind passes on what it gets until the next block takes it away.
        for number in _SIGNALS:
            handler = _get(number)
            if callable(handler) and handler is not _note:
                _handlers[number] = handler
                _set(number, _note)
        self._outermost = True
        _inside = True  # from here on signals wait

    def __exit__(self, *_: object) -> None:
        global _inside
        if not self._outermost:
            return
        _inside = False  # from here on they do not
        try:
            for number, handler in _handlers.items():
                if _get(number) is _note:
                    _set(number, handler)
        finally:
            if _caught:
                waiting = dict(_caught)
                _caught.clear()
                _deliver(waiting)


def _note(number: int, frame: FrameType | None) -> None:
    if _inside:
        _caught[number] = frame
    else:
        _handlers[number](number, frame)


def _deliver(waiting: dict[int, FrameType | None]) -> None:
    # A handler may raise: the others are called all the same.
    if waiting:
        number, frame = waiting.popitem()
        try:
            _handlers[number](number, frame)
        finally:
            _deliver(waiting)
