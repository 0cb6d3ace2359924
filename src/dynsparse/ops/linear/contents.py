"""Whether index tensors say what they must, looked at once: kernels read where they point."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from dynsparse.encoding import by_slots
from dynsparse.ops.linear.layer_index import LayerIndex
from dynsparse.ops.linear.remembered import Remembered
from dynsparse.pattern import PatternIndex

_checked = Remembered()


def check_contents(index: PatternIndex) -> None:
    """Look through index tensors that come from outside, once for as long as they are unchanged.

    Lengths and types are checked by `LayerIndex`. Tensors on other devices than the CPU are not
    looked through: that would make the host wait, and torch's own operators check them there.

    Raises:
        RuntimeError: pointers that do not ascend from 0 to the number of blocks, a row or column
            out of range, two orders that differ, a tensor that is not one-dimensional and
            contiguous.
    """
    for name, tensor in zip(index._fields, index, strict=True):
        if tensor.dim() != 1 or not tensor.is_contiguous():
            raise RuntimeError(
                f"the index tensor {name} must be one-dimensional and contiguous, got the shape "
                f"{list(tensor.shape)} with strides {list(tensor.stride())}: "
                "take index tensors from SparsePattern.index"
            )
    if index.cols.is_cpu and _checked.get(index) is None:
        _look_through(index)
        _checked.put(index, lambda: None)


def trust(p: LayerIndex) -> None:
    """Remember that the tensors of this index come from a `SparsePattern`."""
    _checked.put(p.index, weakref.ref(p))


def known(index: PatternIndex) -> LayerIndex | None:
    """What a layer has made of these tensors, for calls that bring the tensors alone."""
    found = _checked.get(index)
    return None if found is None else found()


def _look_through(index: PatternIndex) -> None:
    height, width = len(index.row_ptr) - 1, len(index.col_ptr) - 1
    rows = _majors("row_ptr", index.row_ptr, len(index.cols))
    cols = _majors("col_ptr", index.col_ptr, len(index.cols))
    _within("cols", index.cols, width)
    if len(index.slots):
        _within("slots", index.slots, len(index.cols))
        if len(index.slots.unique()) < len(index.slots):
            raise RuntimeError("slots must be distinct: take them from SparsePattern.index")
        rows = by_slots(rows, index.slots)
    if not len(index.csc_rows) and len(index.cols):  # left out
        return
    _within("csc_rows", index.csc_rows, height)
    _within("csc_perm", index.csc_perm, len(index.cols))
    by_slot = by_slots(index.cols, index.slots)
    order = index.csc_perm.long()
    seen = torch.zeros(len(order), dtype=torch.bool)
    seen[order] = True
    alike = torch.equal(by_slot[order], cols) and torch.equal(rows[order], index.csc_rows)
    if not (alike and bool(seen.all())):
        raise RuntimeError(
            "the index tensors contradict each other: col_ptr, csc_rows and csc_perm must be the "
            "blocks of row_ptr and cols by columns; take them from SparsePattern.index"
        )


def _majors(name: str, ptr: Tensor, nnz: int) -> Tensor:
    """The row or column of every entry: int32 [nnz]."""
    counts = ptr.diff()
    if not len(ptr) or int(ptr[0]) or int(ptr[-1]) != nnz or bool((counts < 0).any()):
        raise RuntimeError(
            f"{name} must ascend from 0 to the number of blocks, {nnz}: "
            "take index tensors from SparsePattern.index"
        )
    return torch.repeat_interleave(torch.arange(len(counts), dtype=torch.int32), counts)


def _within(name: str, entries: Tensor, end: int) -> None:
    if len(entries) and not (int(entries.min()) >= 0 and int(entries.max()) < end):
        raise RuntimeError(
            f"{name} must lie in [0, {end}), got {int(entries.min())} to {int(entries.max())}: "
            "take index tensors from SparsePattern.index"
        )
