"""Where the positions of a pattern are held: rows by pointers, and a column for each block.

4 bytes per block. Everything else is made of these where it is wanted.
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

from dynsparse.encoding import by_columns, empty
from dynsparse.pattern.arriving import Arriving
from dynsparse.pattern.on_device import column_pointers, places, positions

__all__ = ["PatternIndex", "Positions"]

T = TypeVar("T")


class PatternIndex(NamedTuple):
    """The index tensors the sparse products take: CSR, and CSC with its permutation. All int32.

    `row_ptr` [out/b + 1] and `cols` [nnz] are the pattern by block rows. `col_ptr` [in/b + 1] and
    `csc_rows` [nnz] are the same blocks by columns; entry p of that order is slot `csc_perm[p]`
    of the row-major order. Off the CPU, and for values that ranks share out, these two are left out
    ([0]): products make them where they need them.
    """

    row_ptr: Tensor
    cols: Tensor
    col_ptr: Tensor
    csc_rows: Tensor
    csc_perm: Tensor


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
    # `row_ptr` and `cols` on a device: memory of its own where an update there has made them, that
    # of the layer's index while the layer has this pattern.
    _there: tuple[Tensor, Tensor] | None = None
    # Both on their way to the CPU.
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
            vars(self).update(row_ptr=places(flat, height, width), cols=cols)

    @property
    def rows(self) -> Tensor:
        """Block rows of the slots, int32 [nnz], on the CPU; made of `row_ptr` when asked for."""
        rows = None if self._rows is None else self._rows()
        if rows is None:
            with _plain_tensors():
                each = torch.arange(self.grid[0], dtype=torch.int32)
                rows = each.repeat_interleave(self.row_ptr.diff(), output_size=self.nnz)
            self._rows = weakref.ref(rows)
        return rows

    @cached_property
    def row_ptr(self) -> Tensor:
        """Where each block row's slots begin, int32 [out/b + 1]."""
        return self._fetched("row_ptr")

    @cached_property
    def cols(self) -> Tensor:
        """Block columns of the slots, int32 [nnz], on the CPU."""
        return self._fetched("cols")

    def _fetched(self, name: str) -> Tensor:
        coming = self._coming
        with _plain_tensors():
            row_ptr, cols = (self._to_come() if coming is None else coming).get()
        vars(self).update(row_ptr=row_ptr, cols=cols, _coming=None)
        return row_ptr if name == "row_ptr" else cols

    def _send(self) -> None:
        """Let what only a device knows come to the CPU, without waiting for it."""
        if self._coming is None and "cols" not in vars(self):
            with _plain_tensors():
                self._coming = self._to_come()

    def _to_come(self) -> Arriving:
        return self._read(lambda *held: Arriving(*held))

    @property
    def _is_here(self) -> bool:
        """Whether nobody would wait who asked for the positions."""
        return "cols" in vars(self) or (self._coming is not None and self._coming.is_there)

    def _read(self, of: Callable[[Tensor, Tensor], T]) -> T:
        """`of` what is on a device, which is another place once the layer has another pattern."""
        while True:
            there = self._there
            assert there is not None
            found = of(*there)
            if self._there is there:
                return found

    @property
    def flat(self) -> Tensor:
        """Flat block positions (row * (in/b) + col), sorted, int64 [nnz]; computed at each call."""
        return positions(self.row_ptr, self.cols, self.grid[1])

    @property
    def _device(self) -> torch.device:
        """Where the pattern is: the CPU, but for what only a device knows."""
        there = self._there
        return torch.device("cpu") if there is None or "cols" in vars(self) else there[1].device

    def _is_on(self, device: torch.device) -> bool:
        return self._there is not None and self._there[1].device == device

    def _flat_on(self, device: torch.device) -> Tensor:
        """`flat` on a device."""
        if not self._is_on(device):
            return self.flat.to(device)
        width = self.grid[1]
        return self._read(lambda row_ptr, cols: positions(row_ptr, cols, width))

    def _index_on(self, device: torch.device) -> PatternIndex:
        """The tensors of `index` on a device. Off the CPU they share no memory with the pattern,
        and the order by columns is left out."""
        if self._is_on(device):
            there = self._read(lambda row_ptr, cols: (row_ptr.clone(), cols.clone()))
            return self._thin(*there)
        if device.type == "cpu":
            return self.index
        return self._thin(self.row_ptr.to(device), self.cols.to(device))

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
        return self._thin(self.row_ptr, self.cols)

    def _thin(self, row_ptr: Tensor, cols: Tensor) -> PatternIndex:
        nothing = cols.new_empty(0)
        return PatternIndex(row_ptr, cols, column_pointers(cols, self.grid[1]), nothing, nothing)

    def _live_in(self, index: PatternIndex) -> None:
        """From now on a layer's index on a device holds this pattern."""
        self._there = index.row_ptr, index.cols

    def _live_here(self) -> None:
        """From now on the CPU holds this pattern, and no device."""
        if self._there is not None and self.cols is not None:
            self._there = None

    def _left(self, index: PatternIndex) -> tuple[Tensor, Tensor] | None:
        """What the pattern holds once another is written over `index`: nothing more where the CPU
        has it, or a copy."""
        there = self._there
        if there is None or there[1] is not index.cols:
            return there
        return None if "cols" in vars(self) else (there[0].clone(), there[1].clone())

    @property
    def nnz(self) -> int:
        """How many blocks are present."""
        there = self._there
        return len(self.cols if there is None else there[1])

    @cached_property
    def index(self) -> PatternIndex:
        """The kernels' index tensors, made once per pattern."""
        with _plain_tensors():
            return PatternIndex(
                self.row_ptr, self.cols, *by_columns(self.row_ptr, self.cols, self.grid[1])
            )

    def forget_index(self) -> None:
        """Free the memory of `index`; it is made again when asked for."""
        self.__dict__.pop("index", None)
