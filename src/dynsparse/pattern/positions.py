"""Where the positions of a pattern are held: rows by pointers, and a column for each block.

Entries are in row-major order; the slot of an entry is where its values are. Both orders are the
same until an update gives dropped slots to grown connections. 4 bytes per block, and 4 more for the
slots once the orders differ. Everything else is made of these where it is wanted.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.compiler import is_compiling

from dynsparse.encoding import by_columns, by_slots, empty, moved
from dynsparse.pattern.arriving import Arriving
from dynsparse.pattern.on_device import column_pointers, places, positions

T = TypeVar("T")


class PatternIndex(NamedTuple):
    """The index tensors the sparse products take: CSR, and CSC with its permutation. All int32.

    `row_ptr` [out/b + 1] and `cols` [nnz] are the pattern by block rows, and `slots` [nnz] says
    where the values of each of its entries are; [0] where they are in this order. `col_ptr`
    [in/b + 1] and `csc_rows` [nnz] are the same blocks by columns; the values of entry p of that
    order are in slot `csc_perm[p]`. Off the CPU, and for values that ranks share out, these two are
    left out ([0]): products make them where they need them.
    """

    row_ptr: Tensor
    cols: Tensor
    col_ptr: Tensor
    csc_rows: Tensor
    csc_perm: Tensor
    slots: Tensor


@contextlib.contextmanager
def _plain_tensors() -> Iterator[None]:
    """Whatever watches the caller, what is made here is kept and must be ordinary: neither of a
    function transform, nor of inference mode, whose tensors do not count writes."""
    with torch._C._DisableFuncTorch(), torch.inference_mode(False):
        yield


class Positions:
    """The positions of blocks in a grid, on the CPU, on a device, or on both."""

    shape: tuple[int, int]
    block_size: int
    # `row_ptr`, `sorted_cols` and `slots` on a device: memory of its own where an update there has
    # made them, that of the layer's index while the layer has this pattern.
    _there: tuple[Tensor, Tensor, Tensor] | None = None
    # All of them on their way to the CPU.
    _coming: Arriving | None = None
    _rows: weakref.ref[Tensor] | None = None

    @property
    def grid(self) -> tuple[int, int]:
        """The shape in blocks."""
        return self.shape[0] // self.block_size, self.shape[1] // self.block_size

    def _split(self, flat: Tensor) -> None:
        height, width = self.grid
        with _plain_tensors():
            cols = empty(len(flat), dtype=torch.int32)
            np.remainder(flat.numpy(), width, out=cols.numpy(), casting="unsafe")
            self._hold(places(flat, height, width), cols, cols.new_empty(0))

    def _hold(self, row_ptr: Tensor, cols: Tensor, slots: Tensor) -> None:
        vars(self).update(row_ptr=row_ptr, sorted_cols=cols, slots=slots)

    @property
    def rows(self) -> Tensor:
        """Block rows of the slots, int32 [nnz], on the CPU; made of `row_ptr` when asked for."""
        rows = None if self._rows is None else self._rows()
        if rows is None:
            with _plain_tensors():
                each = torch.arange(self.grid[0], dtype=torch.int32)
                rows = each.repeat_interleave(self.row_ptr.diff(), output_size=self.nnz)
                rows = by_slots(rows, self.slots)
            self._rows = weakref.ref(rows)
        return rows

    @property
    def cols(self) -> Tensor:
        """Block columns of the slots, int32 [nnz], on the CPU."""
        if not len(self.slots):
            return self.sorted_cols
        with _plain_tensors():
            return by_slots(self.sorted_cols, self.slots)

    @cached_property
    def row_ptr(self) -> Tensor:
        """Where each block row's entries begin, int32 [out/b + 1]."""
        return self._fetched("row_ptr")

    @cached_property
    def sorted_cols(self) -> Tensor:
        """Block columns of the entries in row-major order, int32 [nnz], on the CPU."""
        return self._fetched("sorted_cols")

    @cached_property
    def slots(self) -> Tensor:
        """The slot of each entry in row-major order, int32 [nnz], on the CPU; [0] where slots have
        that order."""
        return self._fetched("slots")

    def _fetched(self, name: str) -> Tensor:
        coming = self._coming
        with _plain_tensors():
            row_ptr, cols, slots = (self._to_come() if coming is None else coming).get()
        self._hold(row_ptr, cols, slots)
        self._coming = None
        return vars(self)[name]

    def _send(self) -> None:
        """Let what only a device knows come to the CPU, without waiting for it."""
        if self._coming is None and "sorted_cols" not in vars(self):
            with _plain_tensors():
                self._coming = self._to_come()

    def _to_come(self) -> Arriving:
        return self._read(lambda *held: Arriving(*held))

    @property
    def _is_here(self) -> bool:
        """Whether nobody would wait who asked for the positions."""
        return "sorted_cols" in vars(self) or (self._coming is not None and self._coming.is_there)

    def _read(self, of: Callable[[Tensor, Tensor, Tensor], T]) -> T:
        """`of` what is on a device, which is another place once the layer has another pattern."""
        while True:
            there = self._there
            assert there is not None
            found = of(*there)
            if self._there is there:
                return found

    @property
    def flat(self) -> Tensor:
        """Flat block positions (row * (in/b) + col) of the slots, int64 [nnz]; computed at each
        call."""
        return by_slots(self.sorted_flat, self.slots)

    @property
    def sorted_flat(self) -> Tensor:
        """Flat block positions in row-major order, int64 [nnz]; computed at each call."""
        return positions(self.row_ptr, self.sorted_cols, self.grid[1])

    @property
    def _device(self) -> torch.device:
        """Where the pattern is: the CPU, but for what only a device knows."""
        there = self._there
        return (
            torch.device("cpu") if there is None or "sorted_cols" in vars(self) else there[1].device
        )

    def _is_on(self, device: torch.device) -> bool:
        return self._there is not None and self._there[1].device == device

    def _flat_on(self, device: torch.device) -> Tensor:
        """`flat` on a device."""
        if not self._is_on(device):
            return self.flat.to(device)
        width = self.grid[1]
        return self._read(lambda ptr, cols, slots: by_slots(positions(ptr, cols, width), slots))

    def _sorted_flat_on(self, device: torch.device) -> Tensor:
        """`sorted_flat` on a device."""
        if not self._is_on(device):
            return self.sorted_flat.to(device)
        width = self.grid[1]
        return self._read(lambda row_ptr, cols, slots: positions(row_ptr, cols, width))

    def _slots_on(self, device: torch.device) -> Tensor:
        """`slots` on a device."""
        if not self._is_on(device):
            return self.slots.to(device)
        return self._read(lambda row_ptr, cols, slots: slots)

    def _index_on(self, device: torch.device) -> PatternIndex:
        """The tensors of `index` on a device. Off the CPU they share no memory with the pattern,
        and the order by columns is left out."""
        if self._is_on(device):
            return self._thin(*self._read(lambda *held: [tensor.clone() for tensor in held]))
        if device.type == "cpu":
            return self.index
        held = self.row_ptr, self.sorted_cols, self.slots
        return self._thin(*(tensor.to(device) for tensor in held))

    def _shared_on(self, device: torch.device) -> PatternIndex:
        """As `_index_on`, sent to a device once, for who writes to none of it."""
        if device.type == "cpu" or is_compiling():
            return self._index_on(device)
        found = self._shared.get(device)
        if found is None:
            with _plain_tensors():
                found = self._shared[device] = self._index_on(device)
        return found

    @cached_property
    def _shared(self) -> dict[torch.device, PatternIndex]:
        return {}

    def _thin_index(self) -> PatternIndex:
        """`index` without the order by columns."""
        return self._thin(self.row_ptr, self.sorted_cols, self.slots)

    def _thin(self, row_ptr: Tensor, cols: Tensor, slots: Tensor) -> PatternIndex:
        nothing = cols.new_empty(0)
        pointers = column_pointers(cols, self.grid[1])
        return PatternIndex(row_ptr, cols, pointers, nothing, nothing, slots)

    def _live_in(self, index: PatternIndex) -> None:
        """From now on a layer's index on a device holds this pattern."""
        self._there = index.row_ptr, index.cols, index.slots

    def _live_here(self) -> None:
        """From now on the CPU holds this pattern, and no device."""
        if self._there is not None and self.sorted_cols is not None:
            self._there = None

    def _left(self, index: PatternIndex) -> tuple[Tensor, Tensor, Tensor] | None:
        """What the pattern holds once another is written over `index`: nothing more where the CPU
        has it, or a copy."""
        there = self._there
        if there is None or there[1] is not index.cols:
            return there
        if "sorted_cols" in vars(self):
            return None
        return there[0].clone(), there[1].clone(), there[2].clone()

    @property
    def nnz(self) -> int:
        """How many blocks are present."""
        there = self._there
        return len(self.sorted_cols if there is None else there[1])

    @property
    def _is_row_major(self) -> bool:
        """Whether slots have this order, without waiting for a device."""
        there = self._there
        return not len(self.slots if there is None else there[2])

    @cached_property
    def index(self) -> PatternIndex:
        """The kernels' index tensors, made once per pattern."""
        with _plain_tensors():
            pointers, rows, entries = by_columns(self.row_ptr, self.sorted_cols, self.grid[1])
            slots = self.slots
            order = moved(slots, entries) if len(slots) else entries
            return PatternIndex(self.row_ptr, self.sorted_cols, pointers, rows, order, slots)

    def by_rows(self, by_slot: Tensor) -> Tensor:
        """What has an entry for each slot ([nnz, ...]), in row-major order."""
        slots = self.slots
        return by_slot[slots.to(by_slot.device)] if len(slots) else by_slot

    def forget_index(self) -> None:
        """Free the memory of `index`; it is made again when asked for."""
        self.__dict__.pop("index", None)
