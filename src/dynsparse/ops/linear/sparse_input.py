"""The layer for inputs that are sparse themselves: bags of words, counts of genes, one-hot codes.

The work is a multiplication for each non-zero of an input and each weight of its feature
(csrc/linear/sparse_input.cpp), however many features there are. Inputs get no gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from dynsparse._core import native
from dynsparse.ops import capture
from dynsparse.ops.linear import products
from dynsparse.ops.linear.autograd import explain_error, layer_linear
from dynsparse.ops.linear.layer_index import LayerIndex, Read
from dynsparse.ops.torch_internals import is_autocast, is_gradient_needed, is_plain_eager

_LAYOUTS = (torch.sparse_csr, torch.sparse_coo)
# Above this share of non-zeros in x the kernels for dense x are faster (a step of layers of 2,000
# and 8,000 inputs breaks even at 1 to 3 %).
_LARGEST_SHARE = 1 / 40


def sparse_input_linear(x: Tensor, values: Tensor, bias: Tensor | None, read: Read) -> Tensor:
    """Compute y [batch, out] = x W^T + bias for an x [batch, in] in CSR or COO.

    The kernels compute float32 on the CPU. x is made dense if it has another dtype or device,
    requires a gradient, or has more than a fortieth of non-zeros, and without compiled kernels.

    Args:
        values, read: as for `layer_linear`.

    Raises:
        TypeError: another layout.
        ValueError: x of another shape.
        IndexError: x with columns or row pointers out of range, which PyTorch does not check.
    """
    p = read.layer_index
    if x.layout not in _LAYOUTS:
        raise TypeError(f"a sparse input must be CSR or COO, got {x.layout}")
    if x.dim() != 2 or x.shape[1] != p.in_features:
        raise ValueError(f"a sparse input must be [batch, {p.in_features}], got {list(x.shape)}")
    is_eager = is_plain_eager(x, autocast=True)
    if is_eager:
        _check_indices(x)
    is_float32 = x.dtype is torch.float32 and (bias is None or bias.dtype is torch.float32)
    is_plain = read.plain and is_eager and not is_autocast(x) and not x.requires_grad
    is_dense = x._nnz() > _LARGEST_SHARE * x.numel()
    if not (is_plain and is_float32) or is_dense or native.load() is None:
        return layer_linear(x.to_dense(), values, bias, read)
    y: Tensor = _SparseInputFunction.apply(values, bias, x, read)
    return y


class _SparseInputFunction(Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, bias: Tensor | None, x: Tensor, read: Read) -> Tensor:
        p = ctx.layer_index = read.layer_index
        ctx.save_for_backward(values)
        ctx.x, ctx.entries = x, _group_by_sample(x)
        y = read.memory.new_empty(x.shape[0], p.out_features)
        native.call(
            "dynsparse_sparse_input_forward",
            *ctx.entries,
            read.memory,
            p.col_ptr,
            *p.column_order(),
            None if bias is None else bias.detach(),
            y,
            *(x.shape[0], p.out_features, p.block_size, torch.get_num_threads()),
        )
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        dvalues = _gradient_of_values(ctx, dy.contiguous()) if ctx.needs_input_grad[0] else None
        dbias = dy.sum(0) if ctx.needs_input_grad[1] else None
        return dvalues, dbias, None, None


def _gradient_of_values(ctx: Any, dy: Tensor) -> Tensor | None:
    p: LayerIndex = ctx.layer_index
    try:
        (values,) = ctx.saved_tensors
    except RuntimeError as error:
        raise explain_error(error) from None
    if values.shape != p.values_shape:
        raise RuntimeError(capture.CHANGED)
    if capture.replaced:
        capture.check_backward(p.row_ptr, values, ctx.next_functions[0][0])
    if capture.needs_check(p.row_ptr):
        if not is_gradient_needed(ctx.next_functions[0][0]):
            return None
        if capture.is_open(p.row_ptr):
            products.record(p.row_ptr, ctx.x.to_dense(), dy)
    dvalues = dy.new_zeros(p.values_shape)
    native.call(
        "dynsparse_sparse_input_backward",
        dy,
        *_group_by_feature(ctx.entries, p.in_features),
        p.col_ptr,
        *p.column_order(),
        dvalues,
        *(p.out_features, p.in_features, p.block_size, torch.get_num_threads()),
    )
    return dvalues


def _group_by_sample(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return pointers [batch + 1], features and values of the non-zeros, sample by sample."""
    if x.layout is torch.sparse_csr:
        pointers, columns = x.crow_indices().int(), x.col_indices().int()
        return pointers.contiguous(), columns.contiguous(), x.values().contiguous()
    x = x.coalesce()
    rows, columns = x.indices()
    return _pointers(rows, x.shape[0]), columns.int().contiguous(), x.values().contiguous()


def _check_indices(x: Tensor) -> None:
    """Raise IndexError where the kernels, and PyTorch's `to_dense`, would leave the memory of x."""
    if x.layout is torch.sparse_csr:
        columns, pointers = x.col_indices(), x.crow_indices()
        if pointers[0] != 0 or pointers[-1] != len(columns) or bool((pointers.diff() < 0).any()):
            raise IndexError("the row pointers of a sparse input must rise from 0 to its non-zeros")
    else:
        rows, columns = x._indices()  # `indices` refuses what is not coalesced
        _check_range("rows", rows, x.shape[0])
    _check_range("columns", columns, x.shape[1])


def _check_range(what: str, indices: Tensor, count: int) -> None:
    if len(indices):
        least, most = map(int, indices.aminmax())
        if least < 0 or most >= count:
            wrong = least if least < 0 else most
            raise IndexError(f"the {what} of a sparse input must be in [0, {count}), got {wrong}")


def _group_by_feature(entries: tuple[Tensor, Tensor, Tensor], features: int) -> tuple[Tensor, ...]:
    """Return pointers [features + 1], samples and values of the non-zeros, feature by feature."""
    pointers, columns, values = entries
    samples = torch.arange(len(pointers) - 1, dtype=torch.int32, device="cpu")
    order = columns.argsort(stable=True)
    rows = samples.repeat_interleave(pointers.diff())
    return _pointers(columns, features), rows[order], values[order]


def _pointers(numbers: Tensor, count: int) -> Tensor:
    """Return where the entries of each number begin among sorted ones: int32 [count + 1]."""
    pointers = numbers.new_zeros(count + 1, dtype=torch.int32)
    pointers[1:] = torch.bincount(numbers, minlength=count).cumsum(0)
    return pointers
