"""Patterns of trained weights: those that other tools pruned, and those pruned here."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dynsparse.allocation import check_block
from dynsparse.nn.candidates import Candidate
from dynsparse.nn.init import sum_blocks
from dynsparse.ops.grow import select
from dynsparse.pattern import SparsePattern

# With fewer zeros than this a layer counts as dense: small weights of 16-bit files round to zero.
LEAST_SPARSITY = 0.01

_BLOCK_SIZES = (4, 8, 16, 32, 64, 128)

# SparseGPT's number of columns whose mask is chosen at once, and its damping.
_COLUMNS = 128
_DAMPING = 0.01


def find_nonzero_pattern(candidate: Candidate, block_size: int | None) -> SparsePattern:
    """Return the pattern of the blocks of a layer's weight that hold anything but zeros.

    Args:
        block_size: None for the largest blocks that hold no zero at all, among powers of two from 4
            to 128; for single elements if there are none.

    Raises:
        ValueError: a block size that does not divide the layer.
    """
    shape, present = candidate.shape, candidate.matrix != 0
    if block_size is not None:
        check_block(candidate.name, shape, block_size)
        return SparsePattern.from_mask(present, block_size)
    edge = 1
    if not bool(present.all()):
        channels = shape[0] // getattr(candidate.module, "groups", 1), shape[1]
        for b in _BLOCK_SIZES:
            if channels[0] % b or channels[1] % b or not _is_whole(present, b):
                break
            edge = b
    return SparsePattern.from_mask(present, edge)


def _is_whole(present: Tensor, b: int) -> bool:
    """Whether the elements of every block are either all present or all absent."""
    blocks = present.view(present.shape[0] // b, b, present.shape[1] // b, b)
    return torch.equal(blocks.any(3).any(1), blocks.all(3).all(1))


def score_blocks(weight: Tensor, squares: Tensor | None, b: int) -> Tensor:
    """Return the scores [out / b, in / b] of the blocks of a weight [out, in], float64.

    The score of a block is the sum of those of its elements: |W_ij|, or with `squares` those of
    Wanda, |W_ij| * ||X_j||_2 (Sun et al. 2023, "A Simple and Effective Pruning Approach for Large
    Language Models", section 3).

    Args:
        squares: the sum of the squares of each input, [in].
    """
    scores = weight.abs() if squares is None else weight.abs().to(squares.dtype) * squares.sqrt()
    return sum_blocks(scores, b)


def select_best_blocks(scores: Tensor, nnz: int, per_row: bool) -> Tensor:
    """Return the positions of the `nnz` largest of `scores` [rows, cols], flat and ascending.

    Ties go to the first. With `per_row` the numbers of two rows differ by at most one: the rows
    that keep one more are those whose next score is largest.
    """
    if not per_row:
        return select(scores.flatten(), nnz)
    rows, cols = scores.shape
    each, more = divmod(nnz, rows)
    order = scores.argsort(dim=1, descending=True, stable=True)
    flat = order + cols * torch.arange(rows, device=scores.device)[:, None]
    kept = [flat[:, :each].flatten()]
    if more:
        kept.append(flat[select(scores.gather(1, order[:, each, None]).flatten(), more), each])
    return torch.cat(kept).sort().values


def sparsegpt(
    weight: Tensor, products: Tensor, nnz: int, b: int, per_row: bool
) -> tuple[SparsePattern, Tensor]:
    """Prune by SparseGPT; return the pattern that it keeps and the updated weight [out, in].

    Frantar and Alistarh 2023, "SparseGPT: Massive Language Models Can Be Accurately Pruned in
    One-Shot", algorithm 1, with a damping of 1 % of the mean diagonal. Weights are pruned column by
    column; those to the right compensate for each pruned weight, so that the outputs change least.
    Masks are chosen for 128 columns at a time, by w^2 / [H^-1]_jj, each with its share of the `nnz`
    blocks.

    Args:
        products: H, the sum of x x^T over the inputs x, [in, in].
        nnz: blocks to keep.
        b: the block size. The score of a block is the sum of those of its elements.
        per_row: whether rows keep the same number of blocks in each 128 columns, to within one.
    """
    w = weight.to(products.dtype, copy=True)
    columns = w.shape[1]
    inverse = _factor_of_inverse(products)
    scale = inverse.diagonal()
    width = max(1, _COLUMNS // b) * b
    kept = torch.zeros(w.shape[0] // b, columns // b, dtype=torch.bool, device=w.device)
    for start in range(0, columns, width):
        end = min(start + width, columns)
        scores = sum_blocks((w[:, start:end] / scale[start:end]).square(), b)
        count = round(nnz * end / columns) - round(nnz * start / columns)
        part = torch.zeros_like(scores, dtype=torch.bool)
        part.view(-1)[select_best_blocks(scores, count, per_row)] = True
        kept[:, start // b : end // b] = part
        absent = ~part.repeat_interleave(b, 0).repeat_interleave(b, 1)
        errors = torch.zeros_like(w[:, start:end])
        for j in range(start, end):
            errors[:, j - start] = w[:, j] / scale[j] * absent[:, j - start]
            w[:, j:end] -= errors[:, j - start, None] * inverse[j, j:end]
        w[:, start:end].masked_fill_(absent, 0)  # exactly
        w[:, end:] -= errors @ inverse[start:end, end:]
    flat = kept.flatten().nonzero().flatten().cpu()
    pattern = SparsePattern.from_flat(flat, shape=tuple(w.shape), block_size=b)
    return pattern, w.to(weight.dtype)


def _factor_of_inverse(products: Tensor) -> Tensor:
    """Return the upper Cholesky factor of the inverse of the damped matrix [in, in].

    The square of its entry at (j, j) is the diagonal of the inverse when the columns before j are
    left out, and its row j the first row of that inverse, divided by the root of that.
    """
    h = products.clone()
    diagonal = h.diagonal()
    mean = diagonal.mean()
    diagonal += _DAMPING * mean if mean > 0 else 1.0
    return torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(h)), upper=True)


def global_counts(scores: Mapping[str, Tensor], density: float) -> dict[str, int]:
    """Return how many blocks each layer keeps if the best of all layers are kept, at least one.

    Args:
        scores: layer name -> scores of its blocks, [rows, cols].
        density: kept / all blocks.
    """
    sizes = torch.tensor([layer.numel() for layer in scores.values()], device="cpu")
    flat = torch.cat([layer.flatten().float().cpu() for layer in scores.values()])
    kept = select(flat, max(1, round(density * len(flat))))
    layer = torch.bucketize(kept, sizes.cumsum(0), right=True)
    counts = torch.bincount(layer, minlength=len(sizes)).clamp(min=1)
    return dict(zip(scores, counts.tolist(), strict=True))
