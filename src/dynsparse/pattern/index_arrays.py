"""The index arrays of a pattern on the CPU: order by columns, updates, and entries by slots.

Each function uses the compiled kernels (csrc/update/pattern.cpp) if they are loaded, and plain
torch otherwise, with the same result.
"""

from __future__ import annotations

import math
import mmap
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dynsparse._core import native
from dynsparse.pattern.on_device import column_pointers, flat_positions, move, row_pointers
from dynsparse.pattern.on_device import sort_by_columns as sort_by_columns_on_device
from dynsparse.tracing import spanned


class SortedEntries(NamedTuple):
    """A pattern in row-major order, int32 tensors.

    Attributes:
        row_ptr: [height + 1], the first entry of each row.
        cols: [nnz].
        slots: [nnz], the slot of each entry; [0] if entry i is in slot i.
    """

    row_ptr: Tensor
    cols: Tensor
    slots: Tensor


# Size in bytes from which large pages pay: small pages are mapped one by one when first written.
_LARGE = 4 << 20
_LARGE_PAGE = 2 << 20


def empty(
    *shape: int, dtype: torch.dtype, device: torch.device | str = "cpu", brief: bool = False
) -> Tensor:
    """Allocate an uninitialised tensor, on large pages if it is large.

    Writing to them takes a fifth of the time. They are outside the C library's heap, where arrays
    of patterns would leave holes between activations.

    Args:
        brief: whether the array is freed after the update; its last page is then a large one too,
            even if it is not full.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < (_LARGE_PAGE // 2 if brief else _LARGE):
        return torch.empty(shape, dtype=dtype, device=device)
    library = native.load() if torch.device(device).type == "cpu" else None
    if library is None:
        return torch.empty(shape, dtype=dtype, device=device)
    advised = -(-size // _LARGE_PAGE) * _LARGE_PAGE if brief else size
    memory = mmap.mmap(-1, advised + _LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr() % _LARGE_PAGE
    tensor = torch.frombuffer(memory, dtype=dtype, count=size // dtype.itemsize, offset=start).view(
        shape
    )
    library.dynsparse_pattern_large_pages(tensor.data_ptr(), advised)
    return tensor


@spanned("encode")
def sort_by_columns(entries: SortedEntries, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the order by columns: col_ptr [width + 1], csc_rows [nnz], slots [nnz], all int32."""
    row_ptr, cols, slots = entries
    height, nnz = len(row_ptr) - 1, len(cols)
    if native.load() is None:
        rows, order = sort_by_columns_on_device(row_ptr, cols, width)
        return column_pointers(cols, width), rows, slots_of(order, slots)
    col_ptr = torch.empty(width + 1, dtype=torch.int32, device="cpu")
    csc_rows = empty(nnz, dtype=torch.int32)
    csc_slots = empty(nnz, dtype=torch.int32)
    status = native.call(
        "dynsparse_pattern_by_columns",
        *(row_ptr, cols, slots if len(slots) else None, height, width),
        *(col_ptr, csc_rows, csc_slots, torch.get_num_threads()),
    )
    if status:
        raise MemoryError("no memory for the order of a pattern by columns")
    return col_ptr, csc_rows, csc_slots


def unpack_entries(
    packed: Tensor, gaps: bool, grid: tuple[int, int], nnz: int
) -> tuple[SortedEntries, Tensor] | None:
    """Unpack a pattern of a file, see `pattern.packed`, into its entries and col_ptr [width + 1].

    Returns None if the compiled kernels are not loaded, or if the pattern has not `nnz` blocks.
    """
    if native.load() is None:
        return None
    height, width = grid
    row_ptr, col_ptr = (torch.empty(n + 1, dtype=torch.int32, device="cpu") for n in grid)
    cols = empty(nnz, dtype=torch.int32)
    invalid = native.call(
        "dynsparse_pattern_unpack",
        *(packed, len(packed), gaps, height, width, nnz, row_ptr, cols, col_ptr),
    )
    return None if invalid else (SortedEntries(row_ptr, cols, cols.new_empty(0)), col_ptr)


