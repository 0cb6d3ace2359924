"""The k largest or smallest scores of all ranks, exactly, without sending the scores.

A radix select: in each round an all-reduce adds up histograms of the next bits of the scores that
are still candidates, and the search continues in the bin that holds the k-th. float32 takes three
rounds, float64 six, whatever the numbers. The problems of all layers of an update share each round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dynsparse._core import native
from dynsparse.pattern.index_arrays import empty, nonzero_positions
from dynsparse.ranks.ranks import Ranks

_DIGIT = 11  # bits a round: 2,048 bins, which are 8 KiB a layer


def chunk_of(ranks: Ranks, count: int) -> tuple[int, int]:
    """Return this rank's chunk [first, last) of `count` items, as `torch.chunk` divides them."""
    return chunk(count, ranks.size, ranks.rank)


def chunk(count: int, parts: int, part: int) -> tuple[int, int]:
    """Return chunk number `part` of `parts`, [first, last), of `count` items.

    Chunks are those of `torch.chunk`: of equal lengths, the last ones shorter or empty.
    """
    share = -(-count // parts)
    return min(part * share, count), min((part + 1) * share, count)


def key_bits(dtype: torch.dtype) -> int:
    """Return the number of bits of the keys of scores."""
    return 64 if dtype == torch.float64 or not dtype.is_floating_point else 32


def sorting_keys(scores: Tensor, largest: bool) -> tuple[Tensor, int]:
    """Return integers in the order of the scores, reversed unless `largest`, and their bits.

    They are signed, int32 or int64.
    """
    bits = key_bits(scores.dtype)
    if bits == 64:
        raw = (scores.double() + 0.0).view(torch.int64)  # -0.0 becomes 0.0
    else:
        if scores.is_cpu and native.load() is not None:
            scores = scores.detach().float().contiguous()
            keys = empty(len(scores), dtype=torch.int32, brief=True)
            native.call("dynsparse_rank_keys", scores, len(scores), largest, keys)
            return keys, bits
        raw = (scores.float() + 0.0).view(torch.int32)
    # Larger bits mean a smaller negative number: invert all of its bits but the sign.
    keys = (raw >> (bits - 1)).bitwise_and_((1 << (bits - 1)) - 1).bitwise_xor_(raw)
    return (keys if largest else keys.bitwise_not_()), bits


class _Digits(NamedTuple):
    """The digit of each key from bit `shift` on, and a histogram of the digits."""

    keys: Tensor
    shift: int
    bits: int
    counts: Tensor
    digits: Tensor | None  # None: the compiled kernels compute them from the keys

    def select(self, digit: int) -> Tensor:
        """Return the keys with this digit."""
        if self.digits is not None:
            return self.keys[(self.digits == digit).nonzero().flatten()]
        selected = empty(int(self.counts[digit]), dtype=torch.int32)
        native.call(
            "dynsparse_rank_narrow",
            *(self.keys, len(self.keys), self.shift, self.bits, digit, selected, len(selected)),
        )
        return selected


def _compute_digits(keys: Tensor, shift: int, bits: int, *, first: bool) -> _Digits:
    """Compute the digits of `bits` bits, at most 11, from bit `shift` on.

    The first digits, with the sign, are offset so that they ascend with the keys.
    """
    bins = 1 << bits
    top = first and shift + bits == 32
    narrow = keys.is_cpu and keys.dtype == torch.int32
    if narrow and (top or not first) and native.load() is not None:
        keys = keys.contiguous()
        counts = torch.empty(bins, dtype=torch.int32, device="cpu")
        native.call("dynsparse_rank_digits", keys, len(keys), shift, bits, counts)
        return _Digits(keys, shift, bits, counts, None)
    digits = keys >> shift
    digits = digits.add_(bins // 2) if first else digits.bitwise_and_(bins - 1)
    return _Digits(keys, shift, bits, torch.bincount(digits, minlength=bins), digits)


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
    """Select for each problem this rank's scores among the `count` largest of all ranks.

    Among equal scores the smaller positions win, as in `ops.grow.select`.

    Args:
        scores: for each problem this rank's scores [n], real and without NaN.
        positions: for each problem the positions of the scores, int64 [n], or the first position if
            they are consecutive; no position is on two ranks.
        counts: for each problem the number to select, the same on all ranks; at most the number of
            scores on all ranks.
        largest: False selects the smallest.
        below: upper bound of all positions, the same on all ranks; a small one sends less.
        bits: the widest keys of all ranks (`key_bits`), if known; it saves a collective.

    Returns:
        bool [n] for each problem.
    """
    keys = [sorting_keys(s, largest) for s in scores]
    if not keys:
        return []
    if bits is None:
        widest = torch.tensor([max(width for _, width in keys)], device=ranks.device)
        bits = int(ranks.max(widest))  # a rank without samples may have other types
    aligned = [key if width == bits else key.long() << (bits - width) for key, width in keys]
    last, left, equal = kth_over_ranks(ranks, aligned, counts, bits, most=below)
    with_ties = [i for i in range(len(keys)) if left[i] < equal[i]]
    chosen = [
        key > end if i in with_ties else key >= end
        for i, (key, end) in enumerate(zip(aligned, last, strict=True))
    ]
    if with_ties:
        # Among equal scores smaller positions win: search once more, among these.
        tied = [aligned[i] == last[i] for i in with_ties]
        negated = [
            -masked_positions(positions[i], mask).to(mask.device)
            for i, mask in zip(with_ties, tied, strict=True)
        ]
        missing = [left[i] for i in with_ties]
        ends, _, _ = kth_over_ranks(ranks, negated, missing, below.bit_length() + 1, most=below)
        for i, mask, key, end in zip(with_ties, tied, negated, ends, strict=True):
            chosen[i][mask.nonzero().flatten()[key >= end]] = True
    return chosen


def masked_positions(positions: Tensor | int, chosen: Tensor) -> Tensor:
    """Return the positions of the scores in a mask, int64 [any].

    Args:
        positions: of all scores, as for `select_over_ranks`.
        chosen: the mask, bool [n].
    """
    if isinstance(positions, int):
        return nonzero_positions(chosen, positions)
    return positions[nonzero_positions(chosen)]


def kth_over_ranks(
    ranks: Ranks, keys: Sequence[Tensor], counts: Sequence[int], bits: int, most: int = 2**62
) -> tuple[list[int], list[int], list[int]]:
    """Find for each problem the count-th largest key of all ranks.

    Args:
        keys: for each problem this rank's keys, signed, int32 or int64 [n].
        counts: the count of each problem; 0 gives a key larger than that of any number.
        bits: number of bits of the keys, at most 64.
        most: upper bound of the number of keys of a problem on all ranks.

    Returns:
        For each problem the key; how many of the keys equal to it are among the `count` largest;
        and how many keys are equal to it.

    Raises:
        ValueError: `count` is larger than the number of keys.
    """
    prefix, left, equal = [0] * len(keys), list(counts), [0] * len(keys)
    live, done = list(keys), 0
    while done < bits:
        step = min(_DIGIT, bits - done)
        shift, bins = bits - done - step, 1 << step
        parts = [_compute_digits(key, shift, step, first=not done) for key in live]
        counted = [part.counts.to(ranks.device) for part in parts]
        table = ranks.sum(torch.stack(counted).to(torch.int32 if most < 2**31 else torch.int64))
        above = table.flip(1).cumsum(1, dtype=torch.int64)  # above[b]: in the b + 1 highest bins
        if not done:
            _check_enough(counts, above[:, -1].tolist())
        missing = torch.tensor(left, device=above.device).clamp_(min=1)
        chosen = torch.searchsorted(above, missing[:, None]).flatten().clamp_(max=bins - 1)
        reached = above.gather(1, chosen[:, None]).flatten().tolist()
        in_bin = table.flip(1).gather(1, chosen[:, None]).flatten().tolist()
        for i, flipped in enumerate(chosen.tolist()):
            digit = bins - 1 - flipped
            prefix[i] = (prefix[i] << step) | digit
            left[i] -= reached[i] - in_bin[i] if left[i] else 0
            equal[i] = in_bin[i]
            live[i] = parts[i].select(digit)
        done += step
    half = 1 << (bits - 1)
    last = [key - half for key in prefix]
    for i, count in enumerate(counts):
        if count == 0:
            last[i], left[i], equal[i] = half - 1, 0, 0
    return last, left, equal


def _check_enough(counts: Sequence[int], totals: Sequence[int]) -> None:
    for count, total in zip(counts, totals, strict=True):
        if count > total:
            raise ValueError(f"cannot select {count} of {total} scores")


def gather_sorted(ranks: Ranks, parts: Sequence[Tensor], limits: Sequence[int]) -> list[Tensor]:
    """Return for each problem the numbers of all ranks, ascending, int64 on the CPU.

    Dense numbers are sent as bit masks.

    Args:
        parts: for each problem this rank's numbers, ascending, non-negative, int64 [any].
        limits: for each problem an upper bound of the numbers.
    """
    if ranks.alone:
        return [part.cpu() for part in parts]
    small = max(limits, default=0) < 2**31
    shapes = [[len(p), int(p[0]), int(p[-1]) + 1] if len(p) else [0, 0, 0] for p in parts]
    sent = torch.tensor(shapes, device=ranks.device).view(-1)
    by_rank = [
        [_Run(size, first, end, small) for size, first, end in table.view(-1, 3).tolist()]
        for table in ranks.all_gather(sent, [len(sent)] * ranks.size)
    ]
    packed = [run.pack(p) for run, p in zip(by_rank[ranks.rank], parts, strict=True)]
    sizes = [[run.bytes for run in runs] for runs in by_rank]
    lines = ranks.all_gather(torch.cat([p.to(ranks.device) for p in packed]), [*map(sum, sizes)])
    pieces = [line.cpu().split(size) for line, size in zip(lines, sizes, strict=True)]
    return [
        _concatenate([runs[i] for runs in by_rank], [piece[i] for piece in pieces])
        for i in range(len(parts))
    ]


class _Run(NamedTuple):
    """Ascending numbers of one rank in [first, end), and how they are sent."""

    size: int
    first: int
    end: int
    small: bool

    @property
    def is_mask(self) -> bool:
        return self.end - self.first < 32 * self.size

    @property
    def bytes(self) -> int:
        if self.is_mask:
            return -(-(self.end - self.first) // 8)
        return self.size * (4 if self.small else 8)

    def pack(self, numbers: Tensor) -> Tensor:
        """Return the numbers as they are sent, uint8 [bytes]."""
        if not self.is_mask:
            return numbers.to(torch.int32 if self.small else torch.int64).view(torch.uint8)
        mask = np.zeros(self.end - self.first, np.uint8)
        mask[(numbers - self.first).cpu().numpy()] = 1
        return torch.from_numpy(np.packbits(mask, bitorder="little"))

    def unpack(self, packed: Tensor, out: Tensor) -> None:
        if not self.is_mask:
            dtype = torch.int32 if self.small else torch.int64
            out.copy_(packed.clone().view(dtype))
            return
        mask = torch.from_numpy(np.unpackbits(packed.numpy(), bitorder="little"))
        nonzero_positions(mask.view(torch.bool), self.first, out)


def _concatenate(runs: Sequence[_Run], packed: Sequence[Tensor]) -> Tensor:
    sizes = [run.size for run in runs]
    numbers = empty(sum(sizes), dtype=torch.int64, brief=True)
    for run, piece, out in zip(runs, packed, numbers.split(sizes), strict=True):
        run.unpack(piece, out)
    numbers.numpy().sort(kind="stable")  # merges ascending runs, in linear time
    return numbers
