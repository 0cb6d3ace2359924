"""What the CPU kernels derive from an index: panels and bit masks, made at the first use.

Panels (csrc/linear/element) are ranges of columns (forward) or rows (backward) whose activations
stay in the caches; kernels for many samples process the entries panel by panel. By rows they take 2
bytes per entry, or 6 if the slots have an order of their own; by columns 10.

Bit masks say which columns of a row are present, one bit per element of the matrix. Kernels for
small batches and those that lay out single elements read them in place of column numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dynsparse._core import native
from dynsparse.ops.linear.layer_index import LayerIndex, TensorCache
from dynsparse.pattern.index_arrays import empty

_NEVER = 1 << 62

Order = tuple[Tensor, Tensor]

# A layer keeps its panels in its `LayerIndex`; calls through the dispatcher find them here.
_cache = TensorCache()


def row_panels(p: LayerIndex, batch: int) -> Tensor | None:
    """Return the panels of the rows, or None if the batch is too small for them."""
    least, panels = p.panels[False]
    if batch < least:
        return None
    return _keep_panels(p, False, (p.cols, p.slots), batch) if panels is None else panels


def column_panels(p: LayerIndex, batch: int, order: Order) -> Tensor | None:
    """Return the panels of the columns, or None if the batch is too small for them.

    Args:
        order: `csc_rows` and `csc_perm` of the index.
    """
    least, panels = p.panels[True]
    if batch < least:
        return None
    return _keep_panels(p, True, order, batch) if panels is None else panels


def _keep_panels(p: LayerIndex, columns: bool, order: Order, batch: int) -> Tensor | None:
    least, panels = _find_panels(p, columns, order, batch)
    p.panels[columns] = least, panels if p.keep else None
    return panels


def _find_panels(
    p: LayerIndex, columns: bool, order: Order, batch: int
) -> tuple[int, Tensor | None]:
    """Return the number of samples from which panels pay, and the panels if `batch` is as large."""
    if p.block_size > 1:
        return _NEVER, None
    majors, minors = p.out_features, p.in_features
    sources = [order[0], p.row_ptr, order[1]]
    if columns:
        majors, minors = minors, majors
        sources[1] = p.col_ptr
    least = native.call("dynsparse_panels_from", majors, minors, p.nnz, columns)
    if batch < least:
        return least, None
    if not p.keep:
        return least, make_panels(columns, majors, minors, *sources)
    cached = _cache.get(sources)
    if cached is None:
        cached = (make_panels(columns, majors, minors, *sources),)
        _cache.put(sources, cached)
    (panels,) = cached
    return (_NEVER if panels is None else least), panels


def discard_panels(p: LayerIndex) -> None:
    """Free the panels of a layer; the next product that uses panels makes them again."""
    p.panels = [(0, None), (0, None)]
    for source in (p.cols, *(p.order or ())):
        _cache.discard(source)


def make_row_panels(row_ptr: Tensor, cols: Tensor, in_features: int, batch: int) -> Tensor | None:
    """Return the panels of the rows, as `row_panels`, for an index that is used once."""
    out_features = len(row_ptr) - 1
    if batch < native.call("dynsparse_panels_from", out_features, in_features, len(cols), False):
        return None
    return make_panels(False, out_features, in_features, cols, row_ptr, cols.new_empty(0))


def make_panels(
    columns: bool,
    majors: int,
    minors: int,
    idx: Tensor,
    ptr: Tensor,
    order: Tensor,
    *,
    size: int = 0,
) -> Tensor | None:
    """Make the panels of a compressed index; None if the minors of a major do not ascend.

    Args:
        columns: whether the majors are columns, for both gradients.
        order: the slot of each entry, or [0] if it is the entry's number.
        size: minors per panel, a multiple of 16, 2**16 at most; 0: what suits this machine.
    """
    nnz = len(idx)
    size = size or native.call("dynsparse_panels_size", majors, minors, nnz, columns, 0)
    lists = 2 if columns else min(len(order), 1)
    memory = empty(
        native.call("dynsparse_panels_bytes", majors, minors, nnz, size, lists), dtype=torch.uint8
    )
    unordered = native.call(
        "dynsparse_panels_make",
        *(ptr, idx, order, lists, majors, minors, size, memory, torch.get_num_threads()),
    )
    return None if unordered else memory


def masks_of(p: LayerIndex) -> Tensor | None:
    """Return the bit masks of single elements (`make_masks`); None for blocks."""
    masks = p.masks
    if masks is None and p.block_size == 1:
        masks = make_masks(p.row_ptr, p.cols, p.in_features)
        # Other threads may read them only now: they ran while the kernel wrote.
        if p.keep:
            p.masks = masks
    return masks


def make_masks(row_ptr: Tensor, cols: Tensor, in_features: int) -> Tensor:
    """Return the bit masks of single elements, int16 [out, ceil(in / 16)].

    Bit c % 16 of word c / 16 is column c.
    """
    out = len(row_ptr) - 1
    masks = torch.empty(out, -(-in_features // 16), dtype=torch.int16, device="cpu")
    threads = torch.get_num_threads()
    native.call("dynsparse_small_masks", row_ptr, cols, masks, out, in_features, threads)
    return masks
