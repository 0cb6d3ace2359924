"""Growth with x and dY on a device: all sizes are known beforehand, so nothing synchronises.

The dense gradient is computed in panels of rows, which are ranked against the best so far, as on
the CPU. A panel is ranked completely, since the host does not know how many scores exceed a
threshold. Where the Triton kernel runs, scores of blocks are computed without the gradient.
Scores are ranked together with their positions, so the result is exact, the same on every run, and
among equal scores the smaller position comes first.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from dynsparse.ops.conv.patches import are_patches, matrices
from dynsparse.ops.grow.scores import Pair
from dynsparse.ops.grow.selection import select_on_device
from dynsparse.ops.linear.cuda.blocks import ensure_aligned
from dynsparse.ops.linear.cuda.chip import runs_triton
from dynsparse.ops.linear.cuda.dense import has_accumulators
from dynsparse.pattern import SparsePattern
from dynsparse.pattern.stack import PatternStack

# Size of a panel of the gradient. Smaller panels leave multiprocessors idle; this one and the keys
# of its scores stay in the L2 cache of a large GPU.
PANEL_BYTES = 16 << 20

BLOCKS = (4, 8, 16, 32, 64, 128)

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def layers_at_once(pattern: SparsePattern, dtype: torch.dtype) -> int:
    """Return how many layers like this one have all their scores fit into a panel together."""
    return max(1, PANEL_BYTES // (dtype.itemsize * pattern.total))


def topk_on_device(
    pairs: Sequence[Sequence[Pair]],
    patterns: Sequence[SparsePattern],
    k: int,
    pooling: str,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return the positions and scores of `topk.topk_outside`, by position: [layers, k].

    Arguments are checked.

    Args:
        pairs: those of every layer.
        patterns: of the layers, of equal shape, block size and number of blocks.
        dtype: the dtype of the scores, float32 or float64.
    """
    device, pattern = pairs[0][0][0].device, patterns[0]
    (height, width), b, layers = pattern.grid, pattern.block_size, len(patterns)
    occupied = PatternStack.of(patterns, device).flat
    pooled = dtype is torch.float32 and all(
        own[0][0].dim() == 2 and can_score_blocks(own, b) for own in pairs
    )
    rows = max(1, PANEL_BYTES // (dtype.itemsize * width * (1 if pooled else b * b)))
    room = torch.empty(layers, min(rows, height) * width + 1, dtype=dtype, device=device)
    flat = torch.empty(layers, 0, dtype=torch.int64, device=device)
    scores = torch.empty(layers, 0, dtype=dtype, device=device)
    for first in range(0, height, rows):
        count = min(rows, height - first)
        begin, size = first * width, count * width
        for own, panel in zip(pairs, room.narrow(1, 0, size).unbind(), strict=True):
            if pooled:
                part = [(x, dy.narrow(1, first * b, count * b)) for x, dy in own]
                panel.copy_(block_scores(part, b, pooling).view(-1))
            else:
                _score(own, first * b, count * b, b, pooling, panel)
        # Positions that are not free get -1; those of other panels go to an unused last entry.
        taken = occupied - begin
        taken = torch.where((taken >= 0) & (taken < size), taken, size)
        room.narrow(1, 0, size + 1).scatter_(1, taken, -1.0)
        positions = torch.arange(begin, begin + size, device=device).expand(layers, -1)
        scores = torch.cat([scores, room.narrow(1, 0, size)], 1)
        flat = torch.cat([flat, positions], 1)
        keep = select_on_device(scores, min(k, scores.shape[1]))
        scores, flat = scores.gather(1, keep), flat.gather(1, keep)
    return flat, scores


def _score(
    pairs: Sequence[Pair], first: int, count: int, b: int, pooling: str, out: Tensor
) -> None:
    """Write the scores of `count` rows of the gradient from `first` on to `out`."""
    gradient: Tensor | None = None
    for x, dy in pairs:
        if are_patches(x, dy):
            if gradient is None:
                gradient = x.new_zeros(count, x.shape[4:].numel(), dtype=out.dtype)
            for begin, left, right in matrices(x, dy, first, first + count):
                gradient[begin : begin + len(left)] += _product(left, right, out.dtype)
            continue
        product = _product(dy.narrow(1, first, count).t(), x, out.dtype)
        gradient = product if gradient is None else gradient.add_(product)
    assert gradient is not None
    if b == 1:
        torch.abs(gradient.view(-1), out=out)
        return
    blocks = gradient.abs_().view(count // b, b, -1, b)
    if pooling == "max":
        pooled = blocks.amax((1, 3))
    else:
        pooled = blocks.mean((1, 3)) if pooling == "avg" else blocks.sum((1, 3))
    torch.add(pooled.view(-1), 0.0, out=out)


def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Return left @ right, accumulated and returned in `dtype`."""
    if left.dtype is right.dtype and dtype is torch.float32 and has_accumulators(left):
        return torch.mm(left, right, out_dtype=dtype)
    return left.to(dtype) @ right.to(dtype)


def can_score_blocks(pairs: Sequence[Pair], b: int) -> bool:
    """Whether `block_scores` takes blocks of `b` and these pairs: no elements and no float64."""
    tensors = [tensor for pair in pairs for tensor in pair]
    return (
        b in BLOCKS
        and all(t.dtype in _DTYPES for t in tensors)
        and all(runs_triton(t.device) for t in tensors)
    )


def block_scores(pairs: Sequence[Pair], b: int, pooling: str = "sum") -> Tensor:
    """Compute |sum over pairs of dY^T X|, pooled per block, float32 [out / b, in / b], in Triton.

    Each tile of dY^T X is pooled where it is computed, so the work is that of one dense product,
    and one number per block is written. There is no host synchronisation. float32 is multiplied as
    in a layer, as three products of tf32 or as one; pairs of mixed dtypes are promoted.

    Args:
        pairs: (x [batch, in], dY [batch, out]) of every micro-batch; any strides, and batches may
            differ in size. Several pairs are read in place if their strides are equal.
        b: the block size, one of `BLOCKS`; divides both numbers of features.
        pooling: "sum", "avg" or "max" of the magnitudes in a block.

    Source: Evci et al. 2020, "Rigging the Lottery", section 3; the pooling is that of Graphcore's
    dynamic sparsity application.
    """
    from dynsparse.ops.grow import cuda

    dtype = functools.reduce(torch.promote_types, (t.dtype for pair in pairs for t in pair))
    xs = [ensure_aligned(x.to(dtype)) for x, _ in pairs]
    dys = [ensure_aligned(dy.to(dtype)) for _, dy in pairs]
    return cuda.block_scores(dys, xs, b, pooling)
