"""Spans and counters: what programs put into a trace, at next to no cost while none is on."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from typing import Any, TypeVar

from torch.autograd import profiler
from torch.profiler import record_function

from dynsparse.files.shorten import shortened
from dynsparse.tracing.recorder import Recorder

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


OFF = _Off()
"""The span of nothing."""


class Span:
    """A stretch of time in one thread. One that is not left, as behind an error, is in no trace."""

    __slots__ = ("_about", "_begin", "_name")

    def __init__(self, name: str, about: dict[str, Any]) -> None:
        self._name = name
        self._about = about

    def __enter__(self) -> None:
        self._begin = time.perf_counter_ns()

    def __exit__(self, *_: object) -> None:
        if _recorder is not None:
            _recorder.mark((self._name, self._begin, time.perf_counter_ns(), self._about or None))


class _Shown(Span):
    """One that torch's profiler shows, too, which takes several times as long."""

    __slots__ = ("_seen",)

    def __enter__(self) -> None:
        self._seen = record_function(self._name)
        self._seen.__enter__()
        super().__enter__()

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._seen.__exit__(None, None, None)


def span(name: str, **about: Any) -> Span | _Off:
    """A context whose time stands under `name` in the trace that is on, if there is one.

    torch's profiler shows it, too, as what its `record_function` would be. With neither on it costs
    a third of a microsecond.

    Args:
        name: such as "data"; all spans of a name are drawn in one colour.
        about: shown beside a span that is clicked: texts and numbers.

    >>> from dynsparse.tracing import span
    >>> with span("data", file="a.txt"):
    ...     pass
    """
    if profiler._is_profiler_enabled:
        return _Shown(name, about)
    return OFF if _recorder is None else Span(name, about)


def spanned(name: str) -> Callable[[_Function], _Function]:
    """A decorator: each call of a function stands as a span of that name in the trace."""

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
    """Let the counter `name` of the trace that is on have a value from now on.

    A value that is not finite cannot be drawn, and is left out.

    Args:
        name: such as "loss"; each has a graph of its own.
        value: a number, or a tensor of one, for which a device is waited for.

    Raises:
        TypeError: no number.
    """
    recorder = _recorder
    if recorder is None:
        return
    try:
        number = float(value)
    except OverflowError:  # as an integer may be
        return
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(
            f"value must be a number or a tensor of one, got {shortened(value)}"
        ) from None
    if math.isfinite(number):
        recorder.mark((name, time.perf_counter_ns(), None, number))
