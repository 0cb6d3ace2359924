"""Tensors that are sharded by slots: after a rewiring, and from any other distribution.

Slots are divided as by `torch.chunk`. A rewiring keeps the order of survivors, so a rank needs one
run of slots of each other rank, and holds nearly all of its slots already.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from dynsparse.pattern.index_arrays import (
    move_entries,
    move_entries_,
    moves_in_place,
    nonzero_positions,
)
from dynsparse.ranks.ranks import Ranks
from dynsparse.ranks.select import chunk, chunk_of

_NONE = torch.zeros(0, dtype=torch.int64)
_AT_ONCE = 1 << 10  # slots in which a survivor is searched for


@torch.no_grad()
def follow_over_ranks(
    ranks: Ranks,
    source: Tensor,
    tensors: Sequence[Tensor],
    fills: Sequence[float | Tensor],
    before: int | None = None,
) -> Callable[[], Callable[[], list[Tensor]]]:
    """`Rewiring.apply` for tensors that are sharded by slots.

    In three steps, so that no rank waits for one that fails: this call prepares, without a
    collective; the function that it returns exchanges the slots that change ranks, of all tensors
    in one all-to-all; the function that this returns writes, without a collective. If the number of
    slots stays the same, tensors are written in place and returned; otherwise new ones are made.

    Args:
        source: int32 [slots], the same on all ranks: the old slot of each new slot, -1 where it was
            grown; survivors ascend, as in a `Rewiring`.
        tensors: [slots of this rank, ...], contiguous, of any dtypes.
        fills: for each tensor the value of grown slots: a number, or [grown, ...] of all ranks.
        before: number of slots before; defaults to the number after.

    Raises:
        ValueError: a tensor that does not hold the slots of this rank.
    """
    source = source.cpu()
    old_bounds = _bounds(ranks, len(source) if before is None else before)
    bounds = _bounds(ranks, len(source))
    resized = int(old_bounds[-1]) != len(source)
    begin, end = old_bounds[ranks.rank : ranks.rank + 2].tolist()
    first, last = bounds[ranks.rank : ranks.rank + 2].tolist()
    for tensor in tensors:
        if tensor.dim() == 0 or len(tensor) != end - begin:
            raise ValueError(
                f"expected the {end - begin} slots of rank {ranks.rank}, got the shape "
                f"{list(tensor.shape)}"
            )
    if not tensors:
        return lambda: list
    # The new slots of the old slots [begin, end), which this rank holds.
    low, high = _first_from(source.numpy(), begin), _first_from(source.numpy(), end)
    stays = (source[first:last] - begin).clamp_(min=-1)
    stays[: max(low - first, 0)] = -1
    stays[max(high - first, 0) :] = -1
    # Survivors ascend, as ranks do: arriving and leaving slots are in the order of ranks.
    comes = _survivors(source, (first, min(low, last)), (max(high, first), last))
    coming = torch.searchsorted(source[comes], old_bounds.int()).diff().tolist()
    comes -= first
    goes = _survivors(source, (low, min(high, first)), (max(low, last), high))
    leaving = torch.searchsorted(goes, bounds).diff().tolist()
    device = tensors[0].device
    at, comes = (source[goes] - begin).to(device), comes.to(device)
    lines = [_as_bytes(tensor).index_select(0, at) for tensor in tensors]
    widths, line = [part.shape[1] for part in lines], torch.cat(lines, 1)
    grown, starts = torch.zeros(0), list(fills)
    if any(isinstance(fill, Tensor) or fill != 0 for fill in fills):
        grown = nonzero_positions(source[first:last] < 0).to(device)
        above = int(torch.count_nonzero(source[:first] < 0))
        starts = [
            fill[above : above + len(grown)].to(tensor) if isinstance(fill, Tensor) else fill
            for tensor, fill in zip(tensors, fills, strict=True)
        ]
    in_place = [not resized and moves_in_place(tensor) for tensor in tensors]
    made = [
        tensor if inside else move_entries(tensor, stays)
        for tensor, inside in zip(tensors, in_place, strict=True)
    ]

    def exchange() -> Callable[[], list[Tensor]]:
        pieces = ranks.all_to_all(line, leaving, coming).split(widths, 1)

        @torch.no_grad()
        def write() -> list[Tensor]:
            move_entries_([t for t, inside in zip(tensors, in_place, strict=True) if inside], stays)
            for tensor, piece, start in zip(made, pieces, starts, strict=True):
                _as_bytes(tensor)[comes] = piece
                if isinstance(start, Tensor) or start != 0:
                    tensor[grown] = start
            if resized:
                return made
            for tensor, beside, inside in zip(tensors, made, in_place, strict=True):
                if not inside:
                    tensor.copy_(beside)
            return list(tensors)

        return write

    return exchange


def _first_from(source: np.ndarray, slot: int) -> int:
    """The first new slot of a survivor whose old slot is this one or a later one."""
    low, high = 0, len(source)
    while low < high:
        middle = (low + high) // 2
        first = next(
            (
                at + int(kept.argmax())
                for at in range(middle, high, _AT_ONCE)
                if (kept := source[at : min(at + _AT_ONCE, high)] >= 0).any()
            ),
            high,
        )
        if first < high and source[first] < slot:
            low = first + 1
        else:
            high = middle
    return low


def _survivors(source: Tensor, *ranges: tuple[int, int]) -> Tensor:
    """The new slots in these ranges that were not grown."""
    return torch.cat(
        [nonzero_positions(source[a:b] >= 0, a) for a, b in ranges if a < b] or [_NONE]
    )


def _bounds(ranks: Ranks, count: int) -> Tensor:
    """The first slot of each rank, and the number of slots."""
    return torch.tensor([0, *(chunk(count, ranks.size, rank)[1] for rank in range(ranks.size))])


@torch.no_grad()
def rebalance(ranks: Ranks, slots: Tensor, total: int, tensors: Sequence[Tensor]) -> list[Tensor]:
    """This rank's chunk of each tensor, from any distribution of slots over ranks.

    One all-to-all for all tensors sends each entry to its rank. All ranks call this, with tensors
    of the same dtypes and inner dimensions.

    Args:
        slots: of the entries on this rank: int64 [n], ascending. Every slot is on one rank.
        total: number of slots.
        tensors: [n, ...] each.

    Raises:
        ValueError: the ranks do not hold `total` slots.
    """
    slots = slots.cpu()
    first, last = chunk_of(ranks, total)
    bounds = torch.tensor([*(chunk(total, ranks.size, r)[0] for r in range(ranks.size)), total])
    leaving = torch.searchsorted(slots, bounds).diff()
    coming = ranks.all_to_all(leaving.to(ranks.device)).tolist()
    if sum(coming) != last - first:
        raise ValueError(f"expected {last - first} slots from all ranks, got {sum(coming)}")
    if not tensors:
        return []
    device = tensors[0].device
    lines = [_as_bytes(tensor.contiguous().to(device)) for tensor in (slots, *tensors)]
    widths = [line.shape[1] for line in lines]
    got = ranks.all_to_all(torch.cat(lines, 1), leaving.tolist(), coming).split(widths, 1)
    at = got[0].contiguous().view(torch.int64).flatten() - first
    chunks = [tensor.new_empty((last - first, *tensor.shape[1:])) for tensor in tensors]
    for tensor, line in zip(chunks, got[1:], strict=True):
        _as_bytes(tensor)[at] = line
    return chunks


def _as_bytes(tensor: Tensor) -> Tensor:
    """A view of a contiguous tensor's memory: uint8 [slots, bytes per slot]."""
    return tensor.view(len(tensor), math.prod(tensor.shape[1:])).view(torch.uint8)
