"""Even pieces of tensors whose slots lie on the ranks in any other way."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dynsparse.ranks.ranks import Ranks
from dynsparse.ranks.select import chunk, chunk_of


@torch.no_grad()
def rebalance(ranks: Ranks, slots: Tensor, total: int, tensors: Sequence[Tensor]) -> list[Tensor]:
    """This rank's piece of each tensor, cut into pieces by slots as `torch.chunk` cuts.

    One exchange for all tensors, in which each entry goes where it belongs; no rank sees more than
    its piece. All ranks call this, with tensors of the same types and inner dimensions.

    Args:
        slots: of the entries that this rank brings: int64 [n], ascending. Every slot of `total` is
            brought by one rank.
        total: how many slots there are.
        tensors: [n, ...] each.

    Raises:
        ValueError: the ranks bring other slots than these.
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
    lines = [as_bytes(tensor.contiguous().to(device)) for tensor in (slots, *tensors)]
    widths = [line.shape[1] for line in lines]
    got = ranks.all_to_all(torch.cat(lines, 1), leaving.tolist(), coming).split(widths, 1)
    at = got[0].contiguous().view(torch.int64).flatten() - first
    made = [tensor.new_empty((last - first, *tensor.shape[1:])) for tensor in tensors]
    for tensor, line in zip(made, got[1:], strict=True):
        as_bytes(tensor)[at] = line
    return made


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor: uint8 [slots, bytes of one]."""
    return tensor.view(len(tensor), math.prod(tensor.shape[1:])).view(torch.uint8)
