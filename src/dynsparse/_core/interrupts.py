"""Blocks that a signal must not interrupt."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

# Those that programs turn into exceptions: Ctrl-C, and a request to terminate.
_SIGNALS = (int(signal.SIGINT), int(signal.SIGTERM))

# `signal.signal` converts numbers to enumerations, which takes ten times as long.
_get, _set = signal._signal.getsignal, signal._signal.signal  # type: ignore[attr-defined]

_inside = False
_handlers: dict[int, Any] = {}
"""Signal -> its handler, while `_record_signal` is installed in its place."""
_pending: dict[int, FrameType | None] = {}
"""Deferred signal -> its frame; as in the system, several of a kind are one."""


class defer_signals:
    """Defer signals whose handlers are Python functions until the block has ended.

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
        # A signal may come here, too. Then the block does not begin, and a `_record_signal` that
        # stays installed passes signals on until the next block removes it.
        for number in _SIGNALS:
            handler = _get(number)
            if callable(handler) and handler is not _record_signal:
                _handlers[number] = handler
                _set(number, _record_signal)
        self._outermost = True
        _inside = True  # from here on signals are deferred

    def __exit__(self, *_: object) -> None:
        global _inside
        if not self._outermost:
            return
        _inside = False  # from here on they are delivered
        try:
            for number, handler in _handlers.items():
                if _get(number) is _record_signal:
                    _set(number, handler)
        finally:
            if _pending:
                signals = dict(_pending)
                _pending.clear()
                _deliver(signals)


def _record_signal(number: int, frame: FrameType | None) -> None:
    if _inside:
        _pending[number] = frame
    else:
        _handlers[number](number, frame)


def _deliver(signals: dict[int, FrameType | None]) -> None:
    # A handler may raise; the others are called all the same.
    if signals:
        number, frame = signals.popitem()
        try:
            _handlers[number](number, frame)
        finally:
            _deliver(signals)
