"""Which blocks of a matrix are present."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.compiler import is_compiling

from dynsparse._core.checks import (
    check_integer,
    check_kind,
    check_tensor,
    check_types,
    check_within,
    is_scipy,
    shorten,
)
from dynsparse._core.html import html_table
from dynsparse.pattern.coordinates import (
    INT32_MAX,
    block_grid,
    check_coordinates,
    sample_per_row,
    sample_without_replacement,
)
from dynsparse.pattern.index_arrays import (
    SortedEntries,
    empty,
    slots_of,
    sort_by_columns,
    to_slot_order,
)
from dynsparse.pattern.on_device import HostCopy, column_pointers, flat_positions, row_pointers

T = TypeVar("T")


class PatternIndex(NamedTuple):
    """The index tensors of the sparse products: CSR, and CSC with its permutation. All int32.

    `row_ptr` [out/b + 1] and `cols` [nnz] are the pattern by block rows, `slots` [nnz] the slots of
    its entries; [0] if slots are in this order. `col_ptr` [in/b + 1] and `csc_rows` [nnz] are the
    same blocks by columns; entry p of that order has the slot `csc_perm[p]`. On devices and for
    sharded values these two are empty ([0]), and products make them when they need them.
    """

    row_ptr: Tensor
    cols: Tensor
    col_ptr: Tensor
    csc_rows: Tensor
    csc_perm: Tensor
    slots: Tensor


@contextlib.contextmanager
def _plain_tensors() -> Iterator[None]:
    """Make ordinary tensors, which can be kept, also in function transforms and inference mode."""
    with torch._C._DisableFuncTorch(), torch.inference_mode(False):
        yield


class SparsePattern:
    """Which blocks of an [out, in] matrix are present. Immutable.

    Entries are in row-major order; the slot of an entry is the index of its block in `values`. Both
    orders are the same until an update gives dropped slots to grown blocks. A pattern takes 4 bytes
    per block, and 4 more for the slots if the orders differ.

    It is on the CPU, or on the device of the update that made it; reading more than its size then
    copies it to the CPU, which synchronises.

    Args:
        rows, cols: block coordinates, integers [nnz], in any order, without duplicates.
        shape: (out_features, in_features) in elements.
        block_size: edge of the square blocks; 1 is unstructured sparsity. Must divide the shape.

    Raises:
        ValueError: a coordinate out of range, duplicates, lengths that differ, a block size that
            does not divide the shape.
        TypeError: coordinates that are not integers.
    """

    shape: tuple[int, int]
    block_size: int
    # `row_ptr`, `sorted_cols` and `slots` on a device: made by an update there, or shared with the
    # layer's index while the layer has this pattern.
    _device_index: tuple[Tensor, Tensor, Tensor] | None = None
    # Their copy to the CPU.
    _host_copy: HostCopy | None = None

    def __init__(self, rows: Any, cols: Any, *, shape: Sequence[int], block_size: int = 1) -> None:
        self._init_from_coordinates(rows, cols, shape, block_size)

    def _init_from_coordinates(
        self, rows: Any, cols: Any, shape: Sequence[int], block_size: int, in_order: bool = False
    ) -> None:
        """Initialise from the arguments of the class.

        Args:
            in_order: whether slots have the order of the coordinates, instead of row-major order.
        """
        shape, block_size, grid = block_grid(shape, block_size)
        row = check_coordinates(rows, "rows", grid[0])
        col = check_coordinates(cols, "cols", grid[1])
        if len(row) != len(col):
            raise ValueError(f"rows and cols differ in length: {len(row)} and {len(col)}")
        given = row * grid[1] + col
        # One sort, of positions alone where their order does not matter.
        order = given.argsort() if in_order else None
        flat = np.sort(given) if order is None else given[order]
        if len(flat) > 1 and (repeats := flat[1:] == flat[:-1]).any():
            r, c = divmod(int(flat[1:][repeats][0]), grid[1])
            raise ValueError(
                f"{int(repeats.sum())} duplicate coordinates, the first is (row {r}, col {c})"
            )
        self._init_from_flat(torch.from_numpy(flat), shape, block_size)
        if order is not None and not np.array_equal(flat, given):
            self.slots = torch.from_numpy(order).int()

    def _init_from_flat(self, flat: Tensor, shape: tuple[int, int], block_size: int) -> None:
        if len(flat) > INT32_MAX:
            raise ValueError(f"at most {INT32_MAX} blocks fit a pattern, got {len(flat)}")
        self.shape, self.block_size = shape, block_size
        height, width = self.grid
        with _plain_tensors():
            cols = empty(len(flat), dtype=torch.int32)
            np.remainder(flat.numpy(), width, out=cols.numpy(), casting="unsafe")
            self._set_index(row_pointers(flat, height, width), cols, cols.new_empty(0))

    @classmethod
    def _from_slots(cls, flat: Tensor, like: SparsePattern) -> SparsePattern:
        """Make a pattern of distinct flat positions in the order of slots, int64 [nnz], with the
        shape and block size of `like`."""
        pattern = cls.__new__(cls)
        ordered, slots = flat.sort()
        pattern._init_from_flat(ordered, like.shape, like.block_size)
        if not torch.equal(ordered, flat):
            pattern.slots = slots.int()
        return pattern

    @classmethod
    def _from_slot_coordinates(
        cls, rows: Any, cols: Any, *, shape: Sequence[int], block_size: int = 1
    ) -> SparsePattern:
        """Make a pattern as the constructor, but with slots in the order of the coordinates."""
        pattern = cls.__new__(cls)
        pattern._init_from_coordinates(rows, cols, shape, block_size, in_order=True)
        return pattern

    @classmethod
    def _from_entries(
        cls, entries: SortedEntries, col_ptr: Tensor, *, shape: tuple[int, int], block_size: int
    ) -> SparsePattern:
        """Make a pattern of entries that were checked, and their `column_pointers`."""
        pattern = cls.__new__(cls)
        pattern.shape, pattern.block_size = shape, block_size
        pattern._set_index(*entries)
        pattern._col_ptr = col_ptr
        return pattern

    def _to_explicit_slots(self) -> SparsePattern:
        """Return the same pattern with an explicit tensor of slots even in row-major order, so that
        its size does not change when an update changes the order."""
        if not self._is_row_major:
            return self
        pattern = SparsePattern.__new__(SparsePattern)
        pattern.shape, pattern.block_size = self.shape, self.block_size
        if "_holders" in vars(self):  # see `nn.copies`
            vars(pattern)["_holders"] = vars(self)["_holders"]
        if "sorted_cols" in vars(self):
            slots = empty(self.nnz, dtype=torch.int32)
            # With `device`, since torch would otherwise use a default device instead of `out`'s.
            slots = torch.arange(self.nnz, out=slots, device="cpu")
            pattern._set_index(self.row_ptr, self.sorted_cols, slots)
        if self._device_index is not None:
            pattern._device_index = self._read(
                lambda row_ptr, cols, _: (
                    row_ptr.clone(), cols.clone(),
                    torch.arange(len(cols), dtype=torch.int32, device=cols.device),
                )
            )  # fmt: skip
        return pattern

    def _to_row_major(self) -> SparsePattern:
        """Return the same pattern with slots in row-major order."""
        if self._is_row_major:
            return self
        entries = SortedEntries(self.row_ptr, self.sorted_cols, self.slots.new_empty(0))
        return SparsePattern._from_entries(
            entries, self._col_ptr, shape=self.shape, block_size=self.block_size
        )

    def _has_slots_of(self, other: SparsePattern) -> bool:
        """Whether the same blocks are in the same slots."""
        if self is other:
            return True
        if self._is_row_major and other._is_row_major:
            return self == other
        return self == other and torch.equal(self.flat, other.flat)

    @classmethod
    def _from_device(
        cls, flat: Tensor, like: SparsePattern, slots: Tensor | None = None
    ) -> SparsePattern:
        """Make a pattern of positions on a device, without checks or a synchronisation.

        Args:
            flat: sorted and distinct, int64 [nnz]; the caller must not write to it.
            like: a pattern with its shape and block size.
            slots: the slot of each position, int32 [nnz]; defaults to this order.
        """
        height, width = like.grid
        if slots is None:
            slots = flat.new_empty(0, dtype=torch.int32)
        cols = flat.remainder(width).int()
        return cls._of_tensors(like, row_pointers(flat, height, width), cols, slots)

    @classmethod
    def _of_tensors(
        cls, like: SparsePattern, row_ptr: Tensor, cols: Tensor, slots: Tensor
    ) -> SparsePattern:
        """Make a pattern of index tensors on a device, of the shape and block size of `like`."""
        pattern = cls.__new__(cls)
        pattern.shape, pattern.block_size = like.shape, like.block_size
        pattern._device_index = row_ptr, cols, slots
        return pattern

    @classmethod
    @check_types
    def from_flat(cls, flat: Tensor, *, shape: Sequence[int], block_size: int = 1) -> SparsePattern:
        """Make a pattern of sorted, distinct flat positions row * (in/b) + col, int64 [nnz]."""
        shape, block_size, grid = block_grid(shape, block_size)
        if flat.dtype != torch.int64 or flat.dim() != 1:
            raise TypeError(
                f"flat positions must be int64 [nnz], got {flat.dtype} {list(flat.shape)}"
            )
        if len(flat):
            if not bool((flat[1:] > flat[:-1]).all()):
                raise ValueError("flat positions must be sorted and distinct")
            if int(flat[0]) < 0 or int(flat[-1]) >= grid[0] * grid[1]:
                raise ValueError(f"flat positions must lie in [0, {grid[0] * grid[1]})")
        pattern = cls.__new__(cls)
        pattern._init_from_flat(flat, shape, block_size)
        return pattern

    @classmethod
    @check_types
    def random(
        cls,
        shape: Sequence[int],
        density: float | None = None,
        *,
        nnz: int | None = None,
        block_size: int = 1,
        per_row: bool = False,
        generator: torch.Generator | None = None,
    ) -> SparsePattern:
        """Draw a uniformly random pattern with an exact number of blocks.

        Give either `density` in [0, 1] (the count is rounded to the nearest block) or `nnz`. With
        `per_row` all block rows have the same number, to within one: a fixed fan-in of the outputs.
        Memory is in proportion to the blocks drawn, not to the matrix.
        """
        shape, block_size, grid = block_grid(shape, block_size)
        total = grid[0] * grid[1]
        if (density is None) == (nnz is None):
            raise ValueError("give either density or nnz, and not both")
        if density is not None:
            nnz = round(check_within("density", density, "[0, 1]") * total)
        count = check_integer("nnz", nnz, 0)
        if count > total:
            raise ValueError(f"nnz {count} is more than the {total} blocks of the shape {shape}")
        if per_row:
            flat = sample_per_row(*grid, count, generator)
        else:
            flat = sample_without_replacement(total, count, generator)
        return cls.from_flat(flat, shape=shape, block_size=block_size)

    @classmethod
    def full(cls, shape: Sequence[int], *, block_size: int = 1) -> SparsePattern:
        """Make a pattern with every block present."""
        return cls.random(shape, density=1.0, block_size=block_size)

    @classmethod
    def from_mask(cls, mask: Any, block_size: int = 1) -> SparsePattern:
        """Make a pattern of the blocks with any non-zero element of `mask` [out, in], bool or
        numbers."""
        mask = _as_tensor("mask", mask)
        if mask.dim() != 2:
            raise ValueError(f"mask must be [out, in], got the shape {list(mask.shape)}")
        shape, block_size, grid = block_grid(tuple(mask.shape), block_size)
        present = (mask != 0).view(grid[0], block_size, grid[1], block_size).any(3).any(1)
        return cls.from_flat(
            present.flatten().nonzero().flatten(), shape=shape, block_size=block_size
        )

    @classmethod
    def from_scipy(cls, matrix: Any, block_size: int | None = None) -> SparsePattern:
        """Make a pattern of the stored positions of a SciPy sparse matrix, with explicit zeros.

        A BSR matrix of square blocks keeps its block size; other formats become elements, or
        blocks of `block_size` with any stored element. `values_of` gives the values.
        """
        if not is_scipy(matrix):
            raise TypeError(f"expected a SciPy sparse matrix, got {type(matrix).__name__}")
        if matrix.format == "bsr" and block_size is None:
            height, width = matrix.blocksize
            if height != width:
                raise ValueError(f"only square blocks are supported, got {matrix.blocksize}")
            block_size = height
            rows = np.repeat(np.arange(len(matrix.indptr) - 1), np.diff(matrix.indptr))
            return cls(rows, matrix.indices, shape=matrix.shape, block_size=block_size)
        block = 1 if block_size is None else block_size
        shape, block, grid = block_grid(tuple(matrix.shape), block)
        coo = matrix.tocoo()
        rows = check_coordinates(coo.row, "rows", shape[0])
        cols = check_coordinates(coo.col, "cols", shape[1])
        flat = (rows // block) * grid[1] + cols // block
        # Repeated entries of a COO matrix mean one position, and so do the elements of a block.
        return cls.from_flat(torch.from_numpy(np.unique(flat)), shape=shape, block_size=block)

    @property
    def grid(self) -> tuple[int, int]:
        """The shape in blocks."""
        return self.shape[0] // self.block_size, self.shape[1] // self.block_size

    def _set_index(self, row_ptr: Tensor, cols: Tensor, slots: Tensor) -> None:
        vars(self).update(row_ptr=row_ptr, sorted_cols=cols, slots=slots)

    @property
    def rows(self) -> Tensor:
        """Block rows of the slots, int32 [nnz], on the CPU; computed from `row_ptr`."""
        with _plain_tensors():
            each = torch.arange(self.grid[0], dtype=torch.int32, device="cpu")
            rows = each.repeat_interleave(self.row_ptr.diff(), output_size=self.nnz)
            return to_slot_order(rows, self.slots)

    @property
    def cols(self) -> Tensor:
        """Block columns of the slots, int32 [nnz], on the CPU."""
        if not len(self.slots):
            return self.sorted_cols
        with _plain_tensors():
            return to_slot_order(self.sorted_cols, self.slots)

    @cached_property
    def row_ptr(self) -> Tensor:
        """The first entry of each block row, int32 [out/b + 1], on the CPU."""
        return self._fetch("row_ptr")

    @cached_property
    def sorted_cols(self) -> Tensor:
        """Block columns of the entries in row-major order, int32 [nnz], on the CPU."""
        return self._fetch("sorted_cols")

    @cached_property
    def slots(self) -> Tensor:
        """The slot of each entry in row-major order, int32 [nnz], on the CPU; [0] if slots have
        that order."""
        return self._fetch("slots")

    def _fetch(self, name: str) -> Tensor:
        copy = self._host_copy
        with _plain_tensors():
            row_ptr, cols, slots = (self._copy_to_host() if copy is None else copy).get()
        self._set_index(row_ptr, cols, slots)
        self._host_copy = None
        return vars(self)[name]

    def _start_host_copy(self) -> None:
        """Start copying to the CPU what is only on a device."""
        if self._host_copy is None and "sorted_cols" not in vars(self):
            with _plain_tensors():
                self._host_copy = self._copy_to_host()

    def _copy_to_host(self) -> HostCopy:
        return self._read(lambda *index: HostCopy(*index))

    @property
    def _is_on_host(self) -> bool:
        """Whether reading the positions does not wait for a device."""
        return "sorted_cols" in vars(self) or (
            self._host_copy is not None and self._host_copy.is_ready
        )

    def _read(self, function: Callable[[Tensor, Tensor, Tensor], T]) -> T:
        """Return `function` of the tensors on the device.

        Calls it again if the layer gets another pattern meanwhile, which overwrites them.
        """
        while True:
            index = self._device_index
            assert index is not None
            result = function(*index)
            if self._device_index is index:
                return result

    @property
    def flat(self) -> Tensor:
        """Flat block positions row * (in/b) + col of the slots, int64 [nnz]; computed each time."""
        return to_slot_order(self.sorted_flat, self.slots)

    @property
    def sorted_flat(self) -> Tensor:
        """Flat block positions in row-major order, int64 [nnz]; computed each time."""
        return flat_positions(self.row_ptr, self.sorted_cols, self.grid[1])

    @property
    def _device(self) -> torch.device:
        """The device of the pattern if it is only there, otherwise the CPU."""
        index = self._device_index
        if index is None or "sorted_cols" in vars(self):
            return torch.device("cpu")
        return index[1].device

    def _is_on(self, device: torch.device) -> bool:
        return self._device_index is not None and self._device_index[1].device == device

    def _flat_on(self, device: torch.device) -> Tensor:
        """Return `flat` on a device."""
        if not self._is_on(device):
            return self.flat.to(device)
        width = self.grid[1]
        return self._read(
            lambda ptr, cols, slots: to_slot_order(flat_positions(ptr, cols, width), slots)
        )

    def _sorted_flat_on(self, device: torch.device) -> Tensor:
        """Return `sorted_flat` on a device."""
        if not self._is_on(device):
            return self.sorted_flat.to(device)
        width = self.grid[1]
        return self._read(lambda row_ptr, cols, slots: flat_positions(row_ptr, cols, width))

    def _slots_on(self, device: torch.device) -> Tensor:
        """Return `slots` on a device."""
        if not self._is_on(device):
            return self.slots.to(device)
        return self._read(lambda row_ptr, cols, slots: slots)

    def _index_on(self, device: torch.device) -> PatternIndex:
        """Return `index` on a device, without the order by columns.

        On other devices than the CPU the tensors share no memory with the pattern.
        """
        if self._is_on(device):
            return self._make_csr_index(
                *self._read(lambda *index: [tensor.clone() for tensor in index])
            )
        return self._make_csr_index(*self._tensors_on(device))

    def _tensors_on(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Return row pointers, sorted columns and slots on a device; its own, or copies."""
        if self._is_on(device):
            assert self._device_index is not None
            return self._device_index
        return self.row_ptr.to(device), self.sorted_cols.to(device), self.slots.to(device)

    def _shared_on(self, device: torch.device) -> PatternIndex:
        """Return `index` on a device, copied there once, for readers that do not write to it."""
        if device.type == "cpu":
            return self.index
        if is_compiling():
            return self._index_on(device)
        index = self._shared.get(device)
        if index is None:
            with _plain_tensors():
                index = self._shared[device] = self._index_on(device)
        return index

    @cached_property
    def _shared(self) -> dict[torch.device, PatternIndex]:
        return {}

    @cached_property
    def _col_ptr(self) -> Tensor:
        with _plain_tensors():
            return column_pointers(self.sorted_cols, self.grid[1])

    def _make_csr_index(self, row_ptr: Tensor, cols: Tensor, slots: Tensor) -> PatternIndex:
        nothing = cols.new_empty(0)
        # `_col_ptr` would copy the columns to the CPU if they are on a device only.
        cached = cols is vars(self).get("sorted_cols")
        col_ptr = self._col_ptr if cached else column_pointers(cols, self.grid[1])
        return PatternIndex(row_ptr, cols, col_ptr, nothing, nothing, slots)

    def _attach(self, index: PatternIndex) -> None:
        """Share the memory of a layer's index on a device."""
        self._device_index = index.row_ptr, index.cols, index.slots

    def _detach(self) -> None:
        """Keep this pattern on the CPU only."""
        if self._device_index is not None and self.sorted_cols is not None:
            self._device_index = None

    def _save_before_overwrite(self, index: PatternIndex) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return the tensors to keep on the device when another pattern is written over `index`.

        None if the CPU has the pattern, otherwise a copy.
        """
        held = self._device_index
        if held is None or held[1] is not index.cols:
            return held
        if "sorted_cols" in vars(self):
            return None
        return held[0].clone(), held[1].clone(), held[2].clone()

    @property
    def nnz(self) -> int:
        """Number of present blocks."""
        index = self._device_index
        return (self.sorted_cols if index is None else index[1]).shape[0]

    @property
    def _is_row_major(self) -> bool:
        """Whether slots are in row-major order, without a synchronisation."""
        index = self._device_index
        return not len(self.slots if index is None else index[2])

    @cached_property
    def index(self) -> PatternIndex:
        """The kernels' index tensors, made once per pattern."""
        with _plain_tensors():
            entries = SortedEntries(self.row_ptr, self.sorted_cols, self.slots)
            by_column = sort_by_columns(entries, self.grid[1])
            return PatternIndex(self.row_ptr, self.sorted_cols, *by_column, self.slots)

    def by_rows(self, by_slot: Tensor) -> Tensor:
        """Return a tensor with an entry for each slot, [nnz, ...], in row-major order."""
        slots = self.slots
        return by_slot[slots.to(by_slot.device)] if len(slots) else by_slot

    def forget_index(self) -> None:
        """Free the memory of `index`; reading it rebuilds it."""
        self.__dict__.pop("index", None)

    @property
    def total(self) -> int:
        """Number of blocks of the matrix, present or not."""
        return self.grid[0] * self.grid[1]

    @property
    def density(self) -> float:
        """Present blocks / all blocks."""
        return self.nnz / self.total

    @property
    def values_shape(self) -> tuple[int, ...]:
        """The shape of a values tensor of this pattern: [nnz] or [nnz, b, b]."""
        b = self.block_size
        return (self.nnz,) if b == 1 else (self.nnz, b, b)

    def __eq__(self, other: object) -> bool:
        """Whether the same blocks are present, in any slots."""
        if not isinstance(other, SparsePattern):
            return NotImplemented
        return (
            self.shape == other.shape
            and self.block_size == other.block_size
            and torch.equal(self.row_ptr, other.row_ptr)
            and torch.equal(self.sorted_cols, other.sorted_cols)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return (
            f"SparsePattern(shape={self.shape}, block_size={self.block_size}, nnz={self.nnz}, "
            f"density={self.density:.4g})"
        )

    def _repr_html_(self) -> str:
        rows = [(n, f"{getattr(self, n)}") for n in ("shape", "block_size", "nnz", "density")]
        return html_table(rows, head=("SparsePattern", ""))

    def __getstate__(self) -> dict[str, Any]:
        # Arrays: tensors that live no longer than this dictionary cannot be sent to a process that
        # is being spawned.
        arrays = {"rows": self.rows.numpy(), "cols": self.cols.numpy()}
        return {**arrays, "shape": self.shape, "block_size": self.block_size}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._init_from_coordinates(**state, in_order=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> SparsePattern:
        return self  # immutable

    @check_types
    def contains(self, flat: Tensor) -> Tensor:
        """Whether each flat block position (int64 [n]) is present: bool [n]."""
        if flat.is_complex() or flat.is_meta:
            raise TypeError(f"flat must be int64 [n], got {flat.dtype} on {flat.device}")
        if self.nnz == 0:
            return torch.zeros(len(flat), dtype=torch.bool, device="cpu")
        present = self.sorted_flat
        slot = torch.searchsorted(present, flat).clamp_(max=self.nnz - 1)
        return present[slot] == flat

    def _check_values(self, values: Tensor) -> None:
        check_tensor("values", values)
        if tuple(values.shape) != self.values_shape:
            raise ValueError(
                f"values must have the shape {list(self.values_shape)} for {self}, "
                f"got {list(values.shape)}"
            )

    def to_mask(self) -> Tensor:
        """Return a mask, bool [out, in], True at every element of a present block."""
        ones = torch.ones(self.values_shape, dtype=torch.bool, device="cpu")
        return self.to_dense(ones)

    def to_dense(self, values: Tensor) -> Tensor:
        """Lay out `values` ([nnz] or [nnz, b, b]) in an [out, in] tensor of zeros.

        It is differentiable, and dtype and device are those of `values`.
        """
        self._check_values(values)
        height, width = self.grid
        b = self.block_size
        dense = values.new_zeros(self.total, b * b)
        dense = dense.index_put((self.flat.to(values.device),), values.reshape(-1, b * b))
        return dense.view(height, width, b, b).transpose(1, 2).reshape(self.shape)

    def values_of(self, matrix: Any) -> Tensor:
        """Return the entries of `matrix` at this pattern: [nnz] or [nnz, b, b].

        `matrix` is [out, in]: a tensor (differentiable), an array, or a SciPy sparse matrix, whose
        missing entries are zero.
        """
        from_scipy = not isinstance(matrix, Tensor) and is_scipy(matrix)
        if not from_scipy and not isinstance(matrix, Tensor):
            matrix = _as_tensor("matrix", matrix)
        if tuple(matrix.shape) != self.shape:
            raise ValueError(
                f"matrix must have the shape {list(self.shape)}, got {list(matrix.shape)}"
            )
        b = self.block_size
        if from_scipy:
            return self._values_of_scipy(matrix)
        height, width = self.grid
        blocks = matrix.view(height, b, width, b)[
            self.rows.to(matrix.device).long(), :, self.cols.to(matrix.device).long()
        ]
        return blocks.reshape(self.values_shape)

    def _values_of_scipy(self, matrix: Any) -> Tensor:
        b, width = self.block_size, self.grid[1]
        coo = matrix.tocoo()
        coo.sum_duplicates()
        flat = torch.from_numpy((coo.row.astype(np.int64) // b) * width + coo.col // b)
        inside = self.contains(flat).numpy()
        entry = np.searchsorted(self.sorted_flat.numpy(), flat.numpy()[inside])
        slot = slots_of(torch.from_numpy(entry), self.slots).numpy()
        values = np.zeros((self.nnz, b, b), coo.data.dtype)
        values[slot, coo.row[inside] % b, coo.col[inside] % b] = coo.data[inside]
        return torch.from_numpy(values.reshape(self.values_shape))

    def to_scipy(self, values: Any, format: str | None = None) -> Any:
        """Return a SciPy sparse array with `values` at this pattern.

        `format` is any of SciPy's; by default CSR for elements and BSR for blocks.
        """
        tensor = _as_tensor("values", values)
        self._check_values(tensor)
        if format is not None:
            check_kind("format", format, str, "a format of SciPy's, such as 'csr'")
        import scipy.sparse

        row_ptr, cols = self.row_ptr.numpy(), self.sorted_cols.numpy()
        tensor = self.by_rows(tensor)
        if self.block_size == 1:
            matrix = scipy.sparse.csr_array((tensor.numpy(), cols, row_ptr), shape=self.shape)
            if format == "bsr":  # SciPy would choose larger blocks and fill them with zeros
                return matrix.tobsr(blocksize=(1, 1))
            return matrix if format is None else matrix.asformat(format)
        matrix = scipy.sparse.bsr_array((tensor.numpy(), cols, row_ptr), shape=self.shape)
        return matrix if format in (None, "bsr") else matrix.asformat(format)


def _as_tensor(name: str, values: Any) -> Tensor:
    """Return `values`, anything that holds numbers, as a tensor on the CPU."""
    if isinstance(values, Tensor):
        if check_tensor(name, values).is_meta:
            raise ValueError(f"{name} must hold data, got a tensor on the meta device")
        return values.detach().cpu()
    try:
        if isinstance(values, np.ndarray):  # torch takes no negative strides, no other byte order
            values = np.ascontiguousarray(values, values.dtype.newbyteorder("="))
        return torch.as_tensor(values, device="cpu")
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise TypeError(f"{name} must be numbers, got {shorten(values)}") from None
