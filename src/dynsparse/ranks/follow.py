"""Tensors of which each rank holds some slots follow a rewiring: survivors move to their new rank.

Slots are cut as `torch.chunk` cuts them, before and after. Survivors keep their order, so what one
rank needs of another is one run of slots, and nearly all of it is there already.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dynsparse.ranks.even import as_bytes
from dynsparse.ranks.ranks import Ranks
from dynsparse.ranks.select import chunk

__all__ = ["follow_over_ranks"]


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
    what it returns makes one, an exchange for all tensors; and what that returns writes, makes no
    move and takes no memory. Nothing is written before. Where the number of slots stays it is
    written in place, and what was given is returned; otherwise new tensors.

    Args:
        source: int32 [slots], the same on all ranks: the old slot of each new one, or -1 where one
            was grown. Survivors in their order: what a `Rewiring` has.
        tensors: [slots of this rank, ...], contiguous, of any types.
        fills: for each tensor what grown slots get: a number, or [grown, ...] of all ranks.
        before: how many slots there were; as many as there are where it is left out.

    Raises:
        ValueError: a tensor that does not hold the slots of this rank.
    """
    source = source.cpu().long()
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
    new = (source >= 0).nonzero().flatten()
    old = source[new]  # ascends, as `new` does
    own = slice(*torch.searchsorted(old, there[ranks.rank : ranks.rank + 2]).tolist())
    leaving = torch.searchsorted(new[own], bounds).diff().tolist()
    held = slice(*torch.searchsorted(new, bounds[ranks.rank : ranks.rank + 2]).tolist())
    coming = torch.searchsorted(old[held], there).diff().tolist()
    if not tensors:
        return lambda: list
    device = tensors[0].device
    at = (old[own] - begin).to(device)
    lines = [as_bytes(tensor).index_select(0, at) for tensor in tensors]
    widths = [line.shape[1] for line in lines]
    line = torch.cat(lines, 1)
    del lines
    kept = (new[held] - first).to(device)
    grown = (source < 0).nonzero().flatten()
    part = slice(*torch.searchsorted(grown, bounds[ranks.rank : ranks.rank + 2]).tolist())
    joined = (grown[part] - first).to(device)
    starts = [
        fill[part].to(t) if isinstance(fill, Tensor) else fill
        for t, fill in zip(tensors, fills, strict=True)
    ]
    made = list(tensors)
    if resized:
        made = [tensor.new_empty((last - first, *tensor.shape[1:])) for tensor in tensors]

    def move() -> Callable[[], list[Tensor]]:
        return functools.partial(write, ranks.exchange(line, leaving, coming).split(widths, 1))

    @torch.no_grad()
    def write(pieces: Sequence[Tensor]) -> list[Tensor]:
        for tensor, piece, start in zip(made, pieces, starts, strict=True):
            as_bytes(tensor)[kept] = piece
            tensor[joined] = start
        return made

    return move


def _bounds(ranks: Ranks, count: int) -> Tensor:
    """Where the slots of each rank begin, and the last ones end."""
    return torch.tensor([0, *(chunk(count, ranks.size, rank)[1] for rank in range(ranks.size))])
