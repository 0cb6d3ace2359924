"""Ranks that find out whether they agree, and that raise the same error where they do not.

A rank that raises while the others go on would leave them waiting for its next move. So whatever
may fail on one rank alone happens inside `agreeing`, and everybody hears of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from types import TracebackType

import numpy as np
import torch
from torch import Tensor

from dynsparse import native
from dynsparse.ranks.ranks import Ranks

_KINDS = (ValueError, TypeError, RuntimeError, MemoryError)
_LONGEST = 2000  # characters of an error that travel


class agreeing:
    """Raises on every rank what one of them raises in the block, in one line that names the ranks.

    Every rank enters and leaves it at the same place, and makes no move inside: a rank that has
    failed would not make it. Costs one sum of 4 bytes. Alone it does nothing. Where
    the ranks are a line of a mesh, everyone of the mesh hears.

    Args:
        ranks: that hear of each other's errors.
        numbers: that go along in the same move, 8 bytes each: as many on all ranks, of 64 bits.
            Behind the block they are those of all of `ranks` together.
        how: these come together: "highest" or "sum".

    Raises:
        ValueError, TypeError, RuntimeError, MemoryError: of the kind that was raised, if it was one
            kind; where all ranks say the same, as they say it. What is no error, as a
            KeyboardInterrupt, stays itself on the rank where it came, and is a RuntimeError
            elsewhere.
    """

    def __init__(
        self, ranks: Ranks, numbers: list[int] | None = None, how: str = "highest"
    ) -> None:
        self._ranks, self._numbers = ranks, [] if numbers is None else numbers
        self._how = how

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        ranks, numbers = self._ranks.everyone, self._numbers
        if ranks.alone:
            return
        along = numbers if ranks is self._ranks else []
        failed, *found = self._together(ranks, [int(error is not None), *along])
        if not failed:
            # Of a line of a mesh, the numbers are the line's own.
            numbers[:] = found if ranks is self._ranks else self._together(self._ranks, numbers)
            return
        said = "" if error is None else f"{_kind(error)}\n{_line(error)}"
        told = texts_of(ranks, said[:_LONGEST])
        if error is not None and not isinstance(error, Exception):
            return  # it goes its own way
        raise _joined(told) from error

    def _together(self, ranks: Ranks, numbers: Sequence[int]) -> list[int]:
        if ranks.alone or not numbers:
            return list(numbers)
        wide = torch.int32 if len(numbers) == 1 and not self._numbers else torch.int64
        line = torch.tensor(numbers, dtype=wide, device=ranks.device)
        found: list[int] = (ranks.sum if self._how == "sum" else ranks.highest)(line).tolist()
        return found


class held_back:
    """Keeps the first error of its blocks for later, so that a rank goes on making its moves.

    For work between moves that others wait for: `raise_here` in an `agreeing` block afterwards.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> bool:
        self.error = self.error or error
        return True

    def raise_here(self) -> None:
        """What came first, if anything did."""
        if self.error is not None:
            raise self.error


def _kind(error: BaseException) -> str:
    return next((k.__name__ for k in _KINDS if type(error) is k), RuntimeError.__name__)


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    named = any(type(error) is kind for kind in _KINDS)
    if named and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _joined(told: Sequence[str]) -> Exception:
    """The one error for those of all ranks: "kind\\nline", or "" where there is none."""
    by_text: dict[str, list[int]] = {}
    for rank, text in enumerate(told):
        if text:
            by_text.setdefault(text, []).append(rank)
    names = {text.partition("\n")[0] for text in by_text}
    kind = next((k for k in _KINDS if names == {k.__name__}), RuntimeError)
    lines = []
    for text, ranks in by_text.items():
        line = text.partition("\n")[2]
        lines.append(line if len(ranks) == len(told) else f"{named_ranks(ranks)}: {line}")
    return kind("; ".join(lines))


