"""Sparse linear products on a CPU through dense ones, above the break-even density.

The weight is laid out some rows at a time for torch's dense products: never more than `CHUNK_BYTES`
of it exist. A full pattern of single elements is a dense weight already and is used directly.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.functional import linear

from dynsparse._core import native
from dynsparse.ops.linear.layer_index import LayerIndex
from dynsparse.ops.linear.panels import masks_of
from dynsparse.pattern.index_arrays import to_slot_order

# Dense products of fewer rows are slower; more memory would be noticed beside the values.
CHUNK_BYTES = 16 << 20


def _chunks(p: LayerIndex) -> list[tuple[int, int]]:
    """Return the (first, end) row of each chunk of block rows."""
    b = p.block_size
    out = p.out_features
    rows = max(1, min(CHUNK_BYTES // 4 // p.in_features, out) // b) * b
    return [(first, min(out, first + rows)) for first in range(0, out, rows)]


# The memory of chunks is reused: new memory of this size is mapped and zeroed page by page.
# Concurrent calls have one each.
_pool: list[Tensor] = []


@contextmanager
def _borrow_memory(elements: int) -> Iterator[Tensor]:
    """Borrow a tensor of at least this many uninitialised floats from the pool."""
    memory = _pool.pop() if _pool else None
    if memory is None or memory.numel() < elements:
        # A tensor made in inference mode cannot be written to outside it.
        with torch.inference_mode(False):
            memory = torch.empty(elements, dtype=torch.float32, device="cpu")
    try:
        yield memory
    finally:
        _pool.append(memory)


def release_memory() -> None:
    """Free the pool."""
    _pool.clear()


def _chunk_matrix(memory: Tensor, first: int, end: int, p: LayerIndex) -> Tensor:
    """Return the memory of a chunk as a matrix [end - first, in]."""
    return memory[: (end - first) * p.in_features].view(-1, p.in_features)


def _lay_out(values: Tensor, p: LayerIndex, first: int, end: int, memory: Tensor) -> Tensor:
    """Lay out the rows [first, end) of the weight, [end - first, in], in `memory`."""
    chunk = _chunk_matrix(memory, first, end, p)
    _move_entries("dynsparse_rows_to_dense", values, chunk, p, first, end)
    return chunk


def _move_entries(
    function: str, source: Tensor, target: Tensor, p: LayerIndex, first: int, end: int
) -> None:
    """Copy the entries of some rows from values to a dense chunk, or back."""
    b = p.block_size
    native.call(
        function,
        *(source, p.row_ptr, p.cols, masks_of(p), target),
        *(first // b, (end - first) // b, p.in_features, b, torch.get_num_threads()),
    )


def forward(x: Tensor, values: Tensor, p: LayerIndex, bias: Tensor | None) -> Tensor:
    """Compute y [B, out] = x W^T + bias: see `cpu.Kernels`."""
    values = p.by_rows(values)
    if p.is_full:
        return linear(x, values.view(p.out_features, p.in_features), bias)
    chunks = _chunks(p)
    with _borrow_memory(chunks[0][1] * p.in_features) as memory:
        if len(chunks) == 1:
            return linear(x, _lay_out(values, p, *chunks[0], memory), bias)
        y = x.new_empty(x.shape[0], p.out_features)
        for first, end in chunks:
            weight = _lay_out(values, p, first, end, memory).t()
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
    """Compute (dx [B, in], dvalues like values): see `cpu.Kernels`."""
    if dbias is not None:
        torch.sum(dy, 0, out=dbias)
    if p.is_full:
        weight = values.view(p.out_features, p.in_features)
        dx = dy @ weight if need_input else None
        return dx, (dy.t() @ x).view_as(values) if need_values else None
    values = p.by_rows(values)
    chunks = _chunks(p)
    dx = dy.new_empty(dy.shape[0], p.in_features) if need_input else None
    dvalues = torch.empty_like(values) if need_values else None
    with _borrow_memory(chunks[0][1] * p.in_features) as memory:
        for first, end in chunks:
            part = dy[:, first:end]
            if dx is not None:
                weight = _lay_out(values, p, first, end, memory)
                if first == 0:
                    torch.mm(part, weight, out=dx)
                else:
                    torch.addmm(dx, part, weight, out=dx)
            if dvalues is not None:
                gradient = _chunk_matrix(memory, first, end, p)
                torch.mm(part.t(), x, out=gradient)
                _move_entries("dynsparse_rows_from_dense", gradient, dvalues, p, first, end)
    return dx, None if dvalues is None else to_slot_order(dvalues, p.slots)
