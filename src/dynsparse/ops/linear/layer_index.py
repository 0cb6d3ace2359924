"""The index tensors of a pattern for the passes: checked once, with their sizes.

Reading sizes off tensors and checking them costs more than the products of a small layer, so a
layer prepares its index once per pattern and passes the same object to every call.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dynsparse._core.checks import check_kind, check_tensor
from dynsparse.pattern import PatternIndex
from dynsparse.pattern.index_arrays import SortedEntries, sort_by_columns, to_slot_order
from dynsparse.pattern.on_device import find_slots
from dynsparse.pattern.on_device import sort_by_columns as sort_by_columns_on_device


class TensorCache:
    """A cache of values by the tensors they were made from, while these are alive and unmodified.

    Calls through torch's dispatcher pass index tensors only, without the layer they belong to; this
    finds again what was derived from them. Safe to use from several threads.
    """

    def __init__(self) -> None:
        # By the identity of the first tensor, which no value may reference: all tensors, held
        # weakly, with their versions, and the value.
        self._entries: dict[int, tuple[list[tuple[weakref.ref[Tensor], int]], Any]] = {}

    def get(self, sources: Sequence[Tensor]) -> Any:
        """Return the value for exactly these tensors, or None."""
        versions, value = self._entries.get(id(sources[0]), ((), None))
        if len(versions) != len(sources):
            return None
        for (reference, version), source in zip(versions, sources, strict=True):
            if reference() is not source or source._version != version:
                return None
        return value

    def put(self, sources: Sequence[Tensor], value: Any) -> None:
        """Store a value; not for inference tensors, which have no version counter."""
        if any(source.is_inference() for source in sources):
            return
        key = id(sources[0])
        # No function of Python: an interrupt inside a callback would be lost.
        first = weakref.ref(sources[0], partial(self._entries.pop, key))
        references = [first, *map(weakref.ref, sources[1:])]
        versions = [source._version for source in sources]
        self._entries[key] = list(zip(references, versions, strict=True)), value

    def discard(self, first: Tensor) -> None:
        """Remove values that were made from tensors of which this is the first."""
        self._entries.pop(id(first), None)


class LayerIndex:
    """The index of one pattern with one block size. Immutable except for tensors derived from it.

    On an accelerator its memory may be overwritten with the index of the layer's next pattern, so
    that CUDA graphs that read it stay valid. The memory then belongs to another object, and passes
    that still hold this one raise an error.

    It holds the index tensors, not their addresses, since memory can move (`share_memory_`).

    Args:
        index: the pattern's index tensors, int32, on the device of `values`.
        values: [nnz] or [nnz, b, b]; sets the block size. Not kept.
        keep: whether an order by columns that the index omits, panels and masks are kept once they
            are made. False saves memory: products make them at each call.

    Attributes:
        row_ptr, cols, col_ptr, slots: the tensors of the index.
        keep: the argument.
        order: `csc_rows` and `csc_perm`, or None: `column_order` makes them.
        index: all index tensors.
        out_features, in_features, block_size, nnz: the sizes of the layer; nnz counts blocks.
        values_shape, bias_shape: the shapes that these tensors must have.
        values_layout: sizes and strides of contiguous values, as plain tuples.
        on_cpu: whether the index is on the CPU.
        masks: the bit masks of `panels.masks_of`, made at the first use, or None.
        panels: the panels of `panels.py` by rows and by columns, made at the first use; each with
            the number of samples from which it is used.
        choices: the decisions of `products.route` so far, on a CPU for float32 and for bfloat16; on
            an accelerator the first holds all.

    Raises:
        RuntimeError: lengths, dtypes or devices that do not fit, with which the kernels would read
            out of bounds.
    """

    def __init__(self, index: PatternIndex, values: Tensor, keep: bool = True) -> None:
        if type(index) is not PatternIndex or not all(isinstance(t, Tensor) for t in index):
            check_kind("the index", index, PatternIndex, "the index tensors of a SparsePattern")
            for name, tensor in zip(index._fields, index, strict=True):
                check_tensor(name, tensor)
        check_kind("values", values, Tensor, "a tensor")
        if values.dim() not in (1, 3) or (values.dim() == 3 and values.shape[1] != values.shape[2]):
            raise RuntimeError(
                f"values must be [nnz] or [nnz, b, b], got the shape {list(values.shape)}"
            )
        self.keep = keep
        self._set_tensors(index)
        if any(tensor.dim() != 1 for tensor in index):
            raise RuntimeError(
                "the index tensors must be one-dimensional: take SparsePattern.index"
            )
        self.nnz = nnz = self.cols.shape[0]
        order = index.csc_rows, index.csc_perm
        if values.shape[0] != nnz:
            raise RuntimeError(
                f"values hold {values.shape[0]} blocks but the pattern has {nnz}: "
                "pass the values of this pattern"
            )
        omitted = order[0].shape[0] == order[1].shape[0] == 0
        orders = () if omitted else order
        if any(len(t) != nnz for t in orders) or len(self.slots) not in (0, nnz):
            raise RuntimeError(
                "the index tensors differ in length: take them from SparsePattern.index"
            )
        for tensor in index:
            if tensor.dtype is not torch.int32 or tensor.device != values.device:
                raise RuntimeError(
                    f"the index tensors must be int32 on {values.device}, where the values are, "
                    f"got {tensor.dtype} on {tensor.device}"
                )
        self.order = None if omitted and nnz else order
        self.block_size = b = 1 if values.dim() == 1 else values.shape[1]
        self.out_features = (self.row_ptr.shape[0] - 1) * b
        self.in_features = (self.col_ptr.shape[0] - 1) * b
        self.values_shape = values.shape
        self.values_layout: tuple[tuple[int, ...], tuple[int, ...]] = (
            ((nnz,), (1,)) if values.dim() == 1 else ((nnz, b, b), (b * b, b, 1))
        )
        self.bias_shape = torch.Size((self.out_features,))
        self.on_cpu = values.is_cpu
        self.masks: Tensor | None = None
        self.panels: list[tuple[int, Tensor | None]] = [(0, None), (0, None)]
        self.choices: tuple[dict[Hashable, str], dict[Hashable, str]] = ({}, {})
        self._derived: dict[Hashable, tuple[Tensor, Callable[[LayerIndex], Tensor]]] = {}

    def _set_tensors(self, index: PatternIndex) -> None:
        self.index = index
        self.row_ptr, self.cols, self.col_ptr, _, _, self.slots = index

    @property
    def is_full(self) -> bool:
        """Whether the memory of the values is that of the dense weight."""
        in_order = self.block_size == 1 and not len(self.slots)
        return in_order and self.nnz == self.out_features * self.in_features

    def by_rows(self, values: Tensor) -> Tensor:
        """Return values in row-major order, for kernels that read them sequentially."""
        return values.index_select(0, self.slots) if len(self.slots) else values

    def column_order(self) -> tuple[Tensor, Tensor]:
        """Return `csc_rows` and `csc_perm`.

        The indexes of layers omit them, as inference never reads them; they are then made here.
        """
        if self.order is not None:
            return self.order
        if self.on_cpu:
            entries = SortedEntries(self.row_ptr, self.cols, self.slots)
            with torch.inference_mode(False):  # they outlive the caller's mode
                order = sort_by_columns(entries, len(self.col_ptr) - 1)[1:]
            if self.keep:
                self.order = order
            return order
        # Always kept: CUDA graphs may read them.
        rows, slots = self.get_derived("by columns", _make_order).unbind(-2)
        return rows, slots

    def get_derived(self, name: Hashable, make: Callable[[LayerIndex], Tensor]) -> Tensor:
        """Return a tensor that depends on the index alone, made at the first call and kept."""
        entry = self._derived.get(name)
        if entry is not None:
            return entry[0]
        with torch.inference_mode(False):  # it outlives the caller's mode
            tensor = make(self)
        # A tensor made during the capture of a CUDA graph belongs to the graph.
        if not (tensor.is_cuda and torch.cuda.is_current_stream_capturing()):
            self._derived[name] = tensor, make
        return tensor

    def can_copy_from(self, other: LayerIndex) -> bool:
        """Whether `copy_from` can overwrite this index with another."""
        return self.values_shape == other.values_shape and self.fits(other.index)

    def fits(self, index: PatternIndex) -> bool:
        """Whether index tensors, or stacked ones, [layers, ...], fit the memory of this one, which
        is not on the CPU."""
        return not self.on_cpu and all(
            old.shape == new.shape[-1:] and old.device == new.device
            for old, new in zip(self.index, index, strict=True)
        )

    def derive_like(self, other: LayerIndex) -> None:
        """Make the tensors that have been derived from `other`."""
        for name, (_, make) in other._derived.items():
            self.get_derived(name, make)

    def _replace_tensors(
        self, index: PatternIndex, derived: dict[Hashable, tuple[Tensor, Callable[..., Tensor]]]
    ) -> LayerIndex:
        """Return an index of the same sizes with other tensors."""
        other = copy.copy(self)
        other._set_tensors(index)
        other._derived = derived
        return other

    @staticmethod
    def make_next(before: Sequence[LayerIndex], stacked: PatternIndex) -> list[LayerIndex]:
        """Make the indexes of the next patterns of layers on a device, with all that was derived
        from the present ones.

        Args:
            before: the present indexes, of the same sizes.
            stacked: the index tensors of the next patterns, [layers, ...], without the order by
                columns.
        """
        together = before[0]._replace_tensors(stacked, {})
        for index in before:
            together.derive_like(index)
        tensors = zip(*(tensor.unbind() for tensor in stacked), strict=True)
        derived = {name: (t.unbind(), make) for name, (t, make) in together._derived.items()}
        return [
            index._replace_tensors(
                PatternIndex(*own),
                {name: (derived[name][0][i], derived[name][1]) for name in index._derived},
            )
            for i, (index, own) in enumerate(zip(before, tensors, strict=True))
        ]

    def copy_from(self, other: LayerIndex) -> LayerIndex:
        """Overwrite the memory with another index, after its `derive_like`.

        Returns the index of this memory from now on; this object is invalid.
        """
        names = list(self._derived)
        torch._foreach_copy_(
            [*self.index, *(self._derived[name][0] for name in names)],
            [*other.index, *(other._derived[name][0] for name in names)],
        )
        fresh = copy.copy(self)
        self.values_shape = torch.Size()
        return fresh

    @property
    def is_overwritten(self) -> bool:
        """Whether the memory now holds another pattern; no values fit this object."""
        return not self.values_shape


def _make_order(p: LayerIndex) -> Tensor:
    width = p.col_ptr.shape[-1] - 1
    rows, entries = sort_by_columns_on_device(p.row_ptr, p.cols, width).unbind(-2)
    return torch.stack([rows, find_slots(entries, p.slots)], -2)


class Read(NamedTuple):
    """Index and values of a layer that belong to each other, whatever other threads do.

    Attributes:
        layer_index: the index of the pattern.
        memory: the values, without autograd.
        plain: whether these are known to be float32, contiguous, on the CPU and of this index.
    """

    layer_index: LayerIndex
    memory: Tensor
    plain: bool


# Index tensors from outside: their entries are checked, because kernels read where they point.

_checked = TensorCache()


def check_contents(index: PatternIndex) -> None:
    """Check the entries of index tensors from outside, once while they are unmodified.

    `LayerIndex` checks lengths and dtypes. Entries on an accelerator are not checked, which would
    synchronise with it; torch's own operators check them there.

    Raises:
        RuntimeError: pointers that do not ascend from 0 to the number of blocks, a row or column
            out of range, orders by rows and by columns that differ, a tensor that is not
            one-dimensional and contiguous.
    """
    for name, tensor in zip(index._fields, index, strict=True):
        if tensor.dim() != 1 or not tensor.is_contiguous():
            raise RuntimeError(
                f"the index tensor {name} must be one-dimensional and contiguous, got the shape "
                f"{list(tensor.shape)} with strides {list(tensor.stride())}: "
                "take index tensors from SparsePattern.index"
            )
    if index.cols.is_cpu and _checked.get(index) is None:
        _check_entries(index)
        _checked.put(index, lambda: None)


_widths = TensorCache()


def check_rows(row_ptr: Tensor, cols: Tensor, columns: int) -> None:
    """Check the entries of an index by rows alone, once while they are unmodified.

    Args:
        row_ptr, cols: int32 [rows + 1] and [nnz], on the CPU.
        columns: number of columns of the matrix, in blocks.

    Raises:
        RuntimeError: pointers that do not ascend from 0 to the number of blocks, or a column out of
            range.
    """
    width = _widths.get((row_ptr, cols))
    if width is None:
        nnz = len(cols)
        ends = [int(row_ptr[0]), int(row_ptr[-1])] if len(row_ptr) else []
        if ends != [0, nnz] or bool((row_ptr.diff() < 0).any()) or (nnz and int(cols.min()) < 0):
            raise RuntimeError(
                f"row_ptr must ascend from 0 to the number of blocks, {nnz}, and cols from 0 on in "
                "each row: take them from a SparsePattern"
            )
        width = int(cols.max()) + 1 if nnz else 0
        _widths.put((row_ptr, cols), width)
    if width > columns:
        raise RuntimeError(
            f"cols must lie in [0, {columns}), got {width - 1}: take row_ptr and cols from a "
            "SparsePattern"
        )


def register_index(p: LayerIndex) -> None:
    """Let `find_index` return this index by its tensors, which come from a `SparsePattern`."""
    _checked.put(p.index, weakref.ref(p))


def find_index(index: PatternIndex) -> LayerIndex | None:
    """Return the layer index that was registered for these tensors, if it is alive."""
    reference = _checked.get(index)
    return None if reference is None else reference()


def _check_entries(index: PatternIndex) -> None:
    height, width = len(index.row_ptr) - 1, len(index.col_ptr) - 1
    rows = _expand_pointers("row_ptr", index.row_ptr, len(index.cols))
    cols = _expand_pointers("col_ptr", index.col_ptr, len(index.cols))
    _check_range("cols", index.cols, width)
    if len(index.slots):
        _check_range("slots", index.slots, len(index.cols))
        if len(index.slots.unique()) < len(index.slots):
            raise RuntimeError("slots must be distinct: take them from SparsePattern.index")
        rows = to_slot_order(rows, index.slots)
    if not len(index.csc_rows) and len(index.cols):  # omitted
        return
    _check_range("csc_rows", index.csc_rows, height)
    _check_range("csc_perm", index.csc_perm, len(index.cols))
    by_slot = to_slot_order(index.cols, index.slots)
    order = index.csc_perm.long()
    seen = torch.zeros(len(order), dtype=torch.bool, device="cpu")
    seen[order] = True
    matches = torch.equal(by_slot[order], cols) and torch.equal(rows[order], index.csc_rows)
    if not (matches and bool(seen.all())):
        raise RuntimeError(
            "the index tensors contradict each other: col_ptr, csc_rows and csc_perm must be the "
            "blocks of row_ptr and cols by columns; take them from SparsePattern.index"
        )


def _expand_pointers(name: str, ptr: Tensor, nnz: int) -> Tensor:
    """Return the row or column of every entry: int32 [nnz]."""
    counts = ptr.diff()
    if not len(ptr) or int(ptr[0]) or int(ptr[-1]) != nnz or bool((counts < 0).any()):
        raise RuntimeError(
            f"{name} must ascend from 0 to the number of blocks, {nnz}: "
            "take index tensors from SparsePattern.index"
        )
    return torch.repeat_interleave(
        torch.arange(len(counts), dtype=torch.int32, device="cpu"), counts
    )


def _check_range(name: str, entries: Tensor, end: int) -> None:
    if len(entries) and not (int(entries.min()) >= 0 and int(entries.max()) < end):
        raise RuntimeError(
            f"{name} must lie in [0, {end}), got {int(entries.min())} to {int(entries.max())}: "
            "take index tensors from SparsePattern.index"
        )
