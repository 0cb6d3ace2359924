"""The index of a pattern by panels, made when a product first wants it (csrc/panel_index.cpp).

Panels are stretches of columns (forward) or rows (backward) whose activations stay in the caches.
Kernels for many samples work on the entries panel by panel. The index by rows takes 2 bytes per
entry, the one by columns 10.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from dynsparse import native
from dynsparse.encoding import empty
from dynsparse.ops.linear.layer_index import LayerIndex

__all__ = ["by_columns", "by_rows", "for_once", "forget"]

_NEVER = 1 << 62


class _Made(NamedTuple):
    """What was made of index tensors, and how to know them again."""

    sources: list[weakref.ref[Tensor]]
    versions: list[int]
    panels: Tensor | None

    def is_of(self, sources: list[Tensor]) -> bool:
        return self.versions == _versions(sources) and all(
            known() is source for known, source in zip(self.sources, sources, strict=True)
        )


# By the tensor of minors. A layer keeps its panels in its `LayerIndex`; here find them the calls
# through torch's dispatcher, which get index tensors alone.
_made: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def by_rows(p: LayerIndex, batch: int) -> Tensor | None:
    """The panels of the rows, or None where so few samples do not need them."""
    return _of(p, False, batch)


def by_columns(p: LayerIndex, batch: int) -> Tensor | None:
    """The panels of the columns, or None where so few samples do not need them."""
    return _of(p, True, batch)


def _of(p: LayerIndex, columns: bool, batch: int) -> Tensor | None:
    least, panels = p.panels[columns]
    if batch < least:
        return None
    if panels is None:
        p.panels[columns] = found = _find(p, columns, batch)
        return found[1]
    return panels


def _find(p: LayerIndex, columns: bool, batch: int) -> tuple[int, Tensor | None]:
    """From how many samples on panels pay, and the panels where `batch` is as many."""
    if p.block_size > 1:
        return _NEVER, None
    library = native.load()
    assert library is not None
    majors, minors = p.out_features, p.in_features
    sources = [p.cols, p.row_ptr]
    if columns:
        majors, minors = minors, majors
        sources = [p.csc_rows, p.col_ptr, p.csc_perm]
    least = library.dynsparse_panels_from(majors, minors, p.nnz, columns)
    if batch < least:
        return least, None
    made = _made.get(sources[0])
    if made is None or not made.is_of(sources):
        panels = _make(majors, minors, *sources)
        made = _Made([weakref.ref(t) for t in sources], _versions(sources), panels)
        if not any(t.is_inference() for t in sources):  # which do not tell when they are changed
            _made[sources[0]] = made
    return (_NEVER if made.panels is None else least), made.panels


def forget(p: LayerIndex) -> None:
    """Give their memory up; the next product that wants them makes them anew."""
    p.panels = [(0, None), (0, None)]
    for source in (p.cols, p.csc_rows):
        _made.pop(source, None)


def for_once(row_ptr: Tensor, cols: Tensor, in_features: int, batch: int) -> Tensor | None:
    """As `by_rows`, of an index that is used a single time."""
    library = native.load()
    assert library is not None
    out_features = len(row_ptr) - 1
    if batch < library.dynsparse_panels_from(out_features, in_features, len(cols), False):
        return None
    return _make(out_features, in_features, cols, row_ptr)


def _versions(tensors: list[Tensor]) -> list[int]:
    return [-1 if t.is_inference() else t._version for t in tensors]


def _make(
    majors: int, minors: int, idx: Tensor, ptr: Tensor, order: Tensor | None = None
) -> Tensor | None:
    """None where the minors of a major are not in ascending order."""
    library = native.load()
    assert library is not None
    by_columns = order is not None
    size = library.dynsparse_panels_bytes(majors, minors, len(idx), by_columns)
    memory = empty(size, dtype=torch.uint8)
    unordered = library.dynsparse_panels_make(
        ptr.data_ptr(),
        idx.data_ptr(),
        None if order is None else order.data_ptr(),
        majors,
        minors,
        memory.data_ptr(),
        torch.get_num_threads(),
    )
    return None if unordered else memory
