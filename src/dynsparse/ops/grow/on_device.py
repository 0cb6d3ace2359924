"""Growth where x and dY lie on a device: sizes known beforehand, nothing waits for the device.

The dense gradient is made a panel of rows at a time and ranked against the best so far, as on the
CPU, but the panels are ranked whole: how many scores exceed a threshold the host cannot know. Where
the Triton kernel runs, the scores of blocks are computed without the gradient, and a panel is of
scores.
Scores are ranked with their places, so that the result is exact, the same on every run, and among
equal scores the smaller position wins.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dynsparse.ops.conv.patches import are_patches, matrices
from dynsparse.ops.grow.cuda import block_scores
from dynsparse.ops.grow.scores import Pair
from dynsparse.ops.linear.cuda.dense import has_accumulators
from dynsparse.pattern import SparsePattern

# Of the gradient. Smaller ones leave multiprocessors idle; this and the keys of its scores stay in
# the L2 cache of a large GPU.
PANEL_BYTES = 16 << 20

_LAST = 0xFFFFFFFF
_IN_A_KEY = (torch.float32, torch.bfloat16, torch.float16)


def best(scores: Tensor, k: int, largest: bool = True) -> Tensor:
    """The positions of the `k` largest (or smallest) of `scores` [n], ascending, int64 [k].

    As `selection.select`. What it does with NaN is open, but it is the same on every run.
    """
    if scores.dtype not in _IN_A_KEY or len(scores) > _LAST:
        order = scores.sort(descending=largest, stable=True).indices
        return order.narrow(0, 0, k).sort().values
    # Keys of the score's bits and, below them, of its place. Zero has one sign only; of negative
    # numbers the smaller has the larger bits.
    bits = (scores.float() + 0.0).view(torch.int32)
    bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long() << 32
    place = torch.arange(len(scores), device=scores.device)
    keys = bits | (_LAST - place if largest else place)
    place = torch.topk(keys, k, largest=largest, sorted=False).values & _LAST
    return (_LAST - place if largest else place).sort().values


def best_outside(
    pairs: Sequence[Pair],
    pattern: SparsePattern,
    k: int,
    pooling: str,
    exclude: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The positions of largest |sum over pairs of dY^T X| outside the pattern, int64 [k], sorted,
    and their scores: see `topk.topk_outside`, whose arguments these are, all of them checked.

    Args:
        dtype: of the scores, float32 or float64.
    """
    device, x_is_matrix = pairs[0][0].device, pairs[0][0].dim() == 2
    (height, width), b = pattern.grid, pattern.block_size
    held = pattern._flat_on(device)
    if len(exclude):
        held = torch.cat([held, exclude.to(device)])
    pooled = dtype is torch.float32 and x_is_matrix and block_scores.serves(pairs, b)
    rows = max(1, PANEL_BYTES // (dtype.itemsize * width * (1 if pooled else b * b)))
    room = torch.empty(min(rows, height) * width + 1, dtype=dtype, device=device)
    flat = torch.empty(0, dtype=torch.int64, device=device)
    found = torch.empty(0, dtype=dtype, device=device)
    for first in range(0, height, rows):
        count = min(rows, height - first)
        begin, size = first * width, count * width
        panel = room.narrow(0, 0, size)
        if pooled:
            part = [(x, dy.narrow(1, first * b, count * b)) for x, dy in pairs]
            panel.copy_(block_scores.block_scores(part, b, pooling).view(-1))
        else:
            _score(pairs, first * b, count * b, b, pooling, panel)
        # What is held is no candidate; held positions of other panels go to a place behind.
        places = held - begin
        places = torch.where((places >= 0) & (places < size), places, size)
        room.narrow(0, 0, size + 1).index_fill_(0, places, -1.0)
        found = torch.cat([found, panel])
        flat = torch.cat([flat, torch.arange(begin, begin + size, device=device)])
        keep = best(found, min(k, len(found)))
        found, flat = found.index_select(0, keep), flat.index_select(0, keep)
    return flat, found


def _score(
    pairs: Sequence[Pair], first: int, count: int, b: int, pooling: str, out: Tensor
) -> None:
    """The scores of `count` rows of the gradient from `first` on, into `out`."""
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
    """left @ right, accumulated and returned in `dtype`."""
    if left.dtype is right.dtype and dtype is torch.float32 and has_accumulators(left):
        return torch.mm(left, right, out_dtype=dtype)
    return left.to(dtype) @ right.to(dtype)
