"""Wrong values, and checks of the error that they must raise."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

REFUSALS = (ValueError, TypeError, RuntimeError)
LONGEST = 1000
SECONDS = 60  # a call that takes longer hangs; generous, since machines that run tests are busy

# What Python says by itself when a value of the wrong kind gets far enough to be used: no word on
# which argument it was, nor on what was expected.
UNTOLD = (
    "unsupported operand",
    "not supported between",
    "is not iterable",
    "has no len()",
    "is not subscriptable",
    "not callable",
    "must be real number, not",
    "cannot unpack",
    "unhashable",
    "cannot be interpreted as an integer",
    "cannot convert float",
    "math domain",
    "does not support item assignment",
    "bad operand type",
    "zip() argument",
    "argument of type",
    "string indices must",
    "indices must be integers or slices",
    "Boolean value of Tensor",
    "truth value of an array",
    "only integer scalar arrays",
    "only length-1 arrays",
    "not enough values to unpack",
    "too many values to unpack",
    "argument must be",
    "float() arg",
    "int() arg",
)


class Nothing:
    """An object of an unrelated class without useful attributes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "Nothing()"


# Makers, so that no call can change what the next one gets.
FIXED: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "an object": Nothing,
    "text": lambda: "no such thing",
    "empty text": lambda: "",
    "bytes": lambda: b"\x00\xff",
    "nan": lambda: math.nan,
    "infinity": lambda: math.inf,
    "minus infinity": lambda: -math.inf,
    "minus one": lambda: -1,
    "zero": lambda: 0,
    "a fraction": lambda: 0.37,
    "a huge integer": lambda: 2**70,
    "a large integer": lambda: 2**40,
    "a complex number": lambda: 1j,
    "an empty list": list,
    "a list of text": lambda: ["a", "b"],
    "nested lists": lambda: [[[1]], [2]],
    "a dictionary": lambda: {"a": 1},
    "a dictionary of nonsense": lambda: {1: None, None: "b"},
    "a set": lambda: {1, 2},
    "a function": lambda: lambda *args, **named: None,
    "a class": lambda: int,
    "a scalar tensor": lambda: torch.tensor(1.5),
    "a tensor of another shape": lambda: torch.ones(3, 5, 7),
    "an empty tensor": lambda: torch.zeros(0),
    "a tensor without memory": lambda: torch.ones(4, 4, device="meta"),
    "a boolean tensor": lambda: torch.ones(4, dtype=torch.bool),
    "integers out of range": lambda: torch.tensor([-5, 2**40]),
    "nans": lambda: torch.full((4, 4), math.nan),
    "a complex tensor": lambda: torch.ones(4, dtype=torch.complex64),
    "a sparse tensor": lambda: torch.eye(4).to_sparse(),
    "an array of objects": lambda: np.array([None, "a"], dtype=object),
    "an array of text": lambda: np.array(["a", "b"]),
    "an array of another shape": lambda: np.ones((2, 3, 4)),
}


def anything() -> st.SearchStrategy[tuple[str, Callable[[], Any]]]:
    """Draw (name, factory): one of the fixed values, or a number, text or shape."""
    drawn = st.one_of(
        st.integers(-(2**66), -1),
        st.integers(2**31, 2**66),
        st.floats(allow_nan=True, allow_infinity=True),
        st.text(max_size=8),
        st.lists(st.integers(-3, 3), max_size=4),
        st.tuples(st.floats(), st.none()),
    )
    shapes = st.lists(st.integers(0, 5), max_size=4)
    kinds = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
    return st.one_of(
        st.sampled_from(sorted(FIXED.items())),
        drawn.map(lambda value: (repr(value), lambda: value)),
        st.tuples(shapes, kinds).map(
            lambda drawn: (
                f"zeros {drawn[0]} {drawn[1]}",
                lambda: torch.zeros(drawn[0], dtype=drawn[1]),
            )
        ),
    )


@contextmanager
def no_hang() -> Iterator[None]:
    """Raise an AssertionError if a call hangs, where the system has alarms."""
    if not hasattr(signal, "SIGALRM") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_: Any) -> None:
        raise AssertionError(f"the call did not end within {SECONDS} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def fault(error: BaseException, also: tuple[type[BaseException], ...] = ()) -> str | None:
    """Return what is wrong with an error, or None."""
    kind = type(error).__name__
    if not isinstance(error, (*REFUSALS, *also)) or isinstance(
        error, (NotImplementedError, RecursionError)
    ):
        return f"{kind} instead of ValueError, TypeError or RuntimeError: {error}"[:LONGEST]
    text = str(error)
    if not text or len(text) > LONGEST:
        return f"{kind} with a message of {len(text)} characters: {text[:200]}"
    if any(words in text for words in UNTOLD):
        return f"{kind} that does not say which argument is wrong: {text[:200]}"
    return None


def refusal(call: Callable[..., Any], arguments: dict[str, Any]) -> BaseException | None:
    """Return what the call raises, or None if it succeeds."""
    try:
        with no_hang(), torch.random.fork_rng():
            call(**arguments)
    except AssertionError as error:
        return error
    except Exception as error:
        return error
    return None
