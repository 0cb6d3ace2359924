"""Changes that a signal must not split."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

__all__ = ["uninterrupted"]

# Those that programs turn into exceptions: Ctrl-C, and being asked to end.
_SIGNALS = (signal.SIGTERM, signal.SIGINT)

_inside = False


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Signals whose handlers are Python functions wait until the block has ended.

    Python runs such handlers in the main thread, between any two of its instructions: there Ctrl-C
    becomes a KeyboardInterrupt. In other threads, and inside another such block, this does nothing.
    """
    global _inside
    if _inside or threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {s: h for s in _SIGNALS if callable(h := signal.getsignal(s))}
    caught: list[tuple[int, FrameType | None]] = []

    def note(number: int, frame: FrameType | None) -> None:
        caught.append((number, frame))

    try:
        _inside = True
        for number in handlers:
            signal.signal(number, note)
        yield
    finally:
        _inside = False
        _restore(list(handlers.items()))
        for got, frame in caught:
            handlers[signal.Signals(got)](got, frame)


def _restore(handlers: list[tuple[signal.Signals, Any]]) -> None:
    # A handler that is back may raise before the next one is: that one comes back all the same.
    if handlers:
        number, handler = handlers[0]
        try:
            signal.signal(number, handler)
        finally:
            _restore(handlers[1:])
