"""Ranks as threads of one process, and ranks without peers that count what they send."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from dynsparse.ranks import Ranks

_Result = TypeVar("_Result")


class BrokenMoveError(Exception):
    """Somebody did not come to a move."""


class ThreadRanks(Ranks):
    """One of several threads that decide together.

    A rank that has ended, or does not come within the time limit, ends the others' waiting with
    `BrokenMoveError`.
    """

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        super().__init__(rank, len(meeting.brought))
        self._meeting = meeting

    def _reduce(self, tensor: Tensor, how: str) -> None:
        parts = self._meeting.all(self.rank, tensor.clone())
        total = parts[0].clone()
        for part in parts[1:]:
            if how == "sum":
                total += part
            else:
                torch.maximum(total, part, out=total)
        tensor.copy_(total)

    def _broadcast(self, tensor: Tensor, source: int) -> None:
        tensor.copy_(self._meeting.all(self.rank, tensor.clone())[source])

    def _gather(self, out: Tensor, tensor: Tensor) -> None:
        out.copy_(torch.stack(self._meeting.all(self.rank, tensor.clone())))

    def _exchange(
        self, out: Tensor, tensor: Tensor, coming: Sequence[int], sizes: Sequence[int]
    ) -> None:
        pieces = self._meeting.all(self.rank, tensor.clone().split(list(sizes)))
        got = [piece[self.rank] for piece in pieces]
        if [len(piece) for piece in got] != list(coming):
            raise ValueError(f"rank {self.rank} expected {list(coming)} entries, got other numbers")
        out.copy_(torch.cat(got))


class _Meeting:
    """Where the threads lay down what they bring to each move, and see what the others brought."""

    def __init__(self, size: int, seconds: float) -> None:
        self.brought: list[list[Any]] = [[] for _ in range(size)]
        self._seconds = seconds
        self._gone = [False] * size
        self._news = threading.Condition()
        self._readers: dict[int, int] = {}

    def all(self, rank: int, thing: Any) -> list[Any]:
        with self._news:
            move = len(self.brought[rank])
            self.brought[rank].append(thing)
            self._news.notify_all()
            there = self._news.wait_for(lambda: self._settled(move), self._seconds)
            missing = [other for other, of in enumerate(self.brought) if len(of) <= move]
            if missing:
                why = "do not come" if not there else "have ended"
                raise BrokenMoveError(f"move {move}: of the ranks, {missing} {why}")
            found = [of[move] for of in self.brought]
            self._readers[move] = self._readers.get(move, 0) + 1
            if self._readers[move] == len(self.brought):
                for of in self.brought:
                    of[move] = None  # all have read it
            return found

    def _settled(self, move: int) -> bool:
        """Whether all have come, or some never will."""
        missing = [rank for rank, of in enumerate(self.brought) if len(of) <= move]
        return not missing or any(self._gone[rank] for rank in missing)

    def leave(self, rank: int) -> None:
        with self._news:
            self._gone[rank] = True
            self._news.notify_all()


def in_threads(
    size: int, work: Callable[[ThreadRanks], _Result], seconds: float = 60.0
) -> list[_Result | BaseException]:
    """What `work(ranks)` returns or raises on each of `size` ranks, each a thread.

    Args:
        seconds: how long a rank waits for the others in one move.
    """
    meeting = _Meeting(size, seconds)
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
    """One of `size` ranks of which the others bring exactly what this one brings.

    What comes out is right for that case: sums are multiples, gathered parts are copies. `sent` and
    `calls` are those of a real rank.
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
