"""Tensors of which each rank holds some slots follow a rewiring: survivors move to their new rank.

Slots are cut as `torch.chunk` cuts them, before and after. Survivors keep their order, so what one
rank needs of another is one run of slots, and nearly all of it is there already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from dynsparse.encoding import follow_, follows_in_place, moved, set_places
from dynsparse.pattern.on_device import move as moved_there
from dynsparse.ranks.even import as_bytes
from dynsparse.ranks.ranks import Ranks
from dynsparse.ranks.select import chunk

_NONE = torch.zeros(0, dtype=torch.int64)
_AT_ONCE = 1 << 10  # slots that are looked at for a survivor


@torch.no_grad()
def follow_over_ranks(
    ranks: Ranks,
    source: Tensor,
    tensors: Sequence[Tensor],
    fills: Sequence[float | Tensor],
    before: int | None = None,
) -> Callable[[], Callable[[], list[Tensor]]]:
    """What `Rewiring.apply` does for tensors whose slots lie on all ranks.

    In three parts, so that a rank where one fails keeps no other waiting: this call makes no move;
    what it returns makes one, an exchange for all tensors of the slots that change their rank; and
    what that returns writes, and makes no move. Nothing is written before. Where the number of
    slots stays it is written in place, and what was given is returned; otherwise new tensors.

    Args:
        source: int32 [slots], the same on all ranks: the old slot of each new one, or -1 where one
            was grown. Survivors in their order: what a `Rewiring` has.
        tensors: [slots of this rank, ...], contiguous, of any types.
        fills: for each tensor what grown slots get: a number, or [grown, ...] of all ranks.
        before: how many slots there were; as many as there are where it is left out.

    Raises:
        ValueError: a tensor that does not hold the slots of this rank.
    """
    source = source.cpu()
    there = _bounds(ranks, len(source) if before is None else before)
    bounds = _bounds(ranks, len(source))
    resized = int(there[-1]) != len(source)
    begin, end = there[ranks.rank : ranks.rank + 2].tolist()
    first, last = bounds[ranks.rank : ranks.rank + 2].tolist()
    for tensor in tensors:
        if tensor.dim() == 0 or len(tensor) != end - begin:
            raise ValueError(
                f"expected the {end - begin} slots of rank {ranks.rank}, got the shape "
                f"{list(tensor.shape)}"
            )
    if not tensors:
        return lambda: list
    # The new slots of what this rank holds: [begin, end) of the old ones.
    low, high = _cut(source.numpy(), begin), _cut(source.numpy(), end)
    stays = (source[first:last] - begin).clamp_(min=-1)
    stays[: max(low - first, 0)] = -1
    stays[max(high - first, 0) :] = -1
    # Survivors ascend, as ranks do: those that come, and those that go, are in order of ranks.
    comes = _survivors(source, (first, min(low, last)), (max(high, first), last))
    coming = torch.searchsorted(source[comes], there.int()).diff().tolist()
    comes -= first
    goes = _survivors(source, (low, min(high, first)), (max(low, last), high))
    leaving = torch.searchsorted(goes, bounds).diff().tolist()
    device = tensors[0].device
    at, comes = (source[goes] - begin).to(device), comes.to(device)
    lines = [as_bytes(tensor).index_select(0, at) for tensor in tensors]
    widths, line = [one.shape[1] for one in lines], torch.cat(lines, 1)
    joined, starts = torch.zeros(0), list(fills)
    if any(isinstance(fill, Tensor) or fill != 0 for fill in fills):
        joined = set_places(source[first:last] < 0).to(device)
        above = int(torch.count_nonzero(source[:first] < 0))
        starts = [
            fill[above : above + len(joined)].to(tensor) if isinstance(fill, Tensor) else fill
            for tensor, fill in zip(tensors, fills, strict=True)
        ]
    in_place = [not resized and follows_in_place(tensor) for tensor in tensors]
    made = [
        tensor if inside else _beside(tensor, stays)
        for tensor, inside in zip(tensors, in_place, strict=True)
    ]

    def move() -> Callable[[], list[Tensor]]:
        pieces = ranks.all_to_all(line, leaving, coming).split(widths, 1)

        @torch.no_grad()
        def write() -> list[Tensor]:
            follow_([t for t, inside in zip(tensors, in_place, strict=True) if inside], stays)
            for tensor, piece, start in zip(made, pieces, starts, strict=True):
                as_bytes(tensor)[comes] = piece
                if isinstance(start, Tensor) or start != 0:
                    tensor[joined] = start
            if resized:
                return made
            for tensor, beside, inside in zip(tensors, made, in_place, strict=True):
                if not inside:
                    tensor.copy_(beside)
            return list(tensors)

        return write

    return move


def _cut(source: np.ndarray, slot: int) -> int:
    """Where the survivors begin that had this slot or a later one: all before had others."""
    low, high = 0, len(source)
    while low < high:
        middle = (low + high) // 2
        first = next(
            (
                at + int(there.argmax())
                for at in range(middle, high, _AT_ONCE)
                if (there := source[at : min(at + _AT_ONCE, high)] >= 0).any()
            ),
            high,
        )
        if first < high and source[first] < slot:
            low = first + 1
        else:
            high = middle
    return low


def _survivors(source: Tensor, *stretches: tuple[int, int]) -> Tensor:
    """The new slots in these stretches that are not grown ones."""
    return torch.cat([set_places(source[a:b] >= 0, a) for a, b in stretches if a < b] or [_NONE])


def _beside(tensor: Tensor, source: Tensor) -> Tensor:
    """Entry j of a new tensor is entry source[j] of this one; zero where that is -1."""
    if tensor.is_cpu:
        return moved(tensor, source)
    return moved_there(tensor, source.to(tensor.device))


def _bounds(ranks: Ranks, count: int) -> Tensor:
    """Where the slots of each rank begin, and the last ones end."""
    return torch.tensor([0, *(chunk(count, ranks.size, rank)[1] for rank in range(ranks.size))])
