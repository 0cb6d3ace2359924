"""Rows of a sparse table by index: one operator, one autograd.

The table is a sparse W [vocabulary, width]; looking up token t is the product of a one-hot row with
it, at the cost of the non-zeros of row t.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dynsparse._core.checks import check_integer, check_kind
from dynsparse.ops import capture
from dynsparse.ops.embedding import products
from dynsparse.ops.linear.layer_index import LayerIndex, check_contents
from dynsparse.ops.linear.naive import block_size_of
from dynsparse.ops.torch_internals import is_plain_eager, refuse_onnx_export, refuse_transforms
from dynsparse.pattern import PatternIndex, SparsePattern

__all__ = ["embedding"]

_library = torch.library.Library("dynsparse", "FRAGMENT")
_library.define(
    "embedding(Tensor ids, Tensor values, Tensor row_ptr, Tensor cols, Tensor slots, int width)"
    " -> Tensor"
)
_library.define(
    "embedding_backward(Tensor dy, Tensor ids, Tensor values, Tensor row_ptr, Tensor cols, "
    "Tensor slots) -> Tensor"
)


def _forward(
    ids: Tensor, values: Tensor, row_ptr: Tensor, cols: Tensor, slots: Tensor, width: int
) -> Tensor:
    capture.check_program(row_ptr, values)
    if not values.is_cpu:
        return products.forward_on_device(ids, values, row_ptr, cols, slots, width)
    rows = products.forward(ids.reshape(-1), values, row_ptr, cols, slots, width)
    return rows.resize_(*ids.shape, width)  # not a view: autograd forbids writing to it


def _backward(
    dy: Tensor, ids: Tensor, values: Tensor, row_ptr: Tensor, cols: Tensor, slots: Tensor
) -> Tensor:
    capture.check_backward(row_ptr, values)
    ids, dy = ids.reshape(-1), dy.reshape(-1, dy.shape[-1])
    if capture.is_open(row_ptr):
        record_rows(dy, ids, values, row_ptr)
    if not values.is_cpu:
        return products.grad_weight_on_device(dy, ids, values, row_ptr, cols, slots)
    return products.grad_weight(dy, ids, values, row_ptr, cols, slots)


def record_rows(dy: Tensor, ids: Tensor, values: Tensor, row_ptr: Tensor) -> None:
    """Record the dense gradient dW = onehot^T dY as a pair that growth reads: x is dY [n, width],
    dY the one-hots of ids [n]. For backward passes.

    Tokens that occur several times are added up first, so this is never larger than the logits.
    """
    vocabulary = (len(row_ptr) - 1) * block_size_of(values)
    if not values.is_cpu:  # the number of distinct tokens is not known to the host
        capture.record(row_ptr, *products.pair_on_device(dy, ids, vocabulary))
        return
    tokens, place = ids.unique(return_inverse=True)
    x = dy.new_zeros(len(tokens), dy.shape[1]).index_add_(0, place, dy)
    one_hot = dy.new_zeros(len(tokens), vocabulary).scatter_(1, tokens[:, None], 1.0)
    capture.record(row_ptr, x, one_hot)


_library.impl("embedding", refuse_onnx_export(_forward), "CompositeExplicitAutograd")
_library.impl("embedding_backward", _backward, "CompositeExplicitAutograd")


def _forward_shapes(
    ids: Tensor, values: Tensor, row_ptr: Tensor, cols: Tensor, slots: Tensor, width: int
) -> Tensor:
    return values.new_empty(*ids.shape, width)


def _backward_shapes(
    dy: Tensor, ids: Tensor, values: Tensor, row_ptr: Tensor, cols: Tensor, slots: Tensor
) -> Tensor:
    return torch.empty_like(values)


_library.impl("embedding", refuse_onnx_export(_forward_shapes), "Meta")
_library.impl("embedding_backward", _backward_shapes, "Meta")


def _setup_context(ctx, inputs, output) -> None:
    ids, values, row_ptr, cols, slots, _ = inputs
    ctx.save_for_backward(ids, values, row_ptr, cols, slots)


def _autograd(ctx, dy: Tensor):
    grad = None
    if ctx.needs_input_grad[1]:
        ids, values, *index = ctx.saved_tensors
        capture.check_backward(index[0], values, ctx.next_functions[1][0])
        grad = torch.ops.dynsparse.embedding_backward(dy, ids, values, *index)
    return None, grad, None, None, None, None


def _no_double_backward(ctx, *grads):
    raise RuntimeError(
        "dynsparse's sparse embedding has no second derivative: "
        "call backward without create_graph=True, or dynsparse.densify first"
    )


torch.library.register_autograd(
    "dynsparse::embedding", _autograd, setup_context=_setup_context, lib=_library
)
torch.library.register_autograd("dynsparse::embedding_backward", _no_double_backward, lib=_library)


def embedding(
    ids: Tensor, values: Tensor, pattern: SparsePattern | PatternIndex, width: int
) -> Tensor:
    """Rows of a sparse table. Differentiable in the values.

    Args:
        ids: integers [...] in [0, vocabulary).
        values: [nnz] or [nnz, b, b] of the table W [vocabulary, width].
        pattern: of W, or its index tensors on the device of `values`.
        width: features of a row.

    Returns:
        [..., width], the dtype of the values.

    Raises:
        TypeError: ids that are not integers. ValueError: a width that is not that of the table.
        RuntimeError: index tensors that do not fit or point outside. IndexError: an id outside the
            table; on a CPU only, since it would synchronise with an accelerator.
    """
    compiling = torch.compiler.is_compiling()
    if not compiling:
        check_kind("ids", ids, Tensor, "a tensor")
        check_kind("values", values, Tensor, "a tensor")
        check_kind(
            "pattern", pattern, (SparsePattern, PatternIndex), "a SparsePattern or its index"
        )
        width = check_integer("width", width, 1)
    index = pattern.index if isinstance(pattern, SparsePattern) else pattern
    if not compiling:
        p = LayerIndex(index, values)
        if index is pattern and is_plain_eager(ids):
            check_contents(index)
        if width != p.in_features:
            raise ValueError(f"width must be {p.in_features}, that of the table, got {width}")
        refuse_transforms("dynsparse's sparse embedding", values)
    if ids.dtype not in (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8):
        raise TypeError(f"ids must be integers, got {ids.dtype}")
    if ids.device.type == "cpu" and not torch.compiler.is_compiling() and ids.numel():
        vocabulary = (len(index.row_ptr) - 1) * block_size_of(values)
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= vocabulary:
            raise IndexError(f"ids must lie in [0, {vocabulary}), got {low if low < 0 else high}")
    return torch.ops.dynsparse.embedding(
        ids.long(), values, index.row_ptr, index.cols, index.slots, width
    )
