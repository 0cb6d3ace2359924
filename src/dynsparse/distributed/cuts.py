"""Where a matrix is cut into slabs: runs of features that hold about as many non-zeros."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from dynsparse.checks import check_integer
from dynsparse.encoding import slots_of
from dynsparse.pattern import SparsePattern
from dynsparse.typed import typed


@typed
def cut(loads: Sequence[int], parts: int) -> tuple[int, ...]:
    """Borders 0 = c_0 < c_1 < ... < c_parts = len(loads) of contiguous parts of equal load.

    The largest load of a part is as small as it can be; where that leaves a choice, each border is
    the nearest to an even share of what remains.

    Args:
        loads: of each unit, integers of at least 0.
        parts: how many; each has one unit at least.

    Raises:
        ValueError: fewer units than parts, or a load below 0.
    """
    check_integer("parts", parts, 1)
    weights = torch.as_tensor(loads, dtype=torch.int64)
    n = len(weights)
    if n < parts:
        raise ValueError(f"cannot cut {n} units into {parts} parts: give each part one at least")
    if n and int(weights.min()) < 0:
        raise ValueError(f"loads must be at least 0, got {int(weights.min())}")
    if not int(weights.sum()):
        weights = torch.ones_like(weights)
    ends = torch.cat([weights.new_zeros(1), weights.cumsum(0)])
    low, high = max(int(weights.max()), -(-int(ends[-1]) // parts)), int(ends[-1])
    while low < high:
        middle = (low + high) // 2
        if _latest(ends, parts, middle)[-1] == n:
            high = middle
        else:
            low = middle + 1
    # The same from the other end: no border may come earlier, or what follows would not fit.
    back = (ends[-1] - ends).flip(0)
    earliest = [n - border for border in reversed(_latest(back, parts, low))]
    borders = [0]
    for part in range(1, parts):
        at = borders[-1]
        share = int(ends[at]) + (int(ends[-1]) - int(ends[at])) / (parts - part + 1)
        most = min(_reach(ends, at, low), n - (parts - part))
        after = min(max(int(torch.searchsorted(ends, share)), at + 1), most)
        before = max(after - 1, at + 1)
        nearer = before if share - int(ends[before]) < int(ends[after]) - share else after
        borders.append(min(max(nearer, earliest[part]), most))
    return (*borders, n)


def _reach(ends: Tensor, at: int, bound: int) -> int:
    """How far a part goes from a border without exceeding the bound."""
    return int(torch.searchsorted(ends, int(ends[at]) + bound, right=True)) - 1


def _latest(ends: Tensor, parts: int, bound: int) -> list[int]:
    """The latest borders of parts that stay within the bound, each of one unit at least."""
    n = len(ends) - 1
    borders = [0]
    for part in range(1, parts + 1):
        borders.append(min(_reach(ends, borders[-1], bound), n - (parts - part)))
    return borders


def cut_features(
    written: Iterable[SparsePattern], read: Iterable[SparsePattern], parts: int, unit: int = 1
) -> tuple[int, ...]:
    """Borders of features that some layers write and others read, in features.

    Both sides have the same slabs, so that nothing moves between them. Borders lie where every
    layer's blocks end.

    Args:
        written: patterns [features, any], whose rows the features are.
        read: patterns [any, features], whose columns they are.
        parts: how many slabs.
        unit: borders are multiples of it: the size of a head, say.

    Raises:
        ValueError: too few features for so many parts.
    """
    sides = [(p, p.rows, p.shape[0]) for p in written] + [(p, p.cols, p.shape[1]) for p in read]
    features = sides[0][2]
    unit = math.lcm(unit, *(pattern.block_size for pattern, _, _ in sides))
    if features % unit or features // unit < parts:
        raise ValueError(
            f"cannot cut {features} features into {parts} slabs at multiples of {unit}: "
            "use fewer ranks along this axis, or smaller blocks"
        )
    loads = torch.zeros(features // unit, dtype=torch.int64)
    for pattern, index, _ in sides:
        b = pattern.block_size
        loads += torch.bincount(index.long() * b // unit, minlength=len(loads)) * b**2
    return tuple(border * unit for border in cut(loads.tolist(), parts))


def rectangle(
    pattern: SparsePattern, rows: tuple[int, int], cols: tuple[int, int]
) -> tuple[SparsePattern, Tensor]:
    """The part of a pattern in a slab of rows and one of columns, and the slots it comes from.

    Args:
        rows, cols: (first, behind the last) feature; multiples of the block size.

    Returns:
        The part as a pattern of its own, and its slots in the whole, int64 [part.nnz].
    """
    b = pattern.block_size
    (top, bottom), (left, right) = ((first // b, last // b) for first, last in (rows, cols))
    begin, end = int(pattern.row_ptr[top]), int(pattern.row_ptr[bottom])
    inside = (pattern.sorted_cols[begin:end] >= left) & (pattern.sorted_cols[begin:end] < right)
    slots = slots_of(inside.nonzero().flatten() + begin, pattern.slots).long()
    flat = (pattern.rows[slots].long() - top) * (right - left) + pattern.cols[slots] - left
    shape = rows[1] - rows[0], cols[1] - cols[0]
    return SparsePattern.from_flat(flat, shape=shape, block_size=b), slots
