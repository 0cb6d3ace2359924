"""Patterns whose positions lie on a device: their index, and one pattern turned into the next.

Plain torch, sizes known beforehand: nothing waits for the device, and all of it may be captured in
a CUDA graph. Positions are flat (row * width + col), sorted, int64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_GONE = 2**62  # sorts behind every position


def places(flat: Tensor, majors: int, minors: int) -> Tensor:
    """Where each of the `majors` begins among sorted positions: int32 [majors + 1]."""
    bounds = torch.arange(majors + 1, device=flat.device) * minors
    return torch.searchsorted(flat, bounds, out_int32=True)


def positions(row_ptr: Tensor, cols: Tensor, width: int) -> Tensor:
    """The flat positions int64 [nnz] of a pattern by rows; computed, since few need them long."""
    starts = torch.arange(len(row_ptr) - 1, device=cols.device) * width
    return starts.repeat_interleave(row_ptr.diff(), output_size=len(cols)).add_(cols)


def column_pointers(cols: Tensor, width: int) -> Tensor:
    """How many entries lie in the columns before each one: int32 [width + 1]."""
    ends = torch.zeros(width + 1, dtype=torch.int32, device=cols.device)
    if cols.is_cpu:  # five times faster there; elsewhere the host would wait for it
        torch.cumsum(torch.bincount(cols, minlength=width), 0, out=ends[1:])
        return ends
    one = torch.ones((), dtype=torch.int32, device=cols.device)
    return ends.index_add_(0, cols + 1, one.expand(len(cols))).cumsum(0, dtype=torch.int32)


def by_columns(row_ptr: Tensor, cols: Tensor, width: int) -> Tensor:
    """The row of each block in the order of columns, and its slot: int32 [2, nnz]."""
    height = len(row_ptr) - 1
    flat = positions(row_ptr, cols, width)
    rows = flat.div_(width, rounding_mode="floor")
    ordered, order = (cols.long() * height + rows).sort()
    return torch.stack([ordered.remainder_(height).int(), order.int()])


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the CPU on a device. Plain memory is copied after all that the device was given
    before, and the host waits; from pinned memory the device fetches it when it gets there."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def told(numbers: Sequence[Tensor]) -> list[float]:
    """Numbers that devices have found out, each a tensor []: the host waits, once for all."""
    if not numbers:
        return []
    there = numbers[0].device
    return torch.stack([n.to(there, torch.float64) for n in numbers]).tolist()


def without(flat: Tensor, drop: Tensor) -> Tensor:
    """The positions without the slots `drop`, int64 [any], distinct."""
    return flat.index_fill(0, drop, _GONE).sort().values.narrow(0, 0, len(flat) - len(drop))


def merge(flat: Tensor, drop: Tensor, grow: Tensor) -> tuple[Tensor, Tensor]:
    """The positions after an update, and the old slot of each (int32), -1 where it was grown.

    A position that leaves and joins in one update keeps its slot's entry.

    Args:
        flat: the positions before, int64 [nnz].
        drop: the slots that leave, int64 [any], distinct.
        grow: the positions that join, int64 [any], distinct and free once `drop` has left.
    """
    kept = flat.index_fill(0, drop, _GONE)
    count = len(flat) - len(drop) + len(grow)
    after = torch.cat([kept, grow]).sort().values.narrow(0, 0, count)
    return after, sources(flat, after)


def refill(source: Tensor) -> tuple[Tensor, Tensor]:
    """The slots of sorted entries where survivors keep theirs, and grown ones get the free slots in
    order: int32 [nnz]; and which slots are those, bool [nnz].

    Args:
        source: int32 [nnz], the old slot of each entry, -1 where it was grown; as many are free.
    """
    count, grown = len(source), source < 0
    kept = torch.where(grown, count, source).long()
    free = grown.new_ones(count + 1).index_fill_(0, kept, False).narrow(0, 0, count)
    # Free slot j goes to place j, all others to one behind them that nobody reads.
    place = torch.where(free, free.cumsum(0) - 1, count)
    own = torch.arange(count, dtype=torch.int32, device=source.device)
    ordered = own.new_empty(count + 1).index_copy_(0, place, own)
    given = ordered.index_select(0, (grown.cumsum(0) - 1).clamp_(min=0))
    return torch.where(grown, given, source), free


def sources(flat: Tensor, after: Tensor) -> Tensor:
    """The slot among the positions `flat` of each position `after`: int32, -1 where it is not."""
    if not len(flat):
        return torch.full_like(after, -1, dtype=torch.int32)
    slot = torch.searchsorted(flat, after).clamp_(max=len(flat) - 1)
    same = flat.index_select(0, slot) == after
    return torch.where(same, slot, -1).int()


def move(tensor: Tensor, source: Tensor, fill: float | Tensor = 0.0) -> Tensor:
    """Entry j of the result is entry source[j] of `tensor` [nnz, ...], or `fill` where that is -1.

    A tensor `fill` of as many dimensions holds one entry for each such j, in order, or one for
    every j.
    """
    grown = source < 0
    mask = grown.view(-1, *[1] * (tensor.dim() - 1))
    if len(tensor):
        moved = tensor.index_select(0, source.clamp(min=0))
    else:
        moved = tensor.new_zeros(len(source), *tensor.shape[1:])
    if not isinstance(fill, Tensor):
        return moved.masked_fill(mask, fill)
    fill = fill.to(moved)
    if fill.dim() == tensor.dim():
        if not len(fill):
            return moved
        if len(fill) != len(source):
            fill = fill.index_select(0, (grown.cumsum(0) - 1).clamp_(0, len(fill) - 1))
    return torch.where(mask, fill, moved)
