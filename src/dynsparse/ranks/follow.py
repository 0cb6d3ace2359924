"""Tensors of which each rank holds some slots follow a rewiring: survivors move to their new rank.

Slots are cut as `torch.chunk` cuts them, before and after. Survivors keep their order, so what one
rank needs of another is one run of slots, and nearly all of it is there already.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dynsparse.ranks.ranks import Ranks

__all__ = ["follow_over_ranks"]


@torch.no_grad()
def follow_over_ranks(
    ranks: Ranks, source: Tensor, tensors: Sequence[Tensor], fills: Sequence[float | Tensor]
) -> Callable[[], Callable[[], None]]:
    """What `Rewiring.apply_` does, in place, for tensors whose slots lie on all ranks.

    In three parts, so that a rank where one fails keeps no other waiting: this call makes no move;
    what it returns makes one, an exchange for all tensors; and what that returns writes, makes no
    move and takes no memory. Nothing is written before.

    Args:
        source: int32 [slots], the same on all ranks: the old slot of each new one, or -1 where one
            was grown. As many slots before as after, and survivors in their order: what a
            `Rewiring` that keeps its size has.
        tensors: [slots of this rank, ...], contiguous, of any types.
        fills: for each tensor what grown slots get: a number, or [grown, ...] of all ranks.

    Raises:
        ValueError: a tensor that does not hold the slots of this rank.
    """
    source = source.cpu().long()
    bounds = torch.arange(ranks.size + 1) * -(-len(source) // ranks.size)
    bounds.clamp_(max=len(source))
    first, last = bounds[ranks.rank : ranks.rank + 2].tolist()
    for tensor in tensors:
        if tensor.dim() == 0 or len(tensor) != last - first:
            raise ValueError(
                f"expected the {last - first} slots of rank {ranks.rank}, got the shape "
                f"{list(tensor.shape)}"
            )
    new = (source >= 0).nonzero().flatten()
    old = source[new]  # ascends, as `new` does
    own = slice(*torch.searchsorted(old, bounds[ranks.rank : ranks.rank + 2]).tolist())
    leaving = torch.searchsorted(new[own], bounds).diff().tolist()
    held = slice(*torch.searchsorted(new, bounds[ranks.rank : ranks.rank + 2]).tolist())
    coming = torch.searchsorted(old[held], bounds).diff().tolist()
    if not tensors:
        return lambda: lambda: None
    device = tensors[0].device
    at = (old[own] - first).to(device)
    lines = [_bytes(tensor).index_select(0, at) for tensor in tensors]
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

    def move() -> Callable[[], None]:
        return functools.partial(write, ranks.exchange(line, leaving, coming).split(widths, 1))

    @torch.no_grad()
    def write(pieces: Sequence[Tensor]) -> None:
        for tensor, piece, start in zip(tensors, pieces, starts, strict=True):
            _bytes(tensor)[kept] = piece
            tensor[joined] = start

    return move


def _bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor: uint8 [slots, bytes of one]."""
    return tensor.view(len(tensor), math.prod(tensor.shape[1:])).view(torch.uint8)
