"""How one pattern turns into the next: what is kept, what left, what was grown."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from dynsparse.checks import check_kind, check_tensor
from dynsparse.encoding import (
    by_slots,
    copied,
    follow_,
    members,
    merge,
    moved,
    set_places,
    slots_of,
)
from dynsparse.files.shorten import shortened
from dynsparse.pattern.arriving import Arriving
from dynsparse.pattern.coordinates import INT32_MAX, coordinates
from dynsparse.pattern.on_device import merge as merge_on_device
from dynsparse.pattern.on_device import move, refill, sources
from dynsparse.pattern.sparse_pattern import SparsePattern
from dynsparse.typed import typed


@dataclass(frozen=True)
class Rewiring:
    """One pattern update: the pattern before, the pattern after, and where each new slot is from.

    `source` is int32 [after.nnz]: the old slot a new slot comes from, or -1 for a grown one. An
    update that keeps the number of blocks gives the slots of dropped blocks to grown ones, so that
    survivors keep theirs (`keeps_slots`).
    Kernels read where it points, so one that comes from outside is looked through. That of an
    update on a device comes to the CPU when somebody asks for it.

    Raises:
        TypeError: no patterns, or a source that is no int32 tensor on the CPU.
        ValueError: patterns of other shapes or block sizes, a source of another length, one that
            points outside, or at a slot with another position.
    """

    before: SparsePattern
    after: SparsePattern
    source: Tensor
    # The slots that `make` gave to grown blocks, int64, ascending; `source` follows from them.
    _reused: ClassVar[Tensor | None] = None

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
    def _trusted(cls, before: SparsePattern, after: SparsePattern, source: Tensor) -> Rewiring:
        """What is right by the way it was made; to look through it costs as much as to make it."""
        made = cls.__new__(cls)
        vars(made).update(before=before, after=after, source=source)
        return made

    @classmethod
    def _on_device(
        cls,
        pattern: SparsePattern,
        drop: Tensor,
        grow: Tensor,
        unless: Tensor | None = None,
        all_new: bool = False,
        *,
        row_major: bool = False,
    ) -> Rewiring:
        """As `make`, on the device of `drop` and `grow`, without waiting for it.

        Nothing is looked through. A position that is dropped and grown in one counts as neither.

        Args:
            unless: bool, on the device: where it holds the pattern stays as it is. Only for updates
                that keep the number of blocks.
            all_new: no position of `grow` is one that `drop` leaves, so that as many are grown
                (none where `unless` holds), which the host then knows.
            row_major: see `make`.
        """
        with torch.inference_mode(False):
            before, slots = pattern._sorted_flat_on(drop.device), pattern._slots_on(drop.device)
            own = torch.arange(len(before), dtype=torch.int32, device=before.device)
            leaving = by_slots(own.long(), slots).index_select(0, drop) if len(slots) else drop
            flat, source = merge_on_device(before, leaving, grow)
            source = _slots_of_sources(source, slots)
            slots_after = None
            if len(drop) == len(grow) and not row_major:
                # Freed slots go to grown blocks in order, as `make` does it.
                slots_after, free = refill(source)
                source = torch.where(free, -1, own)
                if unless is not None:
                    flat = torch.where(unless, before, flat)
                    source = torch.where(unless, own, source)
                    slots_before = slots if len(slots) else own
                    slots_after = torch.where(unless, slots_before, slots_after)
            elif unless is not None:
                flat = torch.where(unless, before, flat)
                source = torch.where(unless, own, source)
        after = SparsePattern._on_device(flat, pattern, slots_after)
        made = cls._held_there(pattern, after, source)
        if slots_after is not None:
            vars(made)["keeps_slots"] = True
        if all_new:
            vars(made)["_joined"] = len(grow)
        return made

    @classmethod
    def _held_there(cls, before: SparsePattern, after: SparsePattern, source: Tensor) -> Rewiring:
        """As `_trusted`, with a source on a device."""
        made = cls.__new__(cls)
        vars(made).update(before=before, after=after, _held=source)
        return made

    def __getattr__(self, name: str) -> Any:
        # Asked for what is not there only.
        if name == "source" and self._reused is not None:
            source = torch.arange(self.after.nnz, dtype=torch.int32)
            source[self._reused] = -1
            vars(self).update(source=source)
            return source
        if name != "source" or "_held" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        coming = vars(self).get("_coming")
        (source,) = (Arriving(vars(self)["_held"]) if coming is None else coming).get()
        vars(self).update(source=source, _coming=None)
        return source

    def __getstate__(self) -> dict[str, Any]:
        return {"before": self.before, "after": self.after, "source": self.source}

    def _send(self) -> None:
        """Let what only a device knows come to the CPU, without waiting for it: whoever asks for
        it later waits for this alone."""
        self.before._send()
        self.after._send()
        own = vars(self)
        if "source" not in own and "_held" in own and own.get("_coming") is None:
            own["_coming"] = Arriving(own["_held"])

    @property
    def _is_here(self) -> bool:
        """Whether nobody would wait who asked for any of it."""
        coming = vars(self).get("_coming")
        own = "_held" not in vars(self) or "source" in vars(self)
        own = own or (coming is not None and coming.is_there)
        return own and self.before._is_here and self.after._is_here

    @property
    def _grown_count(self) -> int:
        """How many slots were grown, without waiting for a device where the host knows it."""
        known: int | None = vars(self).get("_joined")
        return len(self.grown) if known is None else known

    def _source_on(self, device: torch.device) -> Tensor:
        """`source` on a device, without waiting for it where the update was made there."""
        held: Tensor | None = vars(self).get("_held")
        return self.source.to(device) if held is None or held.device != device else held

    @classmethod
    @typed
    def make(
        cls, pattern: SparsePattern, drop: Tensor, grow: Tensor, *, row_major: bool = False
    ) -> Rewiring:
        """Drop slots and grow positions.

        Where as many join as leave, they take the slots that become free, in order, and survivors
        keep theirs. Otherwise slots get row-major order.

        Args:
            pattern: the pattern before.
            drop: the slots that leave, int64 [any], distinct, in any order.
            grow: the flat block positions that join, int64 [any], distinct, in any order. A
                position may join only if it is free once `drop` has left.
            row_major: whether slots get row-major order in any case.

        Raises:
            ValueError: a slot or position out of range or named twice, or a position that is taken.
        """
        check_kind("pattern", pattern, SparsePattern, "a SparsePattern")
        drop, grow = _integers("drop", drop), _integers("grow", grow)
        slots, nnz = pattern.slots, pattern.nnz
        if len(drop) and not (int(drop.min()) >= 0 and int(drop.max()) < nnz):
            raise ValueError(f"slots to drop must lie in [0, {nnz})")
        leaves = members(drop, nnz)
        reused = set_places(leaves)
        if len(reused) != len(drop):
            raise ValueError("a slot to drop is named twice")
        leaving = set_places(leaves[slots]) if len(slots) else reused
        merged = merge(pattern.row_ptr, pattern.sorted_cols, pattern.grid[1], leaving, grow)
        if len(merged.cols) > INT32_MAX:
            raise ValueError(f"at most {INT32_MAX} blocks fit a pattern, got {len(merged.cols)}")
        source = merged.source  # by entries so far
        after = SparsePattern.__new__(SparsePattern)
        after.shape, after.block_size = pattern.shape, pattern.block_size
        if len(drop) != len(grow) or row_major:
            after._hold(merged.row_ptr, merged.cols, source.new_empty(0))
            return cls._trusted(pattern, after, _slots_of_sources(source, slots))
        # Freed slots go to grown blocks in order, so that slots stay near row-major order.
        slots = moved(slots, source) if len(slots) else copied(source)
        slots.masked_scatter_(source < 0, reused.int())
        after._hold(merged.row_ptr, merged.cols, slots)
        made = cls.__new__(cls)
        vars(made).update(before=pattern, after=after, _reused=reused)
        return made

    @classmethod
    @typed
    def between(cls, before: SparsePattern, after: SparsePattern) -> Rewiring:
        """The rewiring that leads from one pattern to another of the same shape and block size."""
        _check_alike(before, after)
        if "cols" not in vars(after):
            device = after._device
            with torch.inference_mode(False):
                own = before._sorted_flat_on(device)
                source = sources(own, after._flat_on(device))
                source = _slots_of_sources(source, before._slots_on(device))
            return cls._held_there(before, after, source)
        positions = after.flat
        stays = before.contains(positions)
        source = torch.full((after.nnz,), -1, dtype=torch.int32)
        entries = torch.searchsorted(before.sorted_flat, positions[stays], out_int32=True)
        source[stays] = slots_of(entries, before.slots)
        return cls._trusted(before, after, source)

    @cached_property
    def keeps_slots(self) -> bool:
        """Whether every survivor keeps its slot, so that only those of grown blocks get others.
        Of updates on a device only those are said to that were made so."""
        if self._reused is not None:
            return True
        if "_held" in vars(self) or not self.keeps_size:
            return False
        slots = torch.arange(self.after.nnz, dtype=torch.int32)
        return torch.equal(torch.where(self.source < 0, slots, self.source), slots)

    @property
    def keeps_size(self) -> bool:
        """Whether as many blocks are there after as before."""
        return self.after.nnz == self.before.nnz

    @property
    def grown(self) -> Tensor:
        """The new slots that were grown, int64."""
        reused = self._reused
        return (self.source < 0).nonzero().flatten() if reused is None else reused

    @property
    def dropped(self) -> Tensor:
        """The old slots that left, int64."""
        if self._reused is not None:
            return self._reused
        leaves = torch.ones(self.before.nnz, dtype=torch.bool)
        leaves[self.source[self.source >= 0].long()] = False
        return leaves.nonzero().flatten()

    def apply(self, tensor: Tensor, fill: float | Tensor = 0.0) -> Tensor:
        """`tensor` ([before.nnz, ...]) in the order of the new slots: a new tensor.

        Survivors keep their entries; grown slots get `fill`: a number, a tensor [grown, ...] in
        slot order, or one [after.nnz, ...], of which their own entries count. On a device nothing
        waits for the last.
        """
        self._check_leading(tensor)
        self._check_fill(fill, tensor)
        if self._is_followed_there(tensor):
            return move(tensor, self._source_on(tensor.device), fill)
        if self._reused is not None:
            out = tensor.clone() if tensor.requires_grad else copied(tensor)
            out[self._reused] = 0
        elif tensor.requires_grad and len(tensor):  # who asks for it gets something differentiable
            out = tensor.index_select(0, self.source.clamp(min=0))
            out[self.source < 0] = 0
        else:
            out = moved(tensor, self.source)
        return self._filled(out, fill)

    def _filled(self, tensor: Tensor, fill: float | Tensor) -> Tensor:
        """A tensor whose grown entries are zero, with `fill` there."""
        if isinstance(fill, Tensor) or fill != 0:
            grown = self.grown.to(tensor.device)
            own = _at(fill, grown, tensor).to(tensor) if isinstance(fill, Tensor) else fill
            tensor[grown] = own
        return tensor

    def apply_(self, *tensors: Tensor, fill: float | Tensor = 0.0) -> None:
        """What `apply` does, in place: `tensors` keep their memory and need no more of it.

        Only for rewirings that keep the number of blocks.
        """
        for tensor in tensors:
            self._check_leading(tensor)
            self._check_fill(fill, tensor)
        if not self.keeps_size:
            raise ValueError(
                f"{self.before.nnz} blocks become {self.after.nnz}, which tensors cannot follow in "
                "place: use apply()"
            )
        there = [tensor for tensor in tensors if self._is_followed_there(tensor)]
        for tensor in there:  # as copy_ does, but for tensors without memory, too
            torch._foreach_copy_([tensor], [move(tensor, self._source_on(tensor.device), fill)])
        tensors = tuple(t for t in tensors if not self._is_followed_there(t))
        if self._reused is not None:
            for tensor in tensors:
                tensor[self._reused] = 0
        elif tensors and self._ascends:
            follow_(tensors, self.source)
        else:
            for tensor in tensors:
                tensor.copy_(moved(tensor, self.source))
        for tensor in tensors:
            self._filled(tensor, fill)

    @cached_property
    def _ascends(self) -> bool:
        """Whether survivors stay in the same order, in which they move in place on the CPU. To find
        out takes memory: once, before anything changes."""
        if "_held" in vars(self) or self._reused is not None:
            return True
        kept = self.source[self.source >= 0]
        return bool((kept[1:] > kept[:-1]).all())

    def _is_followed_there(self, tensor: Tensor) -> bool:
        """Whether a tensor follows on its own device."""
        return not tensor.is_cpu or "_held" in vars(self)

    def _check_fill(self, fill: float | Tensor, tensor: Tensor) -> None:
        """Before anything is changed."""
        if not isinstance(fill, Tensor):
            if not isinstance(fill, (int, float)):
                raise TypeError(f"fill must be a number or a tensor, got {shortened(fill)}")
            return
        first, *rest = spread = [1] * (tensor.dim() - fill.dim()) + list(fill.shape)
        if (
            len(spread) != tensor.dim()
            or (first not in (1, self.after.nnz) and first != self._grown_count)
            or any(own not in (1, size) for own, size in zip(rest, tensor.shape[1:], strict=True))
        ):
            wanted = [self._grown_count, *tensor.shape[1:]]
            raise ValueError(f"fill must be a number or {wanted}, got {list(fill.shape)}")

    def _check_leading(self, tensor: Tensor) -> None:
        check_tensor("what follows a rewiring", tensor)
        if tensor.dim() == 0 or len(tensor) != self.before.nnz:
            raise ValueError(
                f"expected a tensor with {self.before.nnz} leading entries, "
                f"got the shape {list(tensor.shape)}"
            )


def _slots_of_sources(source: Tensor, slots: Tensor) -> Tensor:
    """The slots of entries, int32; -1 stays."""
    if not len(slots):
        return source
    return torch.where(source < 0, -1, slots.index_select(0, source.clamp(min=0)).int())


def _at(fill: Tensor, grown: Tensor, tensor: Tensor) -> Tensor:
    """What the grown slots of a tensor get, of a fill that may have an entry for every slot."""
    for_all = fill.dim() == tensor.dim() and len(fill) == len(tensor)
    return fill[grown.to(fill.device)] if for_all else fill


def _check_alike(before: SparsePattern, after: SparsePattern) -> None:
    check_kind("before", before, SparsePattern, "a SparsePattern")
    check_kind("after", after, SparsePattern, "a SparsePattern")
    if (before.shape, before.block_size) != (after.shape, after.block_size):
        raise ValueError(f"{before} and {after} differ in shape or block size")


def _integers(name: str, given: Any) -> Tensor:
    """int64 [any], on the CPU, of what is a tensor or can be one."""
    return torch.from_numpy(coordinates(given, name, 2**63 - 1, least=-(2**63)))
