"""Scores of positions: part of the dense gradient dY^T X, pooled per block."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dynsparse._core import native
from dynsparse.ops.conv.patches import features_of, matrices
from dynsparse.pattern.index_arrays import empty

# The largest block that the kernels pool.
_LARGEST_POOLED = 1024

Pair = tuple[Tensor, Tensor]


class Scorer:
    """Computes pooled |dY^T X| of some blocks.

    If the compiled kernels rank single elements, which ignore signs, scores keep theirs.
    """

    def __init__(
        self, pairs: Sequence[Pair], b: int, pooling: str, dtype: torch.dtype, rows: int
    ) -> None:
        self.pairs, self.b, self.pooling, self.dtype = pairs, b, pooling, dtype
        self.device = pairs[0][0].device
        on_cpu = self.device.type == "cpu" and dtype == torch.float32
        self.is_compiled = on_cpu and native.load() is not None
        _, in_features = features_of(*pairs[0])
        self._gradient = empty(rows * b, in_features, dtype=dtype, device=self.device)

    def score_rows(self, first: int, last: int) -> Tensor:
        """Return the scores of block rows, [last - first, in/b], valid until the next call."""
        begin, end = first * self.b, last * self.b
        grad = self._gradient[: end - begin]
        add_rows(grad, self.pairs, begin, end, fresh=True)
        return self._pool(grad)

    def score_submatrix(self, rows: Tensor, cols: Tensor) -> Tensor:
        """Return the scores [rows, cols] of a submatrix of block rows and columns.

        Not for convolutions.
        """
        inside = torch.arange(self.b, device="cpu")
        out = (rows[:, None] * self.b + inside).view(-1).to(self.device)
        in_ = (cols[:, None] * self.b + inside).view(-1).to(self.device)
        grad = torch.zeros(len(out), len(in_), dtype=self.dtype, device=self.device)
        for x, dy in self.pairs:
            left, right = dy.index_select(1, out), x.index_select(1, in_)
            grad.addmm_(left.to(self.dtype).t(), right.to(self.dtype))
        return self._pool(grad).abs_()

    def _pool(self, grad: Tensor) -> Tensor:
        b = self.b
        if b == 1:
            return grad
        if not self.is_compiled or b > _LARGEST_POOLED:
            return pool(grad.abs_(), self.pooling, b)
        scores = grad.new_empty(len(grad) // b, grad.shape[1] // b)
        kind = {"avg": 1, "max": 2}.get(self.pooling, 0)
        threads = torch.get_num_threads()
        native.call("dynsparse_grow_pool", grad, *scores.shape, b, kind, scores, threads)
        return scores


def add_rows(
    grad: Tensor, pairs: Sequence[Pair], begin: int, end: int, fresh: bool = False
) -> None:
    """Add the rows [begin, end) of the sum over pairs of dY^T X to grad [end - begin, in].

    Args:
        fresh: whether grad is uninitialised.
    """
    for i, (x, dy) in enumerate(pairs):
        fresh = fresh and i == 0
        if fresh and x.dim() != 2:  # patches are added up in parts
            grad.zero_()
            fresh = False
        for first, left, right in matrices(x, dy, begin, end):
            part = grad.narrow(0, first, len(left))
            part.addmm_(left.to(grad.dtype), right.to(grad.dtype), beta=0 if fresh else 1)


def add_row_ranges(grad: Tensor, pairs: Sequence[Pair], ranges: Sequence[tuple[int, int]]) -> None:
    """Do the same as `add_rows` for several ranges [begin, end), one after the other in grad."""
    rows = torch.cat([torch.arange(*bounds, device="cpu") for bounds in ranges]).to(grad.device)
    for x, dy in pairs:
        if x.dim() == 2:
            grad.addmm_(dy.index_select(1, rows).t().to(grad.dtype), x.to(grad.dtype))
            continue
        for part, (begin, end) in zip(grad.split([e - b for b, e in ranges]), ranges, strict=True):
            add_rows(part, [(x, dy)], begin, end)


def pool(magnitude: Tensor, pooling: str, b: int) -> Tensor:
    """Return the scores [rows, columns] of the blocks of magnitudes [rows * b, columns * b].

    Sums run over the rows of a block in order, then over its columns, so that the compiled kernels
    (csrc/update/pool.cpp) give the same bits.
    """
    by_rows = magnitude.unflatten(0, (-1, b))
    if pooling == "max":
        return by_rows.amax(1).unflatten(1, (-1, b)).amax(2)
    pooled = by_rows[:, 0].clone()
    for i in range(1, b):
        pooled += by_rows[:, i]
    by_cols = pooled.unflatten(1, (-1, b))
    score = by_cols[:, :, 0].clone()
    for j in range(1, b):
        score += by_cols[:, :, j]
    return score.div_(b * b) if pooling == "avg" else score
