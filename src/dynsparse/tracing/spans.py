"""Spans and counters, which take next to no time while no trace is on."""

from __future__ import annotations

import functools
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

from torch.autograd import profiler
from torch.profiler import record_function

from dynsparse._core.checks import shorten

Mark = tuple[str, int, int | None, Any]
"""A span: name, begin and end in nanoseconds, and its arguments, a dict or None.

A counter: name, time, None, and the value."""


class Lane:
    """The last `limit` spans and counters of one thread, in the order of their ends.

    Attributes:
        thread, name: the id of the thread in the system, and its name in Python.
    """

    def __init__(self, limit: int) -> None:
        self.thread = threading.get_native_id()
        self.name = threading.current_thread().name
        self.marks: deque[Mark] = deque(maxlen=limit)

    @property
    def is_full(self) -> bool:
        """Whether earlier marks may have been dropped."""
        return len(self.marks) == self.marks.maxlen


class Recorder(threading.local):
    """All lanes of a trace.

    Times are those of `time.perf_counter_ns`, which the processes of one machine share on Linux.

    Attributes:
        lanes: the lanes of all threads that have marks.
        mark: adds a mark to the lane of the calling thread. It is one C call: between the kernels
            of a step Python's code is not in the processor's caches, and each line takes several
            times as long as in a loop.
        forwards: begins of the running calls of watched models in this thread.
    """

    lanes: list[Lane]
    begin: int

    def __init__(self, limit: int, lanes: list[Lane], begin: int) -> None:
        # Called in each thread that uses it, with the same arguments.
        self.lanes, self.begin = lanes, begin
        self.forwards: list[int] = []
        lane = Lane(limit)
        lanes.append(lane)
        self.mark: Callable[[Mark], None] = lane.marks.append


_Function = TypeVar("_Function", bound=Callable[..., Any])

_recorder: Recorder | None = None


def active_recorder() -> Recorder | None:
    """Return the recorder of the trace that is on, or None."""
    return _recorder


def set_recorder(recorder: Recorder | None) -> None:
    """Set the recorder of all spans from now on; None ends the trace."""
    global _recorder
    _recorder = recorder


def is_traced() -> bool:
    """Whether a trace is on."""
    return _recorder is not None


OFF = nullcontext()
"""The span while no trace is on."""


class Span:
    """A time interval in one thread."""

    __slots__ = ("_about", "_begin", "_name")

    def __init__(self, name: str, about: dict[str, Any]) -> None:
        self._name = name
        self._about = about

    def __enter__(self) -> None:
        self._begin = time.perf_counter_ns()

    def __exit__(self, *_: object) -> None:
        if _recorder is not None:
            _recorder.mark((self._name, self._begin, time.perf_counter_ns(), self._about or None))


class _ProfiledSpan(Span):
    """A span that torch's profiler shows too, which takes several times as long."""

    __slots__ = ("_profiled",)

    def __enter__(self) -> None:
        self._profiled = record_function(self._name)
        self._profiled.__enter__()
        super().__enter__()

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._profiled.__exit__(None, None, None)


def span(name: str, **about: Any) -> Span | nullcontext[None]:
    """Return a context manager whose time is recorded as `name` in the trace that is on, if any.

    torch's profiler shows it too, as a `record_function`. With neither on it takes a third of a
    microsecond.

    Args:
        name: such as "data"; all spans of a name have one colour.
        about: texts and numbers that are shown for a selected span.

    >>> from dynsparse.tracing import span
    >>> with span("data", file="a.txt"):
    ...     pass
    """
    if profiler._is_profiler_enabled:
        return _ProfiledSpan(name, about)
    return OFF if _recorder is None else Span(name, about)


def spanned(name: str) -> Callable[[_Function], _Function]:
    """Return a decorator that records each call of a function as a span."""

    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def call(*args: Any, **named: Any) -> Any:
            if _recorder is None and not profiler._is_profiler_enabled:
                return function(*args, **named)
            with span(name):
                return function(*args, **named)

        return call  # type: ignore[return-value]

    return decorate


def counter(name: str, value: float) -> None:
    """Record a value of the counter `name` in the trace that is on.

    A value that is not finite cannot be drawn and is ignored.

    Args:
        name: such as "loss"; each counter has its own graph.
        value: a number, or a tensor of one element, which synchronises with its device.

    Raises:
        TypeError: not a number.
    """
    recorder = _recorder
    if recorder is None:
        return
    try:
        number = float(value)
    except OverflowError:  # of an integer
        return
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(
            f"value must be a number or a tensor of one, got {shorten(value)}"
        ) from None
    if math.isfinite(number):
        recorder.mark((name, time.perf_counter_ns(), None, number))
