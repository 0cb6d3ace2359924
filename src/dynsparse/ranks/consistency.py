"""What ranks do together besides reductions: raise the same error, compare, and share values.

A rank that raises while the others go on leaves them waiting in its next collective. So whatever
may fail on one rank runs inside `collective_errors`, which tells all ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

import torch
from torch import Tensor

from dynsparse.ranks.ranks import Ranks

_KINDS = (ValueError, TypeError, RuntimeError, MemoryError)
_LONGEST = 2000  # characters of an error that are sent


class collective_errors:
    """Raise an error of one rank in the block on every rank, in one line that names the ranks.

    Every rank enters and leaves the block at the same point of its program and starts no collective
    inside: a rank that has failed would not join it. It costs one all-reduce of 4 bytes; with one
    rank it does nothing. Where the ranks are one group of a mesh, all ranks of the mesh raise.

    Args:
        ranks: the ranks that raise each other's errors.
        all_reduce: 64-bit integers that the same all-reduce reduces over `ranks`, as many on all
            ranks; write this rank's into the list inside the block, and read the results after it.
        op: "max" or "sum".

    Raises:
        ValueError, TypeError, RuntimeError, MemoryError: the type that was raised, if all ranks
            raised one of these; where all ranks raise the same text, that text. What is no
            `Exception`, such as a KeyboardInterrupt, is raised as it is on its own rank, and as a
            RuntimeError on the others.
    """

    def __init__(self, ranks: Ranks, all_reduce: list[int] | None = None, op: str = "max") -> None:
        self._ranks, self._numbers = ranks, [] if all_reduce is None else all_reduce
        self._op = op

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        ranks, numbers = self._ranks.all_ranks, self._numbers
        if ranks.alone:
            return
        sent = numbers if ranks is self._ranks else []
        failed, *reduced = self._reduce(ranks, [int(error is not None), *sent])
        if not failed:
            # In a group of a mesh the numbers are reduced over that group only.
            numbers[:] = reduced if ranks is self._ranks else self._reduce(self._ranks, numbers)
            return
        text = "" if error is None else f"{_error_kind(error)}\n{_format_error(error)}"
        texts = gather_texts(ranks, text[:_LONGEST])
        if error is not None and not isinstance(error, Exception):
            return  # raised unchanged on this rank
        raise _merge_errors(texts) from error

    def _reduce(self, ranks: Ranks, numbers: Sequence[int]) -> list[int]:
        if ranks.alone or not numbers:
            return list(numbers)
        dtype = torch.int32 if len(numbers) == 1 and not self._numbers else torch.int64
        tensor = torch.tensor(numbers, dtype=dtype, device=ranks.device)
        reduced: list[int] = (ranks.sum if self._op == "sum" else ranks.max)(tensor).tolist()
        return reduced


def group_errors(ranks: Ranks) -> AbstractContextManager[None]:
    """Raise what all ranks of a group raise alike on the other ranks of its mesh, too."""
    return nullcontext() if ranks.all_ranks is ranks else collective_errors(ranks)


class DeferredError:
    """Keeps the first error of its blocks, so that a rank goes on to the collectives that follow.

    For work between collectives: call `raise_pending` in a `collective_errors` block afterwards.
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

    def raise_pending(self) -> None:
        """Raise the first error, if there was one."""
        if self.error is not None:
            raise self.error


def _error_kind(error: BaseException) -> str:
    return next((k.__name__ for k in _KINDS if type(error) is k), RuntimeError.__name__)


def _format_error(error: BaseException) -> str:
    text = " ".join(str(error).split())
    if text and type(error) in _KINDS:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _merge_errors(texts: Sequence[str]) -> Exception:
    """Merge the errors of all ranks, each "kind\\nline" or "", into one."""
    ranks_by_text = _ranks_by_text(texts)
    ranks_by_text.pop("", None)
    names = {text.partition("\n")[0] for text in ranks_by_text}
    kind = next((k for k in _KINDS if names == {k.__name__}), RuntimeError)
    lines = []
    for text, ranks in ranks_by_text.items():
        line = text.partition("\n")[2]
        lines.append(line if len(ranks) == len(texts) else f"{format_ranks(ranks)}: {line}")
    return kind("; ".join(lines))


def _ranks_by_text(texts: Sequence[str]) -> dict[str, list[int]]:
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        ranks.setdefault(text, []).append(rank)
    return ranks


