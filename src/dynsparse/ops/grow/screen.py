"""Growth with most of the gradient computed in products of 16-bit integers only.

They take half of the time of float32, and what they are of each position never leaves the
processor's registers: two comparisons do, since the products are off by a known bound. They say of
most positions that they cannot be among the largest, of most others that they must be; for those
in between the gradient is computed in float32. The choice is that of the float32 gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dynsparse import native
from dynsparse.encoding import empty
from dynsparse.ops.grow.free_positions import positions_between
from dynsparse.ops.grow.scores import Pair
from dynsparse.ops.linear.cpu import dot_products
from dynsparse.pattern import SparsePattern

# Multiply-adds of the gradient below which what goes before and after costs more than is saved.
_WORTHWHILE = 1 << 28

# Scores for at most twice the positions that are looked for and some, and for this share of all:
# where more may be large, float32 is as fast.
MOST = 1 / 8

# Inside these bounds nothing overflows, and what underflows in products and squares stays below a
# thousandth of the threshold.
_LARGEST = 1e15
_UNDERFLOW = 1e-15


def serves(pairs: Sequence[Pair], threshold: float) -> bool:
    """Whether it pays on this processor, and the bound holds for these numbers."""
    library = native.load()
    if library is None or not library.dynsparse_grow_screens() or threshold <= 0:
        return False
    tensors = [tensor for pair in pairs for tensor in pair]
    samples = sum(len(x) for x, _ in pairs)
    if samples * pairs[0][0].shape[1] * pairs[0][1].shape[1] < _WORTHWHILE:
        return False
    if any(t.dtype != torch.float32 for t in tensors):
        return False
    largest = max(float(torch.stack(t.aminmax()).abs().max()) for t in tensors if len(t))
    return largest < _LARGEST and threshold > _UNDERFLOW * samples * largest


def screened(
    pairs: Sequence[Pair],
    pattern: SparsePattern,
    exclude: Tensor,
    k: int,
    low: float,
    high: float,
    offset: int = 0,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """All free positions whose gradient exceeds `low` in magnitude, and some more: float32 scores
    [any] and where they are, int64 [any]; and positions without scores, int64 [any]. All ascend.

    None where they are too many for this to pay.

    Args:
        pairs: (x [batch, in], dY [batch, rows]) float32 on the CPU.
        pattern: of single elements; its positions are not free.
        exclude: further positions that are not free: int64 [any], sorted.
        k: how many positions are looked for.
        low, high: 0 < low <= high. What exceeds `high` for sure needs no scores; infinity: all get
            theirs.
        offset: the row of the pattern that dY begins with.
    """
    library = native.load()
    assert library is not None
    x, dy = (
        parts[0] if len(parts) == 1 else torch.cat(parts) for parts in zip(*pairs, strict=True)
    )
    height, width = dy.shape[1], pattern.shape[1]
    excluded = positions_between(exclude, offset * width, (offset + height) * width)
    room = min(2 * k + (1 << 12), int(MOST * height * width))
    counts = torch.zeros(height + 1, dtype=torch.int32)
    cols = empty(room, dtype=torch.int32, brief=True)
    sure = empty(0 if high == torch.inf else min(k, height * width), dtype=torch.int64, brief=True)
    found = torch.zeros(2, dtype=torch.int64)
    status = library.dynsparse_grow_screen(
        x.data_ptr(),
        *x.stride(),
        dy.data_ptr(),
        *dy.stride(),
        len(x),
        height,
        width,
        pattern.row_ptr.data_ptr() + offset * pattern.row_ptr.itemsize,
        pattern.sorted_cols.data_ptr(),
        excluded.data_ptr(),
        len(excluded),
        0.999 * low,
        1.001 * high,
        counts.data_ptr() + counts.itemsize,
        cols.data_ptr(),
        room,
        sure.data_ptr(),
        len(sure),
        found.data_ptr(),
        torch.get_num_threads(),
    )
    if status == 1:
        raise MemoryError("no memory to look for the largest gradients")
    if status:
        return None
    opened, certain = found.tolist()
    cols, sure = cols[:opened], sure[:certain].add_(offset * width)
    row_ptr = counts.cumsum(0, dtype=torch.int32)
    scores = dot_products(dy, x, row_ptr, cols).abs_()
    starts = torch.arange(offset, offset + height) * width
    flat = starts.repeat_interleave(counts[1:], output_size=opened).add_(cols)
    return scores, flat, sure