def merge(
    pattern: SortedEntries, width: int, leaves: Tensor, grow: Tensor, reused: Tensor | None = None
) -> SortedEntries:
    """Remove some slots from a pattern and add flat positions.

    Args:
        pattern: the pattern before the update.
        width: block columns.
        leaves: bool [nnz], whether each slot is removed.
        grow: the positions to add, int64, in any order.
        reused: int64, as long as `grow`: the slots of the added positions, in ascending order of
            these; defaults to -1 for all.

    Returns:
        The entries after the update; those that stay have their old slots.

    Raises:
        ValueError: a position out of range, named twice or already present.
    """
    if native.load() is None:
        return _merge(pattern, width, leaves, grow, reused)
    row_ptr, cols, slots = pattern
    dropped = int(np.count_nonzero(leaves.numpy()))
    count = len(cols) - dropped + len(grow)
    merged = SortedEntries(
        torch.empty_like(row_ptr),
        empty(count, dtype=torch.int32),
        empty(count, dtype=torch.int32, brief=reused is None),
    )
    grow = grow.contiguous()
    status = native.call(
        "dynsparse_pattern_merge",
        *(row_ptr, cols, slots if len(slots) else None, len(row_ptr) - 1, width),
        *(leaves, dropped, grow, len(grow), reused, *merged, torch.get_num_threads()),
    )
    if status == 1:
        raise MemoryError("no memory for a pattern update")
    if status == 2:  # unsorted or invalid: the fallback sorts and checks
        return _merge(pattern, width, leaves, grow, reused)
    return merged


def _merge(
    pattern: SortedEntries, width: int, leaves: Tensor, grow: Tensor, reused: Tensor | None
) -> SortedEntries:
    row_ptr, cols, slots = pattern
    height = len(row_ptr) - 1
    total = height * width
    if len(grow) and not (int(grow.min()) >= 0 and int(grow.max()) < total):
        raise ValueError(f"positions to grow must lie in [0, {total})")
    kept = (~(leaves[slots.long()] if len(slots) else leaves)).nonzero().flatten()
    flat, order = torch.cat([flat_positions(row_ptr, cols, width)[kept], grow]).sort()
    if not bool((flat[1:] > flat[:-1]).all()):
        raise ValueError("a position to grow is named twice or is already in the pattern")
    new = torch.full((len(grow),), -1, device="cpu") if reused is None else reused
    source = torch.cat([slots_of(kept.int(), slots), new.int()])[order]
    source[order >= len(kept)] = new.int()  # in ascending order of the positions
    return SortedEntries(row_pointers(flat, height, width), flat.remainder(width).int(), source)


def to_slot_order(entries: Tensor, slots: Tensor) -> Tensor:
    """Reorder entries in row-major order, [nnz, ...], by slots; if `slots` is [0] they are."""
    if not len(slots):
        return entries
    return torch.empty_like(entries).index_copy_(0, slots.long(), entries)


def slots_of(entries: Tensor, slots: Tensor) -> Tensor:
    """Return the slots of some entries, int32 [any]."""
    return slots.index_select(0, entries) if len(slots) else entries


def nonzero_positions(chosen: Tensor, offset: int = 0, out: Tensor | None = None) -> Tensor:
    """Return the indices at which a mask, bool [n], is set, plus `offset`: int64 [any].

    Args:
        out: a tensor on the CPU, of the right size, to write them to.
    """
    if not chosen.is_cpu or native.load() is None:
        indices = chosen.nonzero().flatten().add_(offset)
        return indices if out is None else out.copy_(indices)
    chosen = chosen.contiguous()
    if out is None:
        # torch.count_nonzero would convert the mask to int64.
        out = empty(int(np.count_nonzero(chosen.numpy())), dtype=torch.int64, brief=True)
    native.call("dynsparse_rank_places", chosen, len(chosen), offset, out)
    return out


def membership_mask(numbers: Tensor, count: int) -> Tensor:
    """Return a mask, bool [count], of the indices that are among `numbers`, int64.

    `nonzero_positions` of it is faster than sorting the numbers.
    """
    return torch.zeros(count, dtype=torch.bool, device="cpu").index_fill_(0, numbers, True)


def copy_tensor(tensor: Tensor) -> Tensor:
    """Copy a tensor to memory of `empty`."""
    return empty(*tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def move_entries(tensor: Tensor, source: Tensor) -> Tensor:
    """Return a new tensor whose entry j is tensor[source[j]], or zero where source[j] is -1."""
    on_cpu = tensor.is_cpu and source.is_cpu
    if not on_cpu or native.load() is None or not tensor.numel():
        return move(tensor, source.to(tensor.device))
    moved = empty(len(source), *tensor.shape[1:], dtype=tensor.dtype)
    tensor = tensor.detach().contiguous()
    source = source.contiguous()
    native.call(
        "dynsparse_pattern_move",
        *(tensor, tensor.nbytes // len(tensor), source, len(source), moved),
        torch.get_num_threads(),
    )
    return moved
