"""The k largest or smallest scores of all ranks, exactly, while no rank sees another's scores.

A radix select: in each round the ranks add up a histogram of the next bits of the scores that are
still in question, and go on with the bin that holds the k-th. Three rounds settle float32, six
float64, whatever the numbers. The problems of all layers of an update share each round.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dynsparse.encoding import empty, set_places
from dynsparse.ranks.keys import (
    digits_of,
    packed_bits,
    sorting_keys,
    unpack_bits,
)
from dynsparse.ranks.ranks import Ranks

_DIGIT = 11  # bits a round: 2,048 bins, which are 8 KiB a layer


def chunk_of(ranks: Ranks, count: int) -> tuple[int, int]:
    """The part [first, last) of `count` things that is this rank's own: as `torch.chunk` cuts."""
    return chunk(count, ranks.size, ranks.rank)


def chunk(count: int, parts: int, part: int) -> tuple[int, int]:
    """One of `parts` parts [first, last) of `count` things, as `torch.chunk` cuts: even, the last
    ones shorter or empty."""
    share = -(-count // parts)
    return min(part * share, count), min((part + 1) * share, count)


def select_over_ranks(
    ranks: Ranks,
    scores: Sequence[Tensor],
    positions: Sequence[Tensor | int],
    counts: Sequence[int],
    *,
    largest: bool = True,
    below: int = 2**62,
    bits: int | None = None,
) -> list[Tensor]:
    """For each problem, which of this rank's scores are among the `count` largest of all ranks.

    Among equal scores the smaller positions win, as in `ops.grow.select`.

    Args:
        scores: for each problem the real numbers [n] of this rank, without NaN.
        positions: for each problem where these are, int64 [n], or the first where they are in a
            row; no position is on two ranks.
        counts: for each problem how many are chosen, the same on all ranks; at most as many as all
            ranks have.
        largest: False chooses the smallest.
        below: what no position reaches, the same on all ranks; small ones spare bytes and moves.
        bits: of the widest keys of all ranks (`key_bits`), where it is known; it spares a move.

    Returns:
        bool [n] for each problem.
    """
    keys = [sorting_keys(s, largest) for s in scores]
    if not keys:
        return []
    if bits is None:
        widest = torch.tensor([max(own for _, own in keys)], device=ranks.device)
        bits = int(ranks.max(widest))  # a rank without samples may not know
    aligned = [key if own == bits else key.long() << (bits - own) for key, own in keys]
    last, left, equal = kth_over_ranks(ranks, aligned, counts, bits, most=below)
    open_ = [i for i in range(len(keys)) if left[i] < equal[i]]
    chosen = [
        key > end if i in open_ else key >= end
        for i, (key, end) in enumerate(zip(aligned, last, strict=True))
    ]
    if open_:
        # Smaller positions win: the same search once more.
        tied = [aligned[i] == last[i] for i in open_]
        own = [
            -masked_positions(positions[i], mask).to(mask.device)
            for i, mask in zip(open_, tied, strict=True)
        ]
        wanted = [left[i] for i in open_]
        ends, _, _ = kth_over_ranks(ranks, own, wanted, below.bit_length() + 1, most=below)
        for i, mask, key, end in zip(open_, tied, own, ends, strict=True):
            chosen[i][mask.nonzero().flatten()[key >= end]] = True
    return chosen


def masked_positions(positions: Tensor | int, chosen: Tensor) -> Tensor:
    """Where the chosen ones of some scores are: int64 [any].

    Args:
        positions: of all of them, as `select_over_ranks` takes them.
        chosen: bool [n].
    """
    if isinstance(positions, int):
        return set_places(chosen, positions)
    return positions[set_places(chosen)]


def kth_over_ranks(
    ranks: Ranks, keys: Sequence[Tensor], counts: Sequence[int], bits: int, most: int = 2**62
) -> tuple[list[int], list[int], list[int]]:
    """For each problem the count-th largest key of all ranks, how many equal to it belong to the
    `count` largest, and how many equal to it there are.

    Args:
        keys: for each problem int32 or int64 [n], signed numbers of so many bits, on this rank.
        counts: for each problem; 0 gives a key larger than any of a number.
        bits: of the keys, at most 64.
        most: no problem has more keys on all ranks together.

    Raises:
        ValueError: more are asked for than there are.
    """
    prefix, left, equal = [0] * len(keys), list(counts), [0] * len(keys)
    live, done = list(keys), 0
    while done < bits:
        step = min(_DIGIT, bits - done)
        shift, bins = bits - done - step, 1 << step
        parts = [digits_of(key, shift, step, first=not done) for key in live]
        counted = [part.counts.to(ranks.device) for part in parts]
        table = ranks.sum(torch.stack(counted).to(torch.int32 if most < 2**31 else torch.int64))
        above = table.flip(1).cumsum(1, dtype=torch.int64)  # above[b]: in the b + 1 highest bins
        if not done:
            _check_enough(counts, above[:, -1].tolist())
        wanted = torch.tensor(left, device=above.device).clamp_(min=1)
        places = torch.searchsorted(above, wanted[:, None]).flatten().clamp_(max=bins - 1)
        found = above.gather(1, places[:, None]).flatten().tolist()
        held = table.flip(1).gather(1, places[:, None]).flatten().tolist()
        for i, place in enumerate(places.tolist()):
            digit = bins - 1 - place
            prefix[i] = (prefix[i] << step) | digit
            left[i] -= found[i] - held[i] if left[i] else 0
            equal[i] = held[i]
            live[i] = parts[i].alike(digit)
        done += step
    half = 1 << (bits - 1)
    last = [key - half for key in prefix]
    for i, count in enumerate(counts):
        if count == 0:
            last[i], left[i], equal[i] = half - 1, 0, 0
    return last, left, equal


def _check_enough(counts: Sequence[int], there: Sequence[int]) -> None:
    for count, total in zip(counts, there, strict=True):
        if count > total:
            raise ValueError(f"cannot select {count} of {total} scores")


def gather_sorted(ranks: Ranks, parts: Sequence[Tensor], limits: Sequence[int]) -> list[Tensor]:
    """For each problem the numbers of all ranks, ascending, int64 on the CPU.

    Numbers that lie close together travel as bits.

    Args:
        parts: for each problem the numbers of this rank, ascending, int64 [any] from 0 on.
        limits: for each problem what no number reaches.
    """
    if ranks.alone:
        return [part.cpu() for part in parts]
    small = max(limits, default=0) < 2**31
    own = [[len(p), int(p[0]), int(p[-1]) + 1] if len(p) else [0, 0, 0] for p in parts]
    ends = torch.tensor(own, device=ranks.device).view(-1)
    of_ranks = [
        [_Stretch(many, first, end, small) for many, first, end in one.view(-1, 3).tolist()]
        for one in ranks.all_gather(ends, [len(ends)] * ranks.size)
    ]
    packed = [one.packed(p) for one, p in zip(of_ranks[ranks.rank], parts, strict=True)]
    sizes = [[one.bytes for one in stretches] for stretches in of_ranks]
    lines = ranks.all_gather(torch.cat([p.to(ranks.device) for p in packed]), [*map(sum, sizes)])
    pieces = [line.cpu().split(size) for line, size in zip(lines, sizes, strict=True)]
    return [
        _in_order([of[i] for of in of_ranks], [piece[i] for piece in pieces])
        for i in range(len(parts))
    ]


class _Stretch(NamedTuple):
    """Ascending numbers of one rank, and how they travel."""

    many: int
    first: int
    end: int
    small: bool

    @property
    def in_bits(self) -> bool:
        return self.end - self.first < 32 * self.many

    @property
    def bytes(self) -> int:
        if self.in_bits:
            return -(-(self.end - self.first) // 8)
        return self.many * (4 if self.small else 8)

    def packed(self, numbers: Tensor) -> Tensor:
        """uint8 [bytes]"""
        if not self.in_bits:
            return numbers.to(torch.int32 if self.small else torch.int64).view(torch.uint8)
        return packed_bits(numbers, self.first, self.end)

    def unpack(self, packed: Tensor, to: Tensor) -> None:
        if not self.in_bits:
            wide = torch.int32 if self.small else torch.int64
            to.copy_(packed.clone().view(wide))
            return
        unpack_bits(packed, self.first, to)


def _in_order(stretches: Sequence[_Stretch], packed: Sequence[Tensor]) -> Tensor:
    sizes = [one.many for one in stretches]
    numbers = empty(sum(sizes), dtype=torch.int64, brief=True)
    for one, piece, to in zip(stretches, packed, numbers.split(sizes), strict=True):
        one.unpack(piece, to)
    some = [one for one in stretches if one.many]
    apart = all(one.end <= other.first for one, other in itertools.pairwise(some))
    # Sorted already where each rank has a stretch of its own.
    return numbers if apart else numbers.sort().values
