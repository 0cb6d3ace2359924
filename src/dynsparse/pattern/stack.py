"""Patterns of several layers on a device, stacked: an update calls each operator once for all."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from dynsparse.pattern.on_device import (
    assign_slots,
    column_pointers,
    find_slots,
    flat_positions,
    merge,
    order_by_slots,
    remove_slots,
    row_pointers,
)
from dynsparse.pattern.rewiring import Rewiring
from dynsparse.pattern.sparse_pattern import PatternIndex, SparsePattern


class PatternStack:
    """Patterns of equal shape, block size, number of blocks and device. Nothing synchronises.

    Args:
        like: a pattern of their shape and block size.
        row_ptr, cols: int32 [layers, height + 1] and [layers, nnz], by rows.
        slots: int32 [layers, nnz], the slot of each entry, or [layers, 0] if slots are in this
            order.
    """

    def __init__(self, like: SparsePattern, row_ptr: Tensor, cols: Tensor, slots: Tensor) -> None:
        self.like, self.row_ptr, self.cols, self.slots = like, row_ptr, cols, slots

    @classmethod
    def of(cls, patterns: Sequence[SparsePattern], device: torch.device) -> PatternStack:
        """Stack patterns, those that are not on the device by copying them there."""
        tensors = [pattern._tensors_on(device) for pattern in patterns]
        return cls(patterns[0], *map(torch.stack, zip(*tensors, strict=True)))

    @classmethod
    def from_flat(
        cls, flat: Tensor, like: SparsePattern, slots: Tensor | None = None
    ) -> PatternStack:
        """Stack patterns of sorted, distinct positions, int64 [layers, nnz]."""
        height, width = like.grid
        if slots is None:
            slots = flat.new_empty(len(flat), 0, dtype=torch.int32)
        return cls(like, row_pointers(flat, height, width), flat.remainder(width).int(), slots)

    @cached_property
    def flat(self) -> Tensor:
        """Flat block positions by rows, int64 [layers, nnz]."""
        return flat_positions(self.row_ptr, self.cols, self.like.grid[1])

    @property
    def index(self) -> PatternIndex:
        """The index tensors, [layers, ...], without the order by columns."""
        nothing = self.cols.new_empty(len(self.cols), 0)
        col_ptr = column_pointers(self.cols, self.like.grid[1])
        return PatternIndex(self.row_ptr, self.cols, col_ptr, nothing, nothing, self.slots)

    def unbind(self) -> list[SparsePattern]:
        """Return the patterns, which share the memory of the stack."""
        tensors = zip(self.row_ptr, self.cols, self.slots, strict=True)
        return [SparsePattern._of_tensors(self.like, *own) for own in tensors]

    def remove(self, drop: Tensor) -> PatternStack:
        """Return the patterns without the distinct slots `drop`, int64 [layers, any]."""
        flat = remove_slots(order_by_slots(self.flat, self.slots), drop)
        return PatternStack.from_flat(flat, self.like)

    def rewire(
        self,
        patterns: Sequence[SparsePattern],
        drop: Tensor,
        grow: Tensor,
        unless: Tensor | None = None,
        *,
        all_new: bool = False,
        row_major: bool = False,
    ) -> tuple[list[Rewiring], PatternStack]:
        """Compute the same as `Rewiring.make` for each layer; return the patterns after it, too.

        Arguments are not checked. A position that is both dropped and grown counts as neither.

        Args:
            patterns: those of this stack.
            drop, grow: slots and positions, int64 [layers, any].
            unless: bool [layers]: where true, the pattern stays as it is. Only for updates that
                keep the number of blocks.
            all_new: no position of `grow` is one of `drop`, so the host knows the number of grown
                blocks (none if `unless` holds).
            row_major: see `Rewiring.make`.
        """
        with torch.inference_mode(False):
            slots, is_explicit = self.slots, self.slots.shape[-1] > 0
            same = torch.arange(self.cols.shape[-1], dtype=torch.int32, device=drop.device)
            same = same.expand_as(self.cols)
            leaving = order_by_slots(same.long(), slots).gather(-1, drop) if is_explicit else drop
            flat, source = merge(self.flat, leaving, grow)
            source = find_slots(source, slots)
            slots_after = grown = None
            if drop.shape[-1] == grow.shape[-1] and not row_major:
                # Dropped slots go to grown blocks in order, as in `make`.
                slots_after, grown = assign_slots(source)
                if unless is not None:
                    grown = grown.logical_and(unless.logical_not().unsqueeze(-1))
                    slots_before = slots if is_explicit else same
                    slots_after = torch.where(unless.unsqueeze(-1), slots_before, slots_after)
                source = torch.where(grown, -1, same)
            elif unless is not None:
                source = torch.where(unless.unsqueeze(-1), same, source)
            if unless is not None:
                flat = torch.where(unless.unsqueeze(-1), self.flat, flat)
            after = PatternStack.from_flat(flat, self.like, slots_after)
        rewirings = [
            Rewiring._unchecked(before, pattern, _device_source=own)
            for before, pattern, own in zip(patterns, after.unbind(), source, strict=True)
        ]
        if grown is not None:
            for rewiring, own in zip(rewirings, grown, strict=True):
                vars(rewiring).update(keeps_slots=True, _device_grown=own)
        if all_new:
            for rewiring in rewirings:
                vars(rewiring)["_known_grown"] = grow.shape[-1]
        return rewirings, after