def named_ranks(ranks: Sequence[int]) -> str:
    """ "rank 1", "ranks 1 and 3", "ranks 1, 2, 4 and 995 more"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 8:
        shown, last = ranks[:7], f"{len(ranks) - 7} more"
    else:
        shown, last = ranks[:-1], str(ranks[-1])
    return f"ranks {', '.join(map(str, shown))} and {last}"


def texts_of(ranks: Ranks, text: str) -> list[str]:
    """What every rank says, in the order of ranks."""
    raw = torch.frombuffer(bytearray(text.encode() or b"\0"), dtype=torch.uint8)
    parts = ranks.gather(raw.to(ranks.device))
    return [bytes(part.tolist()).decode(errors="replace").strip("\0") for part in parts]


def digest(*parts: Tensor | str) -> int:
    """64 bits that differ where the bytes do: a signed integer."""
    hashed = hashlib.sha1(usedforsecurity=False)  # the quickest on processors that have it built in
    for part in parts:
        if isinstance(part, str):
            hashed.update(part.encode())
        else:
            raw = part.detach().cpu().contiguous().view(-1).view(torch.uint8)
            hashed.update(_folded(raw.numpy()).data)
        hashed.update(b"|")
    return int.from_bytes(hashed.digest()[:8], "little", signed=True)


_WORDS = 512  # that are folded into one
_AT_ONCE = 64  # folded words, of 256 KiB, which stay in the second-level cache


def _weights() -> np.ndarray:
    """Odd numbers of 64 bits without a rule between them: splitmix64, the same everywhere."""
    mixed = np.arange(1, _WORDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    return (mixed ^ (mixed >> np.uint64(27))) | np.uint64(1)


_WEIGHTS = _weights()


def _folded(raw: np.ndarray) -> np.ndarray:
    """Bytes [n] as a 512th of them, in less than half of the time that hashing all of them takes.

    A multilinear hash: words times odd weights, modulo 2^64. High bits of a word are folded onto
    its low ones first, since a product has them only in its own high bits.
    """
    lines = len(raw) // (8 * _WORDS)
    if not lines:
        return raw
    words, rest = np.split(raw, [8 * _WORDS * lines])
    folded = np.empty(lines, np.uint64)
    library = native.load()
    if library is not None:
        library.dynsparse_rank_fold(
            words.ctypes.data, lines, _WORDS, _WEIGHTS.ctypes.data, folded.ctypes.data
        )
        return np.concatenate([folded.view(np.uint8), rest])
    some = words.view(np.uint64).reshape(-1, _WORDS)
    for first in range(0, lines, _AT_ONCE):
        few = some[first : first + _AT_ONCE]
        np.matmul(few ^ (few >> np.uint64(29)), _WEIGHTS, out=folded[first : first + _AT_ONCE])
    return np.concatenate([folded.view(np.uint8), rest])


def differing(ranks: Ranks, numbers: Sequence[int]) -> list[int]:
    """Which of these 64-bit integers are not the same on all ranks; 16 bytes each."""
    if ranks.alone or not numbers:
        return []
    own = torch.tensor(numbers, dtype=torch.int64, device=ranks.device)
    most = ranks.highest(torch.stack([own, ~own]))
    return (most[0] != ~most[1]).nonzero().flatten().tolist()


def agree_on(
    ranks: Ranks, said: Mapping[str, str | int], advice: str, *, shown: bool = True
) -> None:
    """Raise ValueError, the same on all ranks, where they do not say the same.

    Costs 16 bytes for each entry. How many entries there are, and their names, must be the same on
    all ranks or come in a call of their own before.

    Args:
        said: what -> what this rank says of it; a text, or a `digest` already.
        advice: how it is mended.
        shown: whether the error says who says what; False where that means nothing to people.
    """
    if ranks.alone or not said:
        return
    if ranks.everyone is not ranks:
        with agreeing(ranks):  # a line is at one about it; the other lines hear of it
            _agree_on_line(ranks, said, advice, shown)
    else:
        _agree_on_line(ranks, said, advice, shown)


def ends_of(*said: object) -> list[int]:
    """Two numbers that go along with `agreeing`, for `said_the_same`; 16 bytes. Of plain types, and
    what has a `repr` of its own."""
    own = digest(repr(said))
    return [own, ~own]


def said_the_same(ranks: Ranks, ends: Sequence[int]) -> bool:
    """Whether all ranks did, by the highest `ends_of` all of them.

    Ahead of several `agree_on`, which then need not be asked. Ranks that are a line of a mesh do
    not know what the other lines found, and always go on to ask.
    """
    return ranks.everyone is ranks and ends[0] == ~ends[1]


def _agree_on_line(ranks: Ranks, said: Mapping[str, str | int], advice: str, shown: bool) -> None:
    found = differing(ranks, [digest(s) if isinstance(s, str) else s for s in said.values()])
    if not found:
        return
    name = list(said)[found[0]]
    told = texts_of(ranks, str(said[name])[:_LONGEST])
    by_text: dict[str, list[int]] = {}
    for rank, text in enumerate(told):
        by_text.setdefault(text, []).append(rank)
    if shown:
        who = ", ".join(f"{named_ranks(r)}: {text}" for text, r in by_text.items())
    else:
        who = " differs from ".join(named_ranks(r) for r in by_text.values())
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    raise ValueError(f"ranks disagree on {name}{more}: {who}; {advice}")
