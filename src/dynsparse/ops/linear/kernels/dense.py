"""Sparse linear products through dense ones, for densities past the break-even.

The weight is laid out densely a slab of rows at a time, used by torch's dense products and
forgotten: no more than `SLAB_BYTES` exist at once, whatever the layer. A full pattern of single
elements is a dense weight already, and is used as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.functional import linear

from dynsparse import native
from dynsparse.encoding import by_slots
from dynsparse.ops.linear.kernels.masks import masks_of
from dynsparse.ops.linear.layer_index import LayerIndex

# Dense products of fewer rows are slower; more memory would be noticed beside the values.
SLAB_BYTES = 16 << 20


def _slabs(p: LayerIndex) -> list[tuple[int, int]]:
    """(first, end) row of each slab; whole block rows."""
    b = p.block_size
    out = p.out_features
    rows = max(1, min(SLAB_BYTES // 4 // p.in_features, out) // b) * b
    return [(first, min(out, first + rows)) for first in range(0, out, rows)]


# The memory of slabs, kept between calls: new memory of this size is mapped, and filled with
# zeros, page by page. Calls at the same time, from several threads, have one each.
_kept: list[Tensor] = []


@contextmanager
def _memory(elements: int) -> Iterator[Tensor]:
    """At least so many floats, of any contents."""
    memory = _kept.pop() if _kept else None
    if memory is None or memory.numel() < elements:
        # A tensor made in inference mode could not be written to outside.
        with torch.inference_mode(False):
            memory = torch.empty(elements, dtype=torch.float32, device="cpu")
    try:
        yield memory
    finally:
        _kept.append(memory)


def release() -> None:
    """Give the kept memory back."""
    _kept.clear()


def _rows(memory: Tensor, first: int, end: int, p: LayerIndex) -> Tensor:
    """[end - first, in] in the memory of a slab."""
    return memory[: (end - first) * p.in_features].view(-1, p.in_features)


def _lay_out(values: Tensor, p: LayerIndex, first: int, end: int, memory: Tensor) -> Tensor:
    """Rows first to end of the weight, [end - first, in], in `memory`."""
    library = native.load()
    assert library is not None
    slab = _rows(memory, first, end, p)
    b, masks = p.block_size, masks_of(p)
    library.dynsparse_rows_to_dense(
        values.data_ptr(),
        p.row_ptr.data_ptr(),
        p.cols.data_ptr(),
        None if masks is None else masks.data_ptr(),
        slab.data_ptr(),
        first // b,
        (end - first) // b,
        p.in_features,
        b,
        torch.get_num_threads(),
    )
    return slab


def _collect(slab: Tensor, p: LayerIndex, first: int, end: int, values: Tensor) -> None:
    """The entries of a dense slab where the pattern is, into their place in `values`."""
    library = native.load()
    assert library is not None
    b, masks = p.block_size, masks_of(p)
    library.dynsparse_rows_from_dense(
        slab.data_ptr(),
        p.row_ptr.data_ptr(),
        p.cols.data_ptr(),
        None if masks is None else masks.data_ptr(),
        values.data_ptr(),
        first // b,
        (end - first) // b,
        p.in_features,
        b,
        torch.get_num_threads(),
    )


def forward(x: Tensor, values: Tensor, p: LayerIndex, bias: Tensor | None) -> Tensor:
    """y [B, out] = x W^T + bias: see `sparse.forward`."""
    values = p.by_rows(values)
    if p.is_full:
        return linear(x, values.view(p.out_features, p.in_features), bias)
    slabs = _slabs(p)
    with _memory(slabs[0][1] * p.in_features) as slab:
        if len(slabs) == 1:
            return linear(x, _lay_out(values, p, *slabs[0], slab), bias)
        y = x.new_empty(x.shape[0], p.out_features)
        for first, end in slabs:
            weight = _lay_out(values, p, first, end, slab).t()
            if bias is None:
                torch.mm(x, weight, out=y[:, first:end])
            else:
                torch.addmm(bias[first:end], x, weight, out=y[:, first:end])
        return y


def backward(
    dy: Tensor,
    x: Tensor,
    values: Tensor,
    p: LayerIndex,
    need_input: bool,
    need_values: bool,
    dbias: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """(dx [B, in], dvalues like values): see `sparse.backward`."""
    if dbias is not None:
        torch.sum(dy, 0, out=dbias)
    if p.is_full:
        weight = values.view(p.out_features, p.in_features)
        dx = dy @ weight if need_input else None
        return dx, (dy.t() @ x).view_as(values) if need_values else None
    values = p.by_rows(values)
    slabs = _slabs(p)
    dx = dy.new_empty(dy.shape[0], p.in_features) if need_input else None
    dvalues = torch.empty_like(values) if need_values else None
    with _memory(slabs[0][1] * p.in_features) as slab:
        for first, end in slabs:
            part = dy[:, first:end]
            if dx is not None:
                weight = _lay_out(values, p, first, end, slab)
                if first == 0:
                    torch.mm(part, weight, out=dx)
                else:
                    torch.addmm(dx, part, weight, out=dx)
            if dvalues is not None:
                gradient = _rows(slab, first, end, p)
                torch.mm(part.t(), x, out=gradient)
                _collect(gradient, p, first, end, dvalues)
    return dx, None if dvalues is None else by_slots(dvalues, p.slots)
