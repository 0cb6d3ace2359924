"""The positions of largest gradient outside a pattern, from x and dY.

The dense gradient dY^T X is computed in chunks of rows. Each chunk is ranked against the best
candidates so far and then overwritten, so that no [out, in] matrix ever exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dynsparse.ops.grow.select import select
from dynsparse.ops.grow.taken import check_count, check_exclude, taken_among
from dynsparse.pattern import SparsePattern

__all__ = ["POOLINGS", "GrowCandidates", "topk_outside"]

POOLINGS = ("sum", "avg", "max", "none")

# Large enough to keep the matrix product efficient, small enough to stay in the last-level cache.
CHUNK_BYTES = 4 << 20

# Positions sampled to guess the threshold, where the matrix has more than so many chunks.
_SAMPLE = 8192
_SAMPLE_FROM = 2

Pair = tuple[Tensor, Tensor]


class GrowCandidates(NamedTuple):
    """Positions to grow: `flat` block positions int64 [k] on the CPU, and their `scores` [k]."""

    flat: Tensor
    scores: Tensor


def topk_outside(
    pairs: Sequence[Pair],
    pattern: SparsePattern,
    k: int,
    *,
    pooling: str = "sum",
    exclude: Tensor | None = None,
    sort: bool = True,
) -> GrowCandidates:
    """The exact `k` positions of largest |sum over pairs of dY^T X| that are not in `pattern`.

    Beside the result it needs one chunk of rows of the gradient (about 4 MiB) and room for the
    candidates of one more. 16-bit activations are accumulated in float32; float64 stays
    float64. Equal scores: the smaller flat position first.

    Args:
        pairs: (x [batch, in], dY [batch, out]) of every micro-batch; batches may differ in size.
        pattern: positions that are taken.
        k: how many positions.
        pooling: how the magnitudes of a block become its score: "sum", "avg" or "max"; "none" has
            no options and ranks by the sum. Elements (block size 1) need no pooling.
        exclude: further positions that may not be chosen: flat block positions, int64 [any],
            sorted and distinct; for instance those dropped a moment ago.
        sort: best first; False saves time and leaves the candidates in order of position.

    Raises:
        ValueError: more positions asked for than are free, no pairs, tensors whose shapes do not
            fit, gradients that are not finite, an unknown pooling.

    Source: Evci et al. 2020, "Rigging the Lottery", section 3 (grow criterion). Pooling follows
    Graphcore's dynamic sparsity application: magnitudes first, then the reduction.
    """
    pooling = check_pooling(pooling)
    exclude = check_exclude(exclude, pattern)
    k = check_count(k, pattern, exclude)
    dtype = _check_pairs(pairs, pattern) if k else torch.float32
    if k == 0:
        return GrowCandidates(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=dtype))

    (height, width), b = pattern.grid, pattern.block_size
    device = pairs[0][0].device
    rows = max(1, CHUNK_BYTES // (pattern.shape[1] * b * dtype.itemsize))
    guess = -1.0
    if height > _SAMPLE_FROM * rows:
        guess = _guess_threshold(pairs, pattern, exclude, k, pooling, dtype)
    # A guess that was too high is mended by a second pass without one.
    for threshold in (guess, -1.0):
        best = _Best(k, rows * width, threshold, dtype, device)
        for first in range(0, height, rows):
            last = min(first + rows, height)
            scores = _block_scores(pairs, first * b, last * b, b, pooling, dtype).view(-1)
            for taken in taken_among(pattern, exclude, first, last):
                scores[taken.to(device)] = -1.0
            best.add(scores, first * width)
        best.compact()
        if best.count == k:
            break
    else:
        raise ValueError("the gradients overflow, so positions cannot be ranked: lower the scale")
    flat, values = best.flat[:k], best.scores[:k]
    if not sort:
        return GrowCandidates(flat.cpu(), values)
    order = values.sort(descending=True, stable=True).indices
    return GrowCandidates(flat[order].cpu(), values[order])


class _Best:
    """The best candidates so far, in order of position, in room for `k` and one more chunk."""

    def __init__(
        self, k: int, chunk: int, threshold: float, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.k = k
        self.scores = torch.empty(k + chunk, dtype=dtype, device=device)
        self.flat = torch.empty(k + chunk, dtype=torch.int64, device=device)
        self.count = 0
        self.threshold = threshold

    def add(self, scores: Tensor, offset: int) -> None:
        """Take in a chunk of scores whose first has the flat position `offset`."""
        # A score equal to the threshold loses against those before it: it comes later.
        found = (scores > self.threshold).nonzero().flatten()
        if self.count + len(found) > len(self.scores):
            self.compact()
            found = found[scores[found] > self.threshold]
        end = self.count + len(found)
        torch.index_select(scores, 0, found, out=self.scores[self.count : end])
        torch.add(found, offset, out=self.flat[self.count : end])
        self.count = end

    def compact(self) -> None:
        """Keep only the best `k`, and raise the threshold to the last of them."""
        if self.count > self.k:
            keep = select(self.scores[: self.count], self.k)
            self.scores[: self.k] = self.scores[keep]
            self.flat[: self.k] = self.flat[keep]
            self.count = self.k
        if self.count == self.k:
            self.threshold = float(self.scores[: self.k].min())


def _guess_threshold(
    pairs: Sequence[Pair],
    pattern: SparsePattern,
    exclude: Tensor,
    k: int,
    pooling: str,
    dtype: torch.dtype,
) -> float:
    """A score that a few more than `k` free positions exceed, judged by a sample of positions.

    It spares most of the candidates that a running threshold lets through at first. Four standard
    deviations of the sample's count are allowed for.
    """
    b, width = pattern.block_size, pattern.grid[1]
    device = pairs[0][0].device
    # A generator of its own: the random numbers of the training stay what they were.
    generator = torch.Generator().manual_seed(0)
    sample = torch.randint(pattern.total, (_SAMPLE,), generator=generator)
    batch = max(len(x) for x, _ in pairs)
    piece = max(1, CHUNK_BYTES // (4 * b * max(1, batch) * dtype.itemsize))
    scores = []
    for flat in sample.split(piece):
        inside = torch.arange(b)
        rows = ((flat // width)[:, None] * b + inside).view(-1).to(device)
        cols = ((flat % width)[:, None] * b + inside).view(-1).to(device)
        blocks = torch.zeros(len(flat), b, b, dtype=dtype, device=device)
        for x, dy in pairs:
            left = dy.index_select(1, rows).to(dtype).view(len(dy), len(flat), b)
            right = x.index_select(1, cols).to(dtype).view(len(x), len(flat), b)
            blocks.baddbmm_(left.permute(1, 2, 0), right.transpose(0, 1))
        scores.append(_pool(blocks.abs_(), pooling, b).view(-1))
    score = torch.cat(scores)
    score[(pattern.contains(sample) | torch.isin(sample, exclude)).to(device)] = -1.0
    expected = _SAMPLE * k / pattern.total
    rank = int(expected + 4 * expected**0.5 + 4)
    if rank >= _SAMPLE:
        return -1.0
    threshold = float(score.sort(descending=True).values[rank])
    # Scores of exactly zero tie by the thousand: they must stay within reach.
    return threshold if threshold > 0 else -1.0


def check_pooling(pooling: str) -> str:
    """The pooling in lower case; "SUM" and "sum" are the same."""
    if not isinstance(pooling, str) or pooling.lower() not in POOLINGS:
        raise ValueError(f"pooling must be one of {', '.join(POOLINGS)}, got {pooling!r}")
    return pooling.lower()


def _check_pairs(pairs: Sequence[Pair], pattern: SparsePattern) -> torch.dtype:
    """Shapes fit and entries are finite; returns the type to accumulate in."""
    if len(pairs) == 0:
        raise ValueError("expected at least one pair (x, dY), got none: growth needs a backward")
    out_features, in_features = pattern.shape
    for x, dy in pairs:
        fits = x.dim() == dy.dim() == 2 and len(x) == len(dy)
        if not fits or x.shape[1] != in_features or dy.shape[1] != out_features:
            raise ValueError(
                f"expected x [batch, {in_features}] and dY [batch, {out_features}], "
                f"got {list(x.shape)} and {list(dy.shape)}"
            )
        for name, tensor in (("x", x), ("dY", dy)):
            if not tensor.is_floating_point():
                raise TypeError(f"{name} must be of a floating point type, got {tensor.dtype}")
            if tensor.numel() and not bool(torch.stack(torch.aminmax(tensor)).isfinite().all()):
                raise ValueError(
                    f"{name} holds NaN or infinity, so positions cannot be ranked: "
                    "the training has diverged"
                )
    tensors = [tensor for pair in pairs for tensor in pair]
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def _block_scores(
    pairs: Sequence[Pair], first: int, last: int, b: int, pooling: str, dtype: torch.dtype
) -> Tensor:
    """Pooled |dY^T X| of the output features [first, last): [(last - first) / b, in / b]."""
    grad: Tensor | None = None
    for x, dy in pairs:
        left, right = dy[:, first:last].t().to(dtype), x.to(dtype)
        grad = left @ right if grad is None else grad.addmm_(left, right)
    assert grad is not None
    magnitude = grad.abs_()
    if b == 1:
        return magnitude
    return _pool(magnitude.view((last - first) // b, b, -1), pooling, b)


def _pool(magnitude: Tensor, pooling: str, b: int) -> Tensor:
    """[rows, b, columns * b] -> [rows, columns]: the score of each block."""
    if pooling == "max":
        return magnitude.amax(1).unflatten(1, (-1, b)).amax(2)
    pooled = magnitude.sum(1).unflatten(1, (-1, b)).sum(2)
    return pooled.div_(b * b) if pooling == "avg" else pooled
