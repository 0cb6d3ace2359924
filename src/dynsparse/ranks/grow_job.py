"""How far one rank has come with the growth of one layer: see `grow.py`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dynsparse import native
from dynsparse.ops.conv.patches import samples_of
from dynsparse.ops.grow.best import Best
from dynsparse.ops.grow.free_positions import check_free_positions
from dynsparse.ops.grow.in_rows import Found
from dynsparse.ops.grow.scores import pool
from dynsparse.ops.grow.topk import check_pairs
from dynsparse.ranks.band import Band
from dynsparse.ranks.ranks import Ranks
from dynsparse.ranks.select import chunk, chunk_of
from dynsparse.ranks.wanted import GrowRequest

# Of one round of the exchange, all pieces that a rank sends together.
CHUNK_BYTES = 8 << 20


class GrowthJob:
    """One layer on the way to its positions, on this rank."""

    best: Best
    band: Band
    found: Found  # of this rank's slab
    samples: int  # of all ranks
    dtype: torch.dtype  # in which gradients are added up
    wide: torch.dtype  # in which samples travel
    by_samples: bool
    rounded: bool
    reached: bool  # by a backward pass, on any rank
    convolved: bool  # pairs are patches

    def __init__(self, wanted: GrowRequest, ranks: Ranks) -> None:
        self.name, self.pattern, self.part = wanted.name, wanted.pattern, wanted.part
        self.wanted = wanted.count  # of the whole layer
        self.pairs = list(wanted.pairs)
        try:
            count = wanted.count
            if wanted.part is not None:
                taken = 0 if wanted.exclude is None else len(wanted.exclude)
                count = min(count, wanted.pattern.total - wanted.pattern.nnz - taken)
            self.count, self.exclude = check_free_positions(wanted.pattern, count, wanted.exclude)
            if self.pairs:
                check_pairs(self.pairs, wanted.pattern)
        except (TypeError, ValueError) as error:
            raise type(error)(f"layer {self.name!r}: {error}") from error
        self.held = sum(samples_of(x) for x, _ in self.pairs)  # samples of this rank
        self.first, self.last = chunk_of(ranks, wanted.pattern.grid[0])
        self.device = self.pairs[0][0].device if self.pairs else ranks.device
        none = torch.zeros(0, dtype=torch.int64, device=self.device)
        self.found = Found.of(none.float(), none)

    @property
    def axes(self) -> tuple[str, ...]:
        """Those that the layer is spread over."""
        return () if self.part is None else self.part.axes

    @property
    def total(self) -> int:
        """Positions of the whole layer."""
        out, in_ = self.pattern.shape if self.part is None else self.part.shape
        return out * in_ // self.pattern.block_size**2

    @property
    def usual(self) -> tuple[int, int]:
        """The shape of the layer, or of its rectangles on average: the same on all ranks of a
        mesh, which take the same way."""
        if self.part is None:
            return self.pattern.shape
        out, in_ = (slab.borders[-1] // (len(slab.borders) - 1) for slab in self.part.slabs)
        return out, in_

    def check_pairs_there(self) -> None:
        """Raise ValueError where growth has nothing to look at."""
        if self.reached or not self.count:
            return
        raise ValueError(
            f"layer {self.name!r}: expected at least one pair (x, dY), got none on any rank: "
            "growth needs a backward"
        )

    def begin(self) -> None:
        """Room for the best of this rank's slab, where pieces come round by round."""
        ranked = self.device.type == "cpu" and self.dtype == torch.float32
        library = native.load() if ranked else None
        held = self.last - self.first
        if self.rounded:
            self.band = Band(self.pattern, self.exclude, self.wanted, self.device, self.total)
        elif self.count:
            room = min(self._rows(1), max(held, 1)) * self.pattern.grid[1]
            self.best = Best(max(1, self.most), room, -1.0, self.dtype, self.device, library)

    @property
    def most(self) -> int:
        """How many of this rank's slab can join: no more than it has."""
        return min(self.count, (self.last - self.first) * self.pattern.grid[1])

    def _rows(self, shares: int) -> int:
        """Block rows whose gradient, `shares` times, fits one round."""
        row = self.pattern.shape[1] * self.pattern.block_size * self.dtype.itemsize
        return max(1, CHUNK_BYTES // (shares * row))

    def rounds(self, ranks: Ranks) -> Iterator[tuple[int, int]]:
        """Which block rows of every slab one round looks at, counted from the slab's first."""
        share = self._share(ranks)
        rows = self._rows(ranks.size)
        for begin in range(0, share, rows):
            yield begin, min(begin + rows, share)

    def _share(self, ranks: Ranks) -> int:
        """Block rows of the largest slab, which is the first."""
        return chunk(self.pattern.grid[0], ranks.size, 0)[1]

    def slabs(self, ranks: Ranks, begin: int, end: int) -> list[tuple[int, int]]:
        """These block rows of the slab of each rank, as rows of the matrix."""
        slabs = [chunk(self.pattern.grid[0], ranks.size, owner) for owner in range(ranks.size)]
        return [(min(first + begin, last), min(first + end, last)) for first, last in slabs]

    def whole_slabs(self, ranks: Ranks) -> list[tuple[int, int]]:
        """All rows of the slab of each rank."""
        b = self.pattern.block_size
        return [(f * b, s * b) for f, s in self.slabs(ranks, 0, self._share(ranks))]

    def add(self, grad: Tensor, first: int, pooling: str) -> None:
        """Take in the gradient [rows * b, in] of block rows from `first` on; it is overwritten."""
        b = self.pattern.block_size
        scores = grad if b == 1 else pool(grad.abs_(), pooling, b)
        self.best.add(scores, self.pattern, self.exclude, first)

    def end(self) -> None:
        """All pieces have come."""
        if self.rounded:
            self.found = Found.of(self.band.scores, self.band.flat)
        elif not self.by_samples:
            self.best.compact()
            count = self.best.count
            self.found = Found.of(self.best.scores[:count], self.best.flat[:count])
