"""Patterns on a device: their index, updates, and transfers between device and host.

Index and updates are plain torch with sizes known beforehand: they do not synchronise and can be
captured in a CUDA graph. Positions are flat (row * width + col), sorted, int64.

Tensors may have leading dimensions, written [...]: those of several layers of equal shape and
number of blocks are stacked, so that an update calls the same operators for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_DROPPED = 2**62  # sorts after every position


def row_pointers(flat: Tensor, height: int, width: int) -> Tensor:
    """Return the first entry of each row among positions [..., nnz]: int32 [..., height + 1]."""
    bounds = torch.arange(height + 1, device=flat.device) * width
    if flat.dim() > 1:
        bounds = bounds.repeat(*flat.shape[:-1], 1)
    return torch.searchsorted(flat.contiguous(), bounds, out_int32=True)


def expand_row_pointers(row_ptr: Tensor, nnz: int) -> Tensor:
    """Return the row of each entry, int64 [nnz], without a synchronisation."""
    counts = row_ptr.diff().long()
    return torch.arange(len(counts), device=counts.device).repeat_interleave(
        counts, output_size=nnz
    )


def flat_positions(row_ptr: Tensor, cols: Tensor, width: int) -> Tensor:
    """Return the flat positions of CSR patterns, int64 [..., nnz]."""
    counts = row_ptr.diff()
    starts = torch.arange(counts.shape[-1], device=cols.device) * width
    if counts.dim() > 1:
        starts, counts = starts.expand_as(counts).flatten(), counts.flatten()
    return starts.repeat_interleave(counts, output_size=cols.numel()).view_as(cols).add_(cols)


def column_pointers(cols: Tensor, width: int) -> Tensor:
    """Return the first entry of each column in the order by columns: int32 [..., width + 1]."""
    if cols.is_cpu and cols.dim() == 1:  # five times faster; on a device it would synchronise
        ends = torch.zeros(width + 1, dtype=torch.int32, device=cols.device)
        torch.cumsum(torch.bincount(cols, minlength=width), 0, out=ends[1:])
        return ends
    ends = torch.zeros(*cols.shape[:-1], width + 1, dtype=torch.int32, device=cols.device)
    after = cols + 1
    if cols.dim() > 1:
        first = torch.arange(0, ends.numel(), width + 1, device=cols.device)
        after = after + first.view(*cols.shape[:-1], 1)
    ones = torch.ones((), dtype=torch.int32, device=cols.device)
    ends.view(-1).index_add_(0, after.flatten(), ones.expand(cols.numel()))
    return ends.cumsum(-1, dtype=torch.int32)


def sort_by_columns(row_ptr: Tensor, cols: Tensor, width: int) -> Tensor:
    """Return the row and the entry of each block in the order by columns: int32 [..., 2, nnz]."""
    height = row_ptr.shape[-1] - 1
    flat = flat_positions(row_ptr, cols, width)
    rows = flat.div_(width, rounding_mode="floor")
    ordered, order = (cols.long() * height + rows).sort()
    return torch.stack([ordered.remainder_(height).int(), order.int()], -2)


def order_by_slots(entries: Tensor, slots: Tensor) -> Tensor:
    """Reorder entries in row-major order, [..., nnz], by slots; if `slots` is [..., 0], they are
    already in this order."""
    if not slots.shape[-1]:
        return entries
    return _scatter(entries.new_empty(entries.shape), slots.long(), entries)


def _scatter(out: Tensor, index: Tensor, entries: Tensor) -> Tensor:
    """Write `entries` to out[..., index]. `Tensor.scatter_` of several dimensions synchronises on
    CUDA devices if deterministic algorithms are required."""
    if out.dim() > 1:
        first = torch.arange(0, out.numel(), out.shape[-1], device=out.device)
        index = index + first.view(*out.shape[:-1], 1)
    out.view(-1).index_copy_(0, index.flatten(), entries.flatten())
    return out


def find_slots(entries: Tensor, slots: Tensor) -> Tensor:
    """Return the slots of some entries, [..., any]; the entries themselves if `slots` is [..., 0].

    -1 stays -1.
    """
    if not slots.shape[-1]:
        return entries
    found = slots.gather(-1, entries.clamp(min=0).long())
    return torch.where(entries < 0, -1, found)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to a device through pinned memory, without a host synchronisation."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def fetch_scalars(numbers: Sequence[Tensor]) -> list[float]:
    """Return the values of scalar tensors on devices, with one host synchronisation for all."""
    if not numbers:
        return []
    device = numbers[0].device
    return torch.stack([n.to(device, torch.float64) for n in numbers]).tolist()


def remove_slots(flat: Tensor, drop: Tensor) -> Tensor:
    """Return the positions [..., nnz] without those of the distinct slots `drop` [..., any]."""
    kept = flat.scatter(-1, drop, _DROPPED).sort().values
    return kept.narrow(-1, 0, flat.shape[-1] - drop.shape[-1])


def merge(flat: Tensor, drop: Tensor, grow: Tensor) -> tuple[Tensor, Tensor]:
    """Return the positions after an update, and the old slot of each (int32), -1 if grown.

    A position that is dropped and grown in one update keeps its entry.

    Args:
        flat: the positions before, int64 [..., nnz].
        drop: the dropped slots, int64 [..., any], distinct.
        grow: the grown positions, int64 [..., any], distinct and free after the drop.
    """
    kept = flat.scatter(-1, drop, _DROPPED)
    count = flat.shape[-1] - drop.shape[-1] + grow.shape[-1]
    after = torch.cat([kept, grow], -1).sort().values.narrow(-1, 0, count)
    return after, find_sources(flat, after)


def assign_slots(source: Tensor) -> tuple[Tensor, Tensor]:
    """Assign slots to sorted entries: survivors keep theirs, grown ones get free slots in order.

    Returns the slots, int32 [..., nnz], and which slots were free, bool [..., nnz].

    Args:
        source: int32 [..., nnz], the old slot of each entry, -1 where it was grown; as many are
            free.
    """
    *leading, count = source.shape
    grown = source < 0
    kept = torch.where(grown, count, source).long()
    free = grown.new_ones(*leading, count + 1).scatter_(-1, kept, False).narrow(-1, 0, count)
    # The free slots in order; all others are written to an unused last entry.
    index = torch.where(free, free.cumsum(-1) - 1, count)
    slots = torch.arange(count, dtype=torch.int32, device=source.device).expand_as(source)
    ordered = _scatter(slots.new_empty(*leading, count + 1), index, slots)
    given = ordered.gather(-1, (grown.cumsum(-1) - 1).clamp_(min=0))
    return torch.where(grown, given, source), free


def find_sources(flat: Tensor, after: Tensor) -> Tensor:
    """Return the index in `flat` of each position of `after`, int32; -1 if it is not there."""
    if not flat.shape[-1]:
        return torch.full_like(after, -1, dtype=torch.int32)
    slot = torch.searchsorted(flat, after.contiguous()).clamp_(max=flat.shape[-1] - 1)
    same = flat.gather(-1, slot) == after
    return torch.where(same, slot, -1).int()


def move(tensor: Tensor, source: Tensor, fill: float | Tensor = 0.0) -> Tensor:
    """Return a tensor whose entry j is tensor[source[j]], or `fill` where source[j] is -1.

    Args:
        tensor: [nnz, ...].
        fill: a number, or a tensor of as many dimensions, with one entry for each j where source[j]
            is -1, in order, or one for every j.
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


class HostCopy:
    """Asynchronous copies of tensors to the CPU, of their contents at this point of the stream.

    A CUDA device writes them to pinned memory; `get` waits for the copies, and not for work that is
    launched later. From other devices they are copied at once.

    Args:
        tensors: on one device.
    """

    __slots__ = ("_copies", "_event")

    def __init__(self, *tensors: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if not tensors[0].is_cuda:
            self._copies = [tensor.to("cpu", copy=True) for tensor in tensors]
            return
        self._copies = [
            torch.empty(t.shape, dtype=t.dtype, pin_memory=True, device="cpu").copy_(
                t, non_blocking=True
            )
            for t in tensors
        ]
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(tensors[0].device))

    @property
    def is_ready(self) -> bool:
        """Whether `get` does not wait."""
        return self._event is None or bool(self._event.query())

    def get(self) -> list[Tensor]:
        """Wait for the copies and return them, in pageable memory."""
        if self._event is not None:
            self._event.synchronize()
            # Pinned memory is scarce: do not keep it.
            self._copies, self._event = [copy.clone() for copy in self._copies], None
        return self._copies
