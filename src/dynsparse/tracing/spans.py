"""Spans and counters: what programs put into a trace, at next to no cost while none is on."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any, TypeVar

from torch.autograd import profiler
from torch.profiler import record_function

from dynsparse.tracing.recorder import Lane, Recorder

__all__ = ["OFF", "Span", "begun", "counter", "current", "is_traced", "record", "span", "spanned"]

_Function = TypeVar("_Function", bound=Callable[..., Any])

_recorder: Recorder | None = None


def current() -> Recorder | None:
    """Where spans go just now."""
    return _recorder


def record(recorder: Recorder | None) -> None:
    """Let spans go there from now on; None for nowhere."""
    global _recorder
    _recorder = recorder


def is_traced() -> bool:
    """Whether a trace is on, which counters are for."""
    return _recorder is not None


class _Off:
    """A span that nobody watches."""

    __slots__ = ()

    def __enter__(self) -> None:
        return

    def __exit__(self, *_: object) -> None:
        return

    def begin(self) -> None:
        return

    def end(self) -> None:
        return


OFF = _Off()
"""The span of nothing."""


class Span:
    """A stretch of time, as a context or from `begin` to `end`, in one thread.

    One that is begun and never ended, as behind an error, is not in the trace.
    """

    __slots__ = ("_about", "_begin", "_lane", "_name", "_seen")

    def __init__(self, name: str, about: dict[str, Any]) -> None:
        self._name = name
        self._about = about

    def begin(self) -> None:
        self._seen: Any = None
        # Some microseconds, several times what the rest of a span takes.
        if profiler._is_profiler_enabled:
            self._seen = record_function(self._name)
            self._seen.__enter__()
        recorder = _recorder
        self._lane: Lane | None = None if recorder is None else recorder.lane()
        self._begin = time.perf_counter_ns()

    def end(self) -> None:
        end = time.perf_counter_ns()
        if self._lane is not None:
            self._lane.add(self._name, self._begin, end, self._about)
        if self._seen is not None:
            self._seen.__exit__(None, None, None)

    def __enter__(self) -> None:
        self.begin()
        if self._lane is not None:
            self._lane.open.append(self._name)

    def __exit__(self, *_: object) -> None:
        if self._lane is not None:
            self._lane.open.pop()
        self.end()


def span(name: str, **about: Any) -> AbstractContextManager[None]:
    """A context whose time stands under `name` in the trace that is on, if there is one.

    torch's profiler shows it, too, as what its `record_function` would be. With neither on it costs
    a fifth of a microsecond.

    Args:
        name: such as "data"; all spans of a name are drawn in one colour.
        about: shown beside a span that is clicked: texts and numbers.

    >>> from dynsparse.tracing import span
    >>> with span("data", file="a.txt"):
    ...     pass
    """
    return begun(name, **about)


def begun(name: str, **about: Any) -> Span | _Off:
    """As `span`, for `begin` and `end`."""
    if _recorder is None and not profiler._is_profiler_enabled:
        return OFF
    return Span(name, about)


def spanned(name: str) -> Callable[[_Function], _Function]:
    """A decorator: each call of a function stands as a span of that name in the trace."""

    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def call(*args: Any, **named: Any) -> Any:
            if _recorder is None and not profiler._is_profiler_enabled:
                return function(*args, **named)
            with Span(name, {}):
                return function(*args, **named)

        return call  # type: ignore[return-value]

    return decorate


def counter(name: str, value: float) -> None:
    """Let the counter `name` of the trace that is on have a value from now on.

    A value that is not finite cannot be drawn, and is left out.

    Args:
        name: such as "loss"; each has a graph of its own.
        value: a number, or a tensor of one, for which a device is waited for.

    Raises:
        TypeError, ValueError, RuntimeError: no number.
    """
    recorder = _recorder
    if recorder is None:
        return
    with suppress(OverflowError):  # as an integer may be
        if math.isfinite(number := float(value)):
            recorder.lane().add(name, time.perf_counter_ns(), None, number)
