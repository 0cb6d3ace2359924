"""The index of a pattern by panels, made when a product first wants it (csrc/linear/element).

Panels are stretches of columns (forward) or rows (backward) whose activations stay in the caches.
Kernels for many samples work on the entries panel by panel. The index by rows takes 2 bytes per
entry, or 6 where slots have an order of their own; the one by columns takes 10.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dynsparse import native
from dynsparse.encoding import empty
from dynsparse.ops.linear.layer_index import LayerIndex, TensorCache

_NEVER = 1 << 62

Order = tuple[Tensor, Tensor]


# A layer keeps its panels in its `LayerIndex`; here find them the calls through the dispatcher.
_made = TensorCache()


def by_rows(p: LayerIndex, batch: int) -> Tensor | None:
    """The panels of the rows, or None where so few samples do not need them."""
    least, panels = p.panels[False]
    if batch < least:
        return None
    return _kept(p, False, (p.cols, p.slots), batch) if panels is None else panels


def by_columns(p: LayerIndex, batch: int, order: Order) -> Tensor | None:
    """The panels of the columns, or None where so few samples do not need them.

    Args:
        order: `csc_rows` and `csc_perm` of the index.
    """
    least, panels = p.panels[True]
    if batch < least:
        return None
    return _kept(p, True, order, batch) if panels is None else panels


def _kept(p: LayerIndex, columns: bool, order: Order, batch: int) -> Tensor | None:
    found = _find(p, columns, order, batch)
    # A thin index is one of which nothing else shall stay.
    p.panels[columns] = found if p.order is not None else (found[0], None)
    return found[1]


def _find(p: LayerIndex, columns: bool, order: Order, batch: int) -> tuple[int, Tensor | None]:
    """From how many samples on panels pay, and the panels where `batch` is as many."""
    if p.block_size > 1:
        return _NEVER, None
    library = native.load()
    assert library is not None
    majors, minors = p.out_features, p.in_features
    sources = [order[0], p.row_ptr, order[1]]
    if columns:
        majors, minors = minors, majors
        sources[1] = p.col_ptr
    least = library.dynsparse_panels_from(majors, minors, p.nnz, columns)
    if batch < least:
        return least, None
    if p.order is None:
        return least, _make(columns, majors, minors, *sources)
    made = _made.get(sources)
    if made is None:
        made = (_make(columns, majors, minors, *sources),)
        _made.put(sources, made)
    (panels,) = made
    return (_NEVER if panels is None else least), panels


def forget(p: LayerIndex) -> None:
    """Give their memory up; the next product that wants them makes them anew."""
    p.panels = [(0, None), (0, None)]
    for source in (p.cols, *(p.order or ())):
        _made.discard(source)


def for_once(row_ptr: Tensor, cols: Tensor, in_features: int, batch: int) -> Tensor | None:
    """As `by_rows`, of an index that is used a single time."""
    library = native.load()
    assert library is not None
    out_features = len(row_ptr) - 1
    if batch < library.dynsparse_panels_from(out_features, in_features, len(cols), False):
        return None
    return _make(False, out_features, in_features, cols, row_ptr, cols.new_empty(0))


def _make(
    columns: bool,
    majors: int,
    minors: int,
    idx: Tensor,
    ptr: Tensor,
    order: Tensor,
    *,
    size: int = 0,
) -> Tensor | None:
    """None where the minors of a major are not in ascending order.

    Args:
        columns: whether the majors are columns, with which both gradients are computed.
        order: the slot of each entry, or [0] where it is the entry's number.
        size: minors per panel, a multiple of 16, 2**16 at most; 0: what suits this machine.
    """
    library = native.load()
    assert library is not None
    size = size or library.dynsparse_panels_size(majors, minors, len(idx), columns, 0)
    lists = 2 if columns else min(len(order), 1)
    size_in_bytes = library.dynsparse_panels_bytes(majors, minors, len(idx), size, lists)
    memory = empty(size_in_bytes, dtype=torch.uint8)
    unordered = library.dynsparse_panels_make(
        ptr.data_ptr(),
        idx.data_ptr(),
        order.data_ptr() or None,
        lists,
        majors,
        minors,
        size,
        memory.data_ptr(),
        torch.get_num_threads(),
    )
    return None if unordered else memory
