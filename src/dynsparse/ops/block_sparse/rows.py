"""The softmax of rows of which only the blocks of a pattern are there."""

from __future__ import annotations

import torch
from torch import Tensor

from dynsparse.checks import check_choice, check_kind
from dynsparse.ops.block_sparse.products import check_values
from dynsparse.pattern import SparsePattern
from dynsparse.pattern.index_arrays import by_slots

SUBBLOCK_MASKS = ("none", "zero_upper_triangle", "zero_lower_triangle")


def rows_of(row_ptr: Tensor, nnz: int) -> Tensor:
    """The block row of every slot, int64 [nnz]; the host does not wait for a device."""
    counts = row_ptr.diff().long()
    each = torch.arange(len(counts), device=counts.device)
    return torch.repeat_interleave(each, counts, output_size=nnz)


def diagonal_mask(rows: Tensor, cols: Tensor, block: int, upper: bool) -> Tensor:
    """Which elements of blocks lie above the diagonal, or below: bool [nnz, b, b]."""
    within = torch.arange(block, device=rows.device)
    ahead = (cols - rows)[:, None, None] * block + within - within[:, None]
    return ahead > 0 if upper else ahead < 0


def softmax(values: Tensor, pattern: SparsePattern, subblock_mask: str = "none") -> Tensor:
    """exp(s) / sum of exp(s) over each row of a sparse S, whose absent blocks count as -infinity.

    Differentiable any number of times: the gradient is y (g - sum of y g). A row of which nothing
    is there, or all is masked, gives zeros.

    Args:
        values: of S, [..., nnz] or [..., nnz, b, b], floating point; -infinity masks an element.
        pattern: of S, [m, n].
        subblock_mask: "zero_upper_triangle" masks what lies above the diagonal of S, in blocks on
            it and beyond it; "zero_lower_triangle" what lies below. ("none")

    Returns:
        The shape and dtype of values; 16-bit types are computed in float32.

    Raises:
        ValueError: values of another shape, an unknown mask. TypeError: as `sparse_dense_matmul`.

    Source: PopSparse's `bsSoftmax`; Child et al. 2019, "Generating Long Sequences with Sparse
    Transformers", section 5.
    """
    batch = check_values(values, pattern)
    check_kind("subblock_mask", subblock_mask, str, f"one of {', '.join(SUBBLOCK_MASKS)}")
    check_choice("subblock_mask", subblock_mask, SUBBLOCK_MASKS)
    block, height = pattern.block_size, pattern.grid[0]
    index = pattern._index_on(values.device)
    rows = by_slots(rows_of(index.row_ptr, pattern.nnz), index.slots)
    wide = torch.float32 if values.dtype.itemsize < 4 else values.dtype
    scores = values.to(wide).reshape(*batch, pattern.nnz, block, block)
    if subblock_mask != "none":
        upper = subblock_mask == "zero_upper_triangle"
        away = diagonal_mask(rows, by_slots(index.cols.long(), index.slots), block, upper)
        scores = scores.masked_fill(away, -torch.inf)
    return weights_of(scores, rows, height)[0].to(values.dtype).reshape(values.shape)


def added_up(parts: Tensor, which: Tensor, dim: int, size: int) -> Tensor:
    """The sum of the parts, as `index_add` to `size` zeros along a dimension.

    The same bits on every run, also on a GPU, where that adds as threads happen to come.
    """
    found = parts.new_zeros(*parts.shape[:dim], size, *parts.shape[dim + 1 :])
    if parts.is_cpu:
        return found.index_add(dim, which, parts)
    return in_order(found, which, dim, parts)


def in_order(found: Tensor, which: Tensor, dim: int, parts: Tensor) -> Tensor:
    """`index_add` that sorts what it adds."""
    first = found.movedim(dim, 0).index_put((which,), parts.movedim(dim, 0), accumulate=True)
    return first.movedim(0, dim)


def weights_of(scores: Tensor, rows: Tensor, height: int) -> tuple[Tensor, Tensor]:
    """The softmax of scores [..., nnz, b, b], and what was taken from them and divided by, as the
    logarithm of the sum of exponentials [..., height, b]: infinity where there is none."""
    # Finite, so that what is masked everywhere gives zeros and not NaN. No gradient goes through
    # it, as the weights do not depend on it.
    found = scores.detach().amax(-1)
    lowest = torch.finfo(scores.dtype).min
    top = found.new_full((*found.shape[:-2], height, found.shape[-1]), lowest)
    top = top.scatter_reduce(-2, rows[:, None].expand_as(found), found, "amax")
    weights = (scores - top.index_select(-2, rows)[..., None]).exp()
    sums = added_up(weights.sum(-1), rows, weights.dim() - 3, height)
    nothing = sums == 0
    sums = sums.masked_fill(nothing, 1)
    weights = weights / sums.index_select(-2, rows)[..., None]
    return weights, (top + sums.log()).masked_fill(nothing, torch.inf)
