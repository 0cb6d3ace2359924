"""Products and the softmax of block-sparse matrices, one or a batch of them with one pattern.

The products are the passes of the sparse linear operator, Y = X W^T: sparse x dense is forward,
with the dense operand's columns as samples, dense x sparse is the gradient of the input, and the
product sampled at the pattern is that of the weights. A batch whose matrices differ is one product
with the matrices along the diagonal.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dynsparse._core.checks import check_choice, check_kind, check_tensor
from dynsparse.ops.linear import grad_input, grad_weight, linear
from dynsparse.pattern import PatternIndex, SparsePattern
from dynsparse.pattern.index_arrays import to_slot_order
from dynsparse.pattern.on_device import expand_row_pointers

SUBBLOCK_MASKS = ("none", "zero_upper_triangle", "zero_lower_triangle")


def check_values(values: Tensor, pattern: SparsePattern) -> torch.Size:
    """Check values [..., nnz] or [..., nnz, b, b] against a pattern; return the batch's sizes.

    Raises:
        TypeError: not a floating point tensor, or not a pattern.
        ValueError: values of another shape.
    """
    check_kind("pattern", pattern, SparsePattern, "a SparsePattern")
    _check_floating("values", values)
    expected = pattern.values_shape
    leading = values.dim() - len(expected)
    if leading < 0 or tuple(values.shape[leading:]) != expected:
        sizes = ", ".join(map(str, expected))
        raise ValueError(
            f"values must be [..., {sizes}] for {pattern}, got the shape {list(values.shape)}"
        )
    return values.shape[:leading]


def _check_floating(name: str, tensor: Tensor) -> None:
    if not check_tensor(name, tensor).is_floating_point():
        raise TypeError(f"{name} must be floating point, got {tensor.dtype}")


def check_operand(name: str, dense: Tensor, like: Tensor | None, **sizes: int | None) -> None:
    """Raise unless `dense` is [..., rows, columns], of the type and on the device of `like`.

    Args:
        sizes: the number of rows and of columns, by their names in messages; None allows any.
    """
    _check_floating(name, dense)
    expected = list(sizes.values())
    shape = dense.shape[-2:]
    if len(shape) != 2 or any(e not in (None, s) for e, s in zip(expected, shape, strict=True)):
        words = ", ".join(f"{name_} = {size}" if size else name_ for name_, size in sizes.items())
        raise ValueError(f"{name} must be [..., {words}], got the shape {list(dense.shape)}")
    if like is not None and (dense.dtype, dense.device) != (like.dtype, like.device):
        raise ValueError(
            f"{name} must be {like.dtype} on {like.device} as the other operand is, "
            f"got {dense.dtype} on {dense.device}"
        )


def _batch_of(first: Sequence[int], second: Sequence[int], shared: bool) -> list[int]:
    """Return the batch of both operands; with `shared` the first may have none."""
    if list(first) == list(second) or (shared and not len(first)):
        return list(second)
    rule = "be equal in both operands" + (", or absent from values" if shared else "")
    raise ValueError(f"the dimensions of the batch must {rule}: {list(first)}, {list(second)}")


def _block_diagonal(index: PatternIndex, count: int) -> PatternIndex:
    """Return the index of a matrix with `count` copies of a pattern along the diagonal."""
    row_ptr, cols, col_ptr, csc_rows, csc_perm, slots = index
    nnz, height, width = len(cols), len(row_ptr) - 1, len(col_ptr) - 1
    most = max(nnz, height, width) * count
    if most > 2**31 - 1:
        raise ValueError(
            f"a batch of {count} matrices with {nnz} blocks has more than 2^31 of them: "
            "split the batch"
        )
    each = torch.arange(count, dtype=torch.int32, device=cols.device)[:, None]
    return PatternIndex(
        torch.cat([(row_ptr[:-1] + each * nnz).flatten(), row_ptr[-1:] * count]),
        (cols + each * width).flatten(),
        torch.cat([(col_ptr[:-1] + each * nnz).flatten(), col_ptr[-1:] * count]),
        (csc_rows + each * height).flatten(),
        (csc_perm + each * nnz).flatten(),
        (slots + each * nnz).flatten(),
    )


def sparse_dense_matmul(values: Tensor, pattern: SparsePattern, dense: Tensor) -> Tensor:
    """Compute S D, [..., m, n], of a sparse S [m, k] and a dense D [..., k, n].

    It is differentiable in both.

    Args:
        values: the values of S, [..., nnz] or [..., nnz, b, b]; without a batch one S for all.
        pattern: the pattern of S.
        dense: D, of the dtype and on the device of values; any strides.

    Returns:
        A tensor of the dtype of D, of any strides.

    Raises:
        ValueError: shapes, batches, dtypes or devices that do not fit. TypeError: not floating
            point tensors, not a pattern.
    """
    matrices = check_values(values, pattern)
    check_operand("dense", dense, values, k=pattern.shape[1], n=None)
    batch, n = _batch_of(matrices, dense.shape[:-2], shared=True), dense.shape[-1]
    index = pattern._shared_on(values.device)
    if not len(matrices):
        x = dense.movedim(-2, -1).reshape(-1, pattern.shape[1])
        return linear(x, values, index).unflatten(0, [*batch, n]).movedim(-1, -2)
    count = matrices.numel()
    x = dense.reshape(count * pattern.shape[1], n).t()
    y = linear(x, values.reshape(-1, *pattern.values_shape[1:]), _block_diagonal(index, count))
    return y.t().reshape(*batch, pattern.shape[0], n)


def dense_sparse_matmul(dense: Tensor, values: Tensor, pattern: SparsePattern) -> Tensor:
    """Compute D S, [..., n, m], of a dense D [..., n, k] and a sparse S [k, m].

    It is differentiable in both.

    Args, results and errors as of `sparse_dense_matmul`.
    """
    matrices = check_values(values, pattern)
    check_operand("dense", dense, values, n=None, k=pattern.shape[0])
    batch, n = _batch_of(matrices, dense.shape[:-2], shared=True), dense.shape[-2]
    index = pattern._shared_on(values.device)
    if not len(matrices):
        return grad_input(dense, values, index)
    count = matrices.numel()
    dy = dense.reshape(count, n, pattern.shape[0]).transpose(0, 1).reshape(n, -1)
    blocks = values.reshape(-1, *pattern.values_shape[1:])
    y = grad_input(dy, blocks, _block_diagonal(index, count))
    return y.unflatten(1, (count, -1)).transpose(0, 1).reshape(*batch, n, pattern.shape[1])


def sampled_matmul(a: Tensor, b: Tensor, pattern: SparsePattern) -> Tensor:
    """Compute A B at the blocks of a pattern [m, n]: the sampled dense-dense product (SDDMM).

    It is differentiable in both. The rest of A B is not computed, and no [m, n] matrix exists.

    Args:
        a: [..., m, k]; any strides.
        b: [..., k, n], with the batch, the dtype and the device of a.
        pattern: the blocks to compute.

    Returns:
        values [..., nnz] or [..., nnz, b, b].

    Raises:
        ValueError, TypeError: as `sparse_dense_matmul`.
    """
    check_kind("pattern", pattern, SparsePattern, "a SparsePattern")
    check_operand("a", a, None, m=pattern.shape[0], k=None)
    check_operand("b", b, a, k=a.shape[-1], n=pattern.shape[1])
    batch = _batch_of(a.shape[:-2], b.shape[:-2], shared=False)
    index, count = pattern._shared_on(a.device), a.shape[:-2].numel()
    shape = pattern.values_shape
    if not len(batch):
        return grad_weight(a.t(), b, a.new_empty(shape), index)
    dy = a.reshape(count * pattern.shape[0], -1).t()
    x = b.reshape(count, -1, pattern.shape[1]).transpose(0, 1).reshape(b.shape[-2], -1)
    like = a.new_empty(count * pattern.nnz, *shape[1:])
    return grad_weight(dy, x, like, _block_diagonal(index, count)).reshape(*batch, *shape)


def diagonal_mask(rows: Tensor, cols: Tensor, block: int, upper: bool) -> Tensor:
    """Return which elements of blocks are above the diagonal, or below it: bool [nnz, b, b]."""
    index = torch.arange(block, device=rows.device)
    offset = (cols - rows)[:, None, None] * block + index - index[:, None]
    return offset > 0 if upper else offset < 0


def softmax(values: Tensor, pattern: SparsePattern, subblock_mask: str = "none") -> Tensor:
    """Compute exp(s) / sum of exp(s) over each row of a sparse S; absent blocks are -infinity.

    It is differentiable any number of times: the gradient is y (g - sum of y g). A row without
    blocks, or with all elements masked, gives zeros.

    Args:
        values: the values of S, [..., nnz] or [..., nnz, b, b]; -infinity masks an element.
        pattern: the pattern of S, [m, n].
        subblock_mask: "zero_upper_triangle" masks the elements above the diagonal of S;
            "zero_lower_triangle" those below. Defaults to "none".

    Returns:
        The shape and dtype of values; 16-bit types are computed in float32.

    Raises:
        ValueError: values of another shape, an unknown mask. TypeError: as `sparse_dense_matmul`.

    Source: PopSparse's `bsSoftmax`; Child et al. 2019, "Generating Long Sequences with Sparse
    Transformers", section 5.
    """
    batch = check_values(values, pattern)
    check_choice("subblock_mask", subblock_mask, SUBBLOCK_MASKS)
    block, height = pattern.block_size, pattern.grid[0]
    index = pattern._index_on(values.device)
    rows = to_slot_order(expand_row_pointers(index.row_ptr, pattern.nnz), index.slots)
    wide = torch.float32 if values.dtype.itemsize < 4 else values.dtype
    scores = values.to(wide).reshape(*batch, pattern.nnz, block, block)
    if subblock_mask != "none":
        upper = subblock_mask == "zero_upper_triangle"
        cols = to_slot_order(index.cols.long(), index.slots)
        scores = scores.masked_fill(diagonal_mask(rows, cols, block, upper), -torch.inf)
    return softmax_weights(scores, rows, height)[0].to(values.dtype).reshape(values.shape)


def sum_by_index(parts: Tensor, which: Tensor, dim: int, size: int) -> Tensor:
    """Add up the parts by index, as `index_add` to `size` zeros along a dimension.

    The result has the same bits on every run, also on a GPU, where `index_add` adds in any order.
    """
    zeros = parts.new_zeros(*parts.shape[:dim], size, *parts.shape[dim + 1 :])
    if parts.is_cpu:
        return zeros.index_add(dim, which, parts)
    return index_add_in_order(zeros, which, dim, parts)


def index_add_in_order(sums: Tensor, which: Tensor, dim: int, parts: Tensor) -> Tensor:
    """Compute `index_add` in the order of the index, by `index_put`, which sorts."""
    total = sums.movedim(dim, 0).index_put((which,), parts.movedim(dim, 0), accumulate=True)
    return total.movedim(0, dim)


def softmax_weights(scores: Tensor, rows: Tensor, height: int) -> tuple[Tensor, Tensor]:
    """Return the softmax of scores [..., nnz, b, b], and the logarithms of its denominators.

    These are log(sum of exp(s)) of each row [..., height, b], infinity for rows without entries.
    """
    # The maximum is finite, so that fully masked rows give zeros and not NaN. The weights do not
    # depend on it, so no gradient goes through it.
    largest = scores.detach().amax(-1)
    lowest = torch.finfo(scores.dtype).min
    top = largest.new_full((*largest.shape[:-2], height, largest.shape[-1]), lowest)
    top = top.scatter_reduce(-2, rows[:, None].expand_as(largest), largest, "amax")
    weights = (scores - top.index_select(-2, rows)[..., None]).exp()
    sums = sum_by_index(weights.sum(-1), rows, weights.dim() - 3, height)
    is_empty = sums == 0
    sums = sums.masked_fill(is_empty, 1)
    weights = weights / sums.index_select(-2, rows)[..., None]
    return weights, (top + sums.log()).masked_fill(is_empty, torch.inf)
