"""One pattern update: which slots are kept, dropped and grown."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from dynsparse._core.checks import check_kind, check_tensor, check_types, shorten
from dynsparse.pattern.coordinates import INT32_MAX, check_coordinates
from dynsparse.pattern.index_arrays import (
    SortedEntries,
    copy_tensor,
    membership_mask,
    merge,
    move_entries,
    nonzero_positions,
    slots_of,
)
from dynsparse.pattern.on_device import HostCopy, find_slots, find_sources, move
from dynsparse.pattern.sparse_pattern import SparsePattern


@dataclass(frozen=True)
class Rewiring:
    """One pattern update: the pattern before, the pattern after, and where each new slot is from.

    `source` is int32 [after.nnz]: the old slot of each new slot, -1 where it was grown. An update
    that keeps the number of blocks gives the slots of dropped blocks to grown ones, so that
    survivors keep theirs (`keeps_slots`). Kernels index by `source`, so the constructor checks it.
    That of an update on a device is copied to the CPU when it is read.

    Raises:
        TypeError: no patterns, or a source that is not an int32 tensor on the CPU.
        ValueError: patterns that differ in shape or block size, a source of another length, with
            slots out of range, or with slots of other positions.
    """

    before: SparsePattern
    after: SparsePattern
    source: Tensor
    # The slots that `make` gave to grown blocks, int64, ascending; `source` follows from them.
    _reused: ClassVar[Tensor | None] = None
    # Which slots an update on a device gave to grown blocks, bool [nnz], if survivors keep theirs.
    _device_grown: ClassVar[Tensor | None] = None

    def __repr__(self) -> str:
        grown = self._grown_count
        before, after = self.before.nnz, self.after.nnz
        dropped = before - after + grown
        return f"Rewiring({before} -> {after} blocks, {dropped} dropped, {grown} grown)"

    def __post_init__(self) -> None:
        _check_alike(self.before, self.after)
        source = check_tensor("source", self.source)
        if source.dtype != torch.int32 or not source.is_cpu or source.is_meta:
            raise TypeError(
                f"source must be int32 on the CPU, got {source.dtype} on {source.device}"
            )
        if list(source.shape) != [self.after.nnz]:
            raise ValueError(f"source must be [{self.after.nnz}], got {list(source.shape)}")
        kept = source >= 0
        old = source[kept].long()
        if len(source) and (int(source.min()) < -1 or int(source.max()) >= self.before.nnz):
            raise ValueError(
                f"source must lie in [-1, {self.before.nnz}), "
                f"got {int(source.min())} to {int(source.max())}"
            )
        if not torch.equal(self.before.flat[old], self.after.flat[kept]):
            raise ValueError("source must lead every block to the slot that held its position")

    @classmethod
    def _unchecked(cls, before: SparsePattern, after: SparsePattern, **source: Tensor) -> Rewiring:
        """Make a rewiring without checks, which would take as long as the rest.

        Args:
            source: `source`, or what it follows from: `_device_source` or `_reused`.
        """
        rewiring = cls.__new__(cls)
        vars(rewiring).update(before=before, after=after, **source)
        return rewiring

    def __getattr__(self, name: str) -> Any:
        # Only called for attributes that are not set.
        if name == "source" and self._reused is not None:
            source = torch.arange(self.after.nnz, dtype=torch.int32, device="cpu")
            source[self._reused] = -1
            vars(self).update(source=source)
            return source
        if name != "source" or "_device_source" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        copy = vars(self).get("_host_copy")
        (source,) = (HostCopy(vars(self)["_device_source"]) if copy is None else copy).get()
        vars(self).update(source=source, _host_copy=None)
        return source

    def __getstate__(self) -> dict[str, Any]:
        return {"before": self.before, "after": self.after, "source": self.source}

    def _start_host_copy(self) -> None:
        """Start copying to the CPU what is only on a device; later reads wait for that only."""
        self.before._start_host_copy()
        self.after._start_host_copy()
        cache = vars(self)
        if "source" not in cache and "_device_source" in cache and cache.get("_host_copy") is None:
            cache["_host_copy"] = HostCopy(cache["_device_source"])

    @property
    def _is_on_host(self) -> bool:
        """Whether reading its tensors does not wait for a device."""
        copy = vars(self).get("_host_copy")
        ready = "_device_source" not in vars(self) or "source" in vars(self)
        ready = ready or (copy is not None and copy.is_ready)
        return ready and self.before._is_on_host and self.after._is_on_host

    @property
    def _grown_count(self) -> int:
        """Number of grown slots; reading it synchronises only if the host does not know it."""
        known: int | None = vars(self).get("_known_grown")
        return len(self.grown) if known is None else known

    def _source_on(self, device: torch.device) -> Tensor:
        """Return `source` on a device, without a synchronisation if the update was made there."""
        source: Tensor | None = vars(self).get("_device_source")
        return self.source.to(device) if source is None or source.device != device else source

    @classmethod
    @check_types
    def make(
        cls, pattern: SparsePattern, drop: Tensor, grow: Tensor, *, row_major: bool = False
    ) -> Rewiring:
        """Drop slots and grow positions.

        If as many blocks are grown as dropped, they take the dropped slots, in order, and survivors
        keep theirs. Otherwise slots get row-major order.

        Args:
            pattern: the pattern before.
            drop: the slots to drop, int64 [any], distinct, in any order.
            grow: the flat block positions to grow, int64 [any], distinct, in any order, free after
                the drop.
            row_major: whether slots get row-major order in any case.

        Raises:
            ValueError: a slot or position out of range or repeated, or a position that is not free.
        """
        drop, grow = _to_int64("drop", drop), _to_int64("grow", grow)
        nnz = pattern.nnz
        if len(drop) and not (int(drop.min()) >= 0 and int(drop.max()) < nnz):
            raise ValueError(f"slots to drop must lie in [0, {nnz})")
        leaves = membership_mask(drop, nnz)
        reused = nonzero_positions(leaves)
        if len(reused) != len(drop):
            raise ValueError("a slot to drop is named twice")
        entries = SortedEntries(pattern.row_ptr, pattern.sorted_cols, pattern.slots)
        keeps_slots = len(drop) == len(grow) and not row_major
        # Dropped slots go to grown blocks in order, so that slots stay near row-major order.
        merged = merge(entries, pattern.grid[1], leaves, grow, reused if keeps_slots else None)
        if len(merged.cols) > INT32_MAX:
            raise ValueError(f"at most {INT32_MAX} blocks fit a pattern, got {len(merged.cols)}")
        after = SparsePattern.__new__(SparsePattern)
        after.shape, after.block_size = pattern.shape, pattern.block_size
        if not keeps_slots:
            after._set_index(merged.row_ptr, merged.cols, merged.slots.new_empty(0))
            return cls._unchecked(pattern, after, source=merged.slots)
        after._set_index(*merged)
        return cls._unchecked(pattern, after, _reused=reused)

    @classmethod
    @check_types
    def between(cls, before: SparsePattern, after: SparsePattern) -> Rewiring:
        """Return the rewiring from one pattern to another of the same shape and block size."""
        _check_alike(before, after)
        if "cols" not in vars(after):
            device = after._device
            with torch.inference_mode(False):
                old = before._sorted_flat_on(device)
                source = find_sources(old, after._flat_on(device))
                source = find_slots(source, before._slots_on(device))
            return cls._unchecked(before, after, _device_source=source)
        positions = after.flat
        stays = before.contains(positions)
        source = torch.full((after.nnz,), -1, dtype=torch.int32, device="cpu")
        entries = torch.searchsorted(before.sorted_flat, positions[stays], out_int32=True)
        source[stays] = slots_of(entries, before.slots)
        return cls._unchecked(before, after, source=source)

    @cached_property
    def keeps_slots(self) -> bool:
        """Whether every survivor keeps its slot. For updates on a device it is false if unknown."""
        if self._reused is not None:
            return True
        if "_device_source" in vars(self) or not self.keeps_size:
            return False
        slots = torch.arange(self.after.nnz, dtype=torch.int32, device="cpu")
        return torch.equal(torch.where(self.source < 0, slots, self.source), slots)

    @property
    def keeps_size(self) -> bool:
        """Whether the number of blocks stays the same."""
        return self.after.nnz == self.before.nnz

    @property
    def grown(self) -> Tensor:
        """The new slots that were grown, int64."""
        reused = self._reused
        return (self.source < 0).nonzero().flatten() if reused is None else reused

    @property
    def dropped(self) -> Tensor:
        """The old slots that were dropped, int64."""
        if self._reused is not None:
            return self._reused
        leaves = torch.ones(self.before.nnz, dtype=torch.bool, device="cpu")
        leaves[self.source[self.source >= 0].long()] = False
        return leaves.nonzero().flatten()

    def apply(self, tensor: Tensor, fill: float | Tensor = 0.0) -> Tensor:
        """Return a copy of `tensor` [before.nnz, ...] in the order of the new slots.

        Survivors keep their entries; grown slots get `fill`: a number, a tensor [grown, ...] in
        slot order, or one [after.nnz, ...], of which only their entries are used. On a device the
        last does not synchronise.
        """
        self._check_leading(tensor)
        self._check_fill(fill, tensor)
        if not tensor.is_cpu or "_device_source" in vars(self):
            return move(tensor, self._source_on(tensor.device), fill)
        if self._reused is not None:
            out = tensor.clone() if tensor.requires_grad else copy_tensor(tensor)
            out.index_fill_(0, self._reused, 0)
        elif tensor.requires_grad and len(tensor):  # differentiable
            out = tensor.index_select(0, self.source.clamp(min=0))
            out[self.source < 0] = 0
        else:
            out = move_entries(tensor, self.source)
        if isinstance(fill, Tensor) or fill != 0:
            grown = self.grown.to(out.device)
            out[grown] = (
                _select_fill(fill, grown, out).to(out) if isinstance(fill, Tensor) else fill
            )
        return out

    def _can_write_grown(self, tensor: Tensor) -> bool:
        """Whether `_write_grown` takes this tensor: survivors keep their slots."""
        grown = self._device_grown if self._reused is None else self._reused
        is_plain = type(tensor) in (Tensor, torch.nn.Parameter)
        return is_plain and grown is not None and grown.device == tensor.device

    def _write_grown(self, tensor: Tensor, fill: float) -> None:
        """Set the entries of grown blocks in place; it allocates nothing."""
        if self._reused is not None:
            tensor.index_fill_(0, self._reused, fill)
        else:
            assert self._device_grown is not None
            tensor.masked_fill_(self._device_grown.view(-1, *[1] * (tensor.dim() - 1)), fill)

    def _check_fill(self, fill: float | Tensor, tensor: Tensor) -> None:
        if not isinstance(fill, Tensor):
            if not isinstance(fill, (int, float)):
                raise TypeError(f"fill must be a number or a tensor, got {shorten(fill)}")
            return
        first, *rest = shape = [1] * (tensor.dim() - fill.dim()) + list(fill.shape)
        if (
            len(shape) != tensor.dim()
            or (first not in (1, self.after.nnz) and first != self._grown_count)
            or any(n not in (1, size) for n, size in zip(rest, tensor.shape[1:], strict=True))
        ):
            expected = [self._grown_count, *tensor.shape[1:]]
            raise ValueError(f"fill must be a number or {expected}, got {list(fill.shape)}")

    def _check_leading(self, tensor: Tensor) -> None:
        check_tensor("what follows a rewiring", tensor)
        if tensor.dim() == 0 or len(tensor) != self.before.nnz:
            raise ValueError(
                f"expected a tensor with {self.before.nnz} leading entries, "
                f"got the shape {list(tensor.shape)}"
            )


def _select_fill(fill: Tensor, grown: Tensor, tensor: Tensor) -> Tensor:
    """Return the entries of `fill` for the grown slots, if it has one for every slot."""
    for_all = fill.dim() == tensor.dim() and len(fill) == len(tensor)
    return fill[grown.to(fill.device)] if for_all else fill


def _check_alike(before: SparsePattern, after: SparsePattern) -> None:
    check_kind("before", before, SparsePattern, "a SparsePattern")
    check_kind("after", after, SparsePattern, "a SparsePattern")
    if (before.shape, before.block_size) != (after.shape, after.block_size):
        raise ValueError(f"{before} and {after} differ in shape or block size")


def _to_int64(name: str, given: Any) -> Tensor:
    """Return `given`, a tensor or what can be one, as int64 [any] on the CPU."""
    # The components of trainers pass the right kind already.
    kind = torch.int64, torch.strided, "cpu", 1
    if isinstance(given, Tensor) and kind == (
        given.dtype, given.layout, given.device.type, given.dim()
    ):  # fmt: skip
        return given
    return torch.from_numpy(check_coordinates(given, name, 2**63 - 1, least=-(2**63)))