def format_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 1", "ranks 1 and 3", "ranks 1, 2, 4 and 995 more"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 8:
        shown, last = ranks[:7], f"{len(ranks) - 7} more"
    else:
        shown, last = ranks[:-1], str(ranks[-1])
    return f"ranks {', '.join(map(str, shown))} and {last}"


def gather_texts(ranks: Ranks, text: str) -> list[str]:
    """Return the text of every rank, in the order of ranks."""
    raw = torch.frombuffer(bytearray(text.encode() or b"\0"), dtype=torch.uint8)
    parts = ranks.all_gather(raw.to(ranks.device))
    return [bytes(part.tolist()).decode(errors="replace").strip("\0") for part in parts]


def sum_over_ranks(ranks: Ranks, parts: Sequence[Tensor]) -> list[Tensor]:
    """Return the sums of these tensors over ranks, in one all-reduce."""
    if ranks.alone or not parts:
        return list(parts)
    # A rank without samples has zeros of any type.
    double = torch.tensor(
        [any(p.dtype == torch.float64 for p in parts)], dtype=torch.uint8, device=ranks.device
    )
    dtype = torch.float64 if int(ranks.max(double)) else torch.float32
    total = ranks.sum(torch.cat([part.detach().reshape(-1).to(dtype) for part in parts]))
    split = total.split([part.numel() for part in parts])
    return [summed.view_as(part) for summed, part in zip(split, parts, strict=True)]


# ---- comparing what ranks hold ----


def digest(*parts: Tensor | str) -> int:
    """Return a signed 64-bit hash of the bytes of these parts."""
    hashed = hashlib.sha1(usedforsecurity=False)  # most processors have instructions for it
    for part in parts:
        if isinstance(part, str):
            hashed.update(part.encode())
        else:
            raw = part.detach().cpu().contiguous().view(-1).view(torch.uint8)
            hashed.update(raw.numpy().data)
        hashed.update(b"|")
    return int.from_bytes(hashed.digest()[:8], "little", signed=True)


def min_max_digest(*values: object) -> list[int]:
    """Return two numbers for an `all_reduce` of `collective_errors`, for `are_all_equal`.

    Args:
        values: values of plain types, or of types with a `repr` that identifies them.
    """
    number = digest(repr(values))
    return [number, ~number]


def are_all_equal(ranks: Ranks, reduced: Sequence[int]) -> bool:
    """Whether the values of all ranks are equal, by the maxima of their `min_max_digest`.

    Where it is true, `check_consistent` need not be called. It is false for a group of a mesh,
    which does not know the results of the other groups.
    """
    return ranks.all_ranks is ranks and reduced[0] == ~reduced[1]


def find_differing(ranks: Ranks, numbers: Sequence[int]) -> list[int]:
    """Return the indices of the 64-bit integers that differ between ranks; sends 16 bytes each."""
    if ranks.alone or not numbers:
        return []
    mine = torch.tensor(numbers, dtype=torch.int64, device=ranks.device)
    largest = ranks.max(torch.stack([mine, ~mine]))
    return (largest[0] != ~largest[1]).nonzero().flatten().tolist()


def check_consistent(
    ranks: Ranks, values: Mapping[str, str | int], advice: str, *, shown: bool = True
) -> None:
    """Raise ValueError on all ranks, with the same text, if values differ between them.

    Sends 16 bytes for each value. The names must be the same on all ranks: check their number and
    spelling by an earlier call.

    Args:
        values: name -> this rank's value: a text, or a `digest`.
        advice: what the user should do.
        shown: whether the error shows the values; False if they mean nothing to the user.
    """
    if ranks.alone or not values:
        return
    with group_errors(ranks):
        _check_group(ranks, values, advice, shown)


def _check_group(ranks: Ranks, values: Mapping[str, str | int], advice: str, shown: bool) -> None:
    wrong = find_differing(ranks, [digest(v) if isinstance(v, str) else v for v in values.values()])
    if not wrong:
        return
    name = list(values)[wrong[0]]
    ranks_by_text = _ranks_by_text(gather_texts(ranks, str(values[name])[:_LONGEST]))
    if shown:
        who = ", ".join(f"{format_ranks(r)}: {text}" for text, r in ranks_by_text.items())
    else:
        who = " differs from ".join(format_ranks(r) for r in ranks_by_text.values())
    more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    raise ValueError(f"ranks disagree on {name}{more}: {who}; {advice}")
