"""Test doubles for `Ranks`: threads of one process, and a single rank that counts its traffic."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from dynsparse.ranks import Ranks, grow

_Result = TypeVar("_Result")


class BrokenCollectiveError(Exception):
    """A rank did not take part in a collective."""


@contextmanager
def force_exchange(kind: str | None) -> Iterator[None]:
    """Make growth exchange "gradients" or "samples" of all layers; None: whatever sends less."""
    with pytest.MonkeyPatch.context() as patch:
        if kind is not None:
            volumes = (0.0, 1.0) if kind == "gradients" else (1.0, 0.0)
            patch.setattr(grow, "comm_volume", lambda *_: volumes)
        yield


class ThreadRanks(Ranks):
    """One of several ranks, each a thread of this process.

    If a rank has ended, or misses a collective for longer than the time limit, the others raise
    `BrokenCollectiveError`.
    """

    def __init__(self, rank: int, meeting: _Rendezvous) -> None:
        super().__init__(rank, len(meeting.arguments))
        self._rendezvous = meeting

    def _reduce(self, tensor: Tensor, how: str) -> None:
        parts = self._rendezvous.all(self.rank, tensor.clone())
        total = parts[0].clone()
        for part in parts[1:]:
            if how == "sum":
                total += part
            else:
                torch.maximum(total, part, out=total)
        tensor.copy_(total)

    def _broadcast(self, tensor: Tensor) -> None:
        tensor.copy_(self._rendezvous.all(self.rank, tensor.clone())[0])

    def _gather(self, out: Tensor, tensor: Tensor) -> None:
        out.copy_(torch.stack(self._rendezvous.all(self.rank, tensor.clone())))

    def _exchange(
        self, out: Tensor, tensor: Tensor, coming: Sequence[int], sizes: Sequence[int]
    ) -> None:
        pieces = self._rendezvous.all(self.rank, tensor.clone().split(list(sizes)))
        got = [piece[self.rank] for piece in pieces]
        if [len(piece) for piece in got] != list(coming):
            raise ValueError(f"rank {self.rank} expected {list(coming)} entries, got other numbers")
        out.copy_(torch.cat(got))


class _Rendezvous:
    """Exchanges the arguments of each collective between the threads."""

    def __init__(self, size: int, seconds: float) -> None:
        self.arguments: list[list[Any]] = [[] for _ in range(size)]
        self._seconds = seconds
        self._has_ended = [False] * size
        self._condition = threading.Condition()
        self._readers: dict[int, int] = {}

    def all(self, rank: int, thing: Any) -> list[Any]:
        with self._condition:
            move = len(self.arguments[rank])
            self.arguments[rank].append(thing)
            self._condition.notify_all()
            there = self._condition.wait_for(lambda: self._is_decided(move), self._seconds)
            missing = [other for other, of in enumerate(self.arguments) if len(of) <= move]
            if missing:
                why = "do not come" if not there else "have ended"
                raise BrokenCollectiveError(f"move {move}: of the ranks, {missing} {why}")
            found = [of[move] for of in self.arguments]
            self._readers[move] = self._readers.get(move, 0) + 1
            if self._readers[move] == len(self.arguments):
                for of in self.arguments:
                    of[move] = None  # all have read it
            return found

    def _is_decided(self, move: int) -> bool:
        """Return whether all ranks have arrived, or some have ended and never will."""
        missing = [rank for rank, of in enumerate(self.arguments) if len(of) <= move]
        return not missing or any(self._has_ended[rank] for rank in missing)

    def leave(self, rank: int) -> None:
        with self._condition:
            self._has_ended[rank] = True
            self._condition.notify_all()


def in_threads(
    size: int, work: Callable[[ThreadRanks], _Result], seconds: float = 60.0
) -> list[_Result | BaseException]:
    """Run `work(ranks)` on `size` ranks, each a thread; return its result or error per rank.

    Args:
        seconds: how long a rank waits for the others in one collective.
    """
    meeting = _Rendezvous(size, seconds)
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadRanks(rank, meeting))
        except BaseException as error:
            results[rank] = error
        finally:
            meeting.leave(rank)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


class CountingRanks(Ranks):
    """One of `size` ranks, the others of which pass the same arguments to each collective.

    Results are correct for that case: sums are multiples, gathered parts are copies. `sent` and
    `calls` count as on a real rank.
    """

    def __init__(self, size: int, rank: int = 0) -> None:
        super().__init__(rank, size)

    def _reduce(self, tensor: Tensor, how: str) -> None:
        if how == "sum":
            tensor.mul_(self.size)

    def _exchange(
        self, out: Tensor, tensor: Tensor, coming: Sequence[int], sizes: Sequence[int]
    ) -> None:
        own = tensor.split(list(sizes))[self.rank]
        for piece in out.split(list(coming)):
            piece.copy_(own[: len(piece)])
