"""The host's end of streams."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from dynsparse.checks import check_array
from popsparse.machine.errors import ProgramError
from popsparse.machine.objects import Stream


class Host:
    """Feeds streams to the machine and takes what comes back."""

    def __init__(self) -> None:
        self._ends: dict[Stream, Callable[..., Any]] = {}

    def connect(self, stream: Stream, end: Any) -> None:
        """Connect a stream.

        To the machine: an array [numel] or [k, numel], read row after row and round again, or a
        function without arguments giving [numel]. From the machine: a function that takes
        [numel], or an array [numel] or [k, numel] filled likewise.
        """
        if callable(end):
            self._ends[stream] = end
            return
        array = check_array(f"the end of stream {stream.name!r}", end, "fiub", "numbers")
        if not stream.to_device and array is not end:
            raise TypeError(f"stream {stream.name!r} writes into a NumPy array or a function")
        rows = array[None] if array.ndim == 1 else array
        if rows.ndim != 2 or rows.shape[1] != stream.numel or not len(rows):
            raise ValueError(
                f"stream {stream.name!r} needs [{stream.numel}] or [k, {stream.numel}], got "
                f"{list(array.shape)}"
            )
        turn = itertools.cycle(range(len(rows)))

        def fill(values: np.ndarray) -> None:
            rows[next(turn)] = values

        self._ends[stream] = (lambda: rows[next(turn)]) if stream.to_device else fill

    def _end(self, stream: Stream) -> Callable[..., Any]:
        if stream not in self._ends:
            raise ProgramError(f"stream {stream.name!r} is not connected: call engine.connect")
        return self._ends[stream]

    def fetch(self, stream: Stream) -> np.ndarray:
        """The next values for the machine, [numel]."""
        values = np.asarray(self._end(stream)())
        if values.shape != (stream.numel,):
            raise ValueError(
                f"stream {stream.name!r} needs [{stream.numel}], got {list(values.shape)}"
            )
        return values

    def deliver(self, stream: Stream, values: np.ndarray) -> None:
        """Hand values from the machine to the host."""
        self._end(stream)(values.reshape(-1))
