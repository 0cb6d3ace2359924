"""Growth over ranks: the best positions for the gradient of all samples, which no rank ever holds.

The gradient is the sum over ranks of dY^T X, and a rank holds its own samples. Each rank looks
after a slab of block rows. Either pieces of the ranks' gradients travel to the owner of their rows,
or x travels to all and the columns of dY to the owner, whichever sends less. The owner adds up in
the order of ranks, keeps its best, and a selection over ranks says which of them join. No [out, in]
matrix exists anywhere, and what is chosen is what one process with all samples chooses.

Source: Evci et al. 2020, "Rigging the Lottery", section 3 (the rule); the exchange is this
library's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dynsparse import native
from dynsparse.ops.conv.patches import are_patches, samples_of
from dynsparse.ops.grow.best import Best
from dynsparse.ops.grow.free_positions import check_free_positions
from dynsparse.ops.grow.in_rows import RowSearch
from dynsparse.ops.grow.scores import add_slabs, pool
from dynsparse.ops.grow.topk import check_pairs, check_pooling
from dynsparse.ranks.agree import agreeing, held_back
from dynsparse.ranks.band import Band, settle
from dynsparse.ranks.exchanged import exchanged_bytes
from dynsparse.ranks.ranks import Ranks
from dynsparse.ranks.select import chunk_of, joined, places, select_over_ranks
from dynsparse.ranks.wanted import GrowthWanted

__all__ = ["topk_over_ranks"]

# Of one round of the exchange, all pieces that a rank sends together.
CHUNK_BYTES = 8 << 20


def topk_over_ranks(
    ranks: Ranks,
    wanted: Sequence[GrowthWanted],
    *,
    pooling: str = "sum",
    wire: torch.dtype | None = None,
    exchange: str | None = None,
) -> list[Tensor]:
    """For each layer the `count` positions of largest |sum over ranks and pairs of dY^T X| that are
    not in its pattern: flat block positions, ascending, int64 [count] on the CPU, on every rank.

    Equal scores: the smaller position first, as in `ops.grow.topk_outside`.

    Of a layer in rectangles the positions are those in the rectangle of this rank, as many as fall
    into it: `ranks` are those with other samples for the same rectangle, and all ranks of the mesh
    rank together.

    Args:
        pooling: see `topk_outside`.
        wire: torch.bfloat16 sends pieces of the gradient at half the bytes; what their rounding
            leaves open is scored anew from the samples, so that the choice stays exact.
        exchange: "pieces" or "samples"; whichever sends less when left out. Of convolutions pieces.

    Raises:
        ValueError, TypeError: as `topk_outside`, the same line on every rank.
    """
    pooling = check_pooling(pooling)
    jobs: list[_Job] = []
    with agreeing(ranks):
        if wire not in (None, torch.bfloat16):
            raise ValueError(f"wire must be None or torch.bfloat16, got {wire}")
        if exchange not in (None, "pieces", "samples"):
            raise ValueError(f'exchange must be "pieces" or "samples", got {exchange!r}')
        if wire is not None and any(one.part for one in wanted):
            raise ValueError(
                "wire is for whole layers: leave it out where layers are in rectangles"
            )
        jobs = [_Job(one, ranks) for one in wanted]
    _learn(ranks, jobs)
    with agreeing(ranks):
        for job in jobs:
            job.check_pairs_there()
    for job in jobs:
        pieces, samples = exchanged_bytes(
            ranks.size, job.pattern.shape, job.samples, job.wide, wire
        )
        by_samples = samples < pieces if exchange is None else exchange == "samples"
        job.by_samples = by_samples and not job.convolved
        job.rounded = wire is not None and not job.by_samples and job.dtype == torch.float32
        job.rounded &= not job.convolved
    busy = [job for job in jobs if job.count]
    failed = held_back()
    with failed:
        for job in busy:
            if not job.by_samples:
                job.begin()
    _by_samples(ranks, [job for job in busy if job.by_samples], pooling, failed)
    _by_pieces(ranks, [job for job in busy if not job.by_samples], pooling, failed)
    with agreeing(ranks):
        failed.raise_here()
    rounded = [job for job in busy if job.rounded]
    settle(ranks, [job.band for job in rounded], [job.pairs for job in rounded], pooling)
    for job in busy:
        job.end()
    return _chosen(ranks, jobs)


class _Job:
    """One layer on the way to its positions, on this rank."""

    best: Best
    band: Band
    found: tuple[Tensor, Tensor]  # scores and positions of this rank's slab, ready to be ranked
    samples: int  # of all ranks
    dtype: torch.dtype  # in which gradients are added up
    wide: torch.dtype  # in which samples travel
    by_samples: bool
    rounded: bool
    reached: bool  # by a backward pass, on any rank
    convolved: bool

    def __init__(self, wanted: GrowthWanted, ranks: Ranks) -> None:
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
        self.found = none.float(), none

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
            self.band = Band(self.pattern, self.exclude, self.count, self.device)
        else:
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
        share = -(-self.pattern.grid[0] // ranks.size)
        rows = self._rows(ranks.size)
        for begin in range(0, share, rows):
            yield begin, min(begin + rows, share)

    def slabs(self, ranks: Ranks, begin: int, end: int) -> list[tuple[int, int]]:
        """These block rows of the slab of each rank, as rows of the matrix."""
        height = self.pattern.grid[0]
        share = -(-height // ranks.size)
        return [
            (min(owner * share + begin, height), min(owner * share + end, height))
            for owner in range(ranks.size)
        ]

    def add(self, grad: Tensor, first: int, pooling: str) -> None:
        """Take in the gradient [rows * b, in] of block rows from `first` on; it is overwritten."""
        b = self.pattern.block_size
        scores = grad if b == 1 else pool(grad.abs_(), pooling, b)
        self.best.add(scores, self.pattern, self.exclude, first)

    def end(self) -> None:
        """All pieces have come."""
        if self.rounded:
            self.found = self.band.scores, self.band.flat
        elif not self.by_samples:
            self.best.compact()
            self.found = self.best.scores[: self.best.count], self.best.flat[: self.best.count]


def _learn(ranks: Ranks, jobs: Sequence[_Job]) -> None:
    """What all ranks must know of every layer: how many samples there are, and of which type."""
    facts = torch.zeros(len(jobs), 5, dtype=torch.int64)
    for i, job in enumerate(jobs):
        types = [tensor.dtype for pair in job.pairs for tensor in pair]
        facts[i, 0] = job.held
        facts[i, 1] = sum(t != torch.bfloat16 for t in types)
        facts[i, 2] = sum(t == torch.float64 for t in types)
        facts[i, 3] = len(job.pairs)
        facts[i, 4] = sum(are_patches(*pair) for pair in job.pairs)
    table = ranks.sum(facts.to(ranks.device)).tolist() if jobs else []
    for job, (samples, unlike, double, pairs, convolved) in zip(jobs, table, strict=True):
        job.samples = samples
        job.dtype = torch.float64 if double else torch.float32
        job.wide = job.dtype if unlike else torch.bfloat16
        job.reached, job.convolved = pairs > 0, convolved > 0


def _by_pieces(ranks: Ranks, jobs: Sequence[_Job], pooling: str, failed: held_back) -> None:
    """Pieces of the gradient go to the owners of their rows, as many layers in one round as fit."""
    parts: list[tuple[_Job, int, int]] = []
    size = 0
    for job in jobs:
        for begin, end in job.rounds(ranks):
            more = (end - begin) * job.pattern.block_size * job.pattern.shape[1]
            more *= ranks.size * job.dtype.itemsize
            if parts and (size + more > CHUNK_BYTES or _wire(parts[0][0]) != _wire(job)):
                _round(ranks, parts, pooling, failed)
                parts, size = [], 0
            parts.append((job, begin, end))
            size += more
    if parts:
        _round(ranks, parts, pooling, failed)


def _wire(job: _Job) -> tuple[torch.dtype, torch.device]:
    return torch.bfloat16 if job.rounded else job.dtype, job.device


def _round(
    ranks: Ranks, parts: Sequence[tuple[_Job, int, int]], pooling: str, failed: held_back
) -> None:
    """One exchange: of each part, the gradient of these rows of all slabs."""
    wire, device = _wire(parts[0][0])
    slabs = [job.slabs(ranks, begin, end) for job, begin, end in parts]
    # How many numbers of each part go to each owner.
    numbers = [
        [_numbers(job, last - first) for first, last in to_each]
        for (job, _, _), to_each in zip(parts, slabs, strict=True)
    ]
    sizes = [sum(of_part[owner] for of_part in numbers) for owner in range(ranks.size)]
    sent = torch.zeros(sum(sizes), dtype=wire, device=device)
    with failed:
        made = [_local(job, s, wire) for (job, _, _), s in zip(parts, slabs, strict=True)]
        if len(made) == 1:
            sent = made[0]
        else:
            to_owners = [one.split(of) for one, of in zip(made, numbers, strict=True)]
            torch.cat([of[owner] for owner in range(ranks.size) for of in to_owners], out=sent)
    own = sizes[ranks.rank]
    got = ranks.exchange(sent, sizes, [own] * ranks.size).view(ranks.size, own)
    with failed:
        at = 0
        for (job, _, _), to_each, of_part in zip(parts, slabs, numbers, strict=True):
            piece = got[:, at : at + of_part[ranks.rank]]
            at += of_part[ranks.rank]
            if piece.numel():
                _take_in(job, piece, *to_each[ranks.rank], pooling)


def _numbers(job: _Job, block_rows: int) -> int:
    """How many numbers on the wire hold the gradient of so many block rows."""
    rows = block_rows * job.pattern.block_size
    # Rounded pieces are followed by the largest error of each row, a float32 in the place of two.
    return rows * (job.pattern.shape[1] + 2 * job.rounded)


def _local(job: _Job, slabs: Sequence[tuple[int, int]], wire: torch.dtype) -> Tensor:
    """This rank's gradient of these block rows, slab after slab, as it is sent: [any]."""
    width = job.pattern.shape[1]
    rows = [(f * job.pattern.block_size, s * job.pattern.block_size) for f, s in slabs]
    ends = [end - begin for begin, end in rows]
    grad = torch.zeros(sum(ends), width, dtype=job.dtype, device=job.device)
    add_slabs(grad, job.pairs, rows)
    if not job.rounded:
        return grad.view(-1)
    low = grad.to(wire)
    worst = (grad - low.float()).abs_().amax(1) if width else grad.new_zeros(len(grad))
    return torch.cat(
        [
            part
            for piece, error in zip(low.split(ends), worst.split(ends), strict=True)
            for part in (piece.reshape(-1), error.contiguous().view(wire))
        ]
    )


def _take_in(job: _Job, pieces: Tensor, first: int, last: int, pooling: str) -> None:
    """The pieces [ranks, any] of block rows that are this rank's own."""
    b, width = job.pattern.block_size, job.pattern.shape[1]
    rows = (last - first) * b
    grad = pieces[0, : rows * width].to(job.dtype, copy=True)
    for piece in pieces[1:]:
        grad += piece[: rows * width].to(job.dtype)
    grad = grad.view(rows, width)
    if job.rounded:
        errors = torch.zeros(rows, device=grad.device)
        for piece in pieces:
            errors += piece[rows * width :].clone().view(torch.float32)
        job.band.add(grad, errors, len(pieces), first, pooling)
    else:
        job.add(grad, first, pooling)


def _by_samples(ranks: Ranks, jobs: Sequence[_Job], pooling: str, failed: held_back) -> None:
    """x goes to all ranks, the columns of dY to the owners of their rows."""
    if not jobs:
        return
    own = torch.tensor([job.held for job in jobs], device=ranks.device)
    counts = torch.stack(ranks.gather(own, [len(jobs)] * ranks.size)).tolist()
    held = [[of_rank[i] for of_rank in counts] for i in range(len(jobs))]
    long = [i for i, job in enumerate(jobs) if RowSearch.is_long(job.pattern, job.dtype)]
    for i, job in enumerate(jobs):
        _search(ranks, job, held[i], pooling, failed, guess=i in long)
    if not long:
        return
    there = torch.tensor([len(jobs[i].found[1]) for i in long], device=ranks.device)
    total = ranks.sum(there).tolist()
    for i, count in zip(long, total, strict=True):
        if count < jobs[i].count:  # too high a guess is mended by a second pass without one
            _search(ranks, jobs[i], held[i], pooling, failed, guess=False)


def _search(
    ranks: Ranks, job: _Job, held: Sequence[int], pooling: str, failed: held_back, *, guess: bool
) -> None:
    """The best of this rank's slab; `held` says how many samples the ranks have."""
    (out, in_), b = job.pattern.shape, job.pattern.block_size
    x = torch.zeros(held[ranks.rank], in_, dtype=job.wide, device=job.device)
    dy = torch.zeros(out * held[ranks.rank], dtype=job.wide, device=job.device)
    share = -(-job.pattern.grid[0] // ranks.size)
    slabs = [(f * b, s * b) for f, s in job.slabs(ranks, 0, share)]
    with failed:
        if job.pairs:
            torch.cat([pair[0].to(job.wide) for pair in job.pairs], out=x)
            whole = torch.cat([pair[1].to(job.wide) for pair in job.pairs])
            torch.cat([whole[:, f:s].reshape(-1) for f, s in slabs], out=dy)
    xs = torch.cat(ranks.gather(x, held))
    first, last = slabs[ranks.rank]
    sizes = [(s - f) * held[ranks.rank] for f, s in slabs]
    columns = ranks.exchange(dy, sizes, [(last - first) * h for h in held])
    search, threshold = None, torch.inf
    with failed:
        if job.most:
            pairs = [(xs, columns.view(len(xs), last - first))]
            search = RowSearch(
                pairs, job.pattern, job.exclude, pooling, job.dtype, job.first, job.last
            )
            # A share of those who join that is the slab's share of the rows.
            wanted = -(-job.count * (job.last - job.first) // job.pattern.grid[0])
            threshold = search.guess(min(wanted, job.most)) if guess else -1.0
    if guess:  # what the lowest guess lets through is enough for all
        lowest = torch.tensor([-threshold], dtype=torch.float64, device=ranks.device)
        threshold = -float(ranks.highest(lowest))
    with failed:
        if search is not None:
            job.found = search.best(job.most, threshold)


def _chosen(ranks: Ranks, jobs: Sequence[_Job]) -> list[Tensor]:
    """The winners of all slabs, known to every rank; of a rectangle, those in it."""
    found = []
    for job in jobs:
        scores, flat = job.found
        if job.part is not None:
            flat = job.part.to_whole(flat, job.pattern.block_size)
        if not ranks.leads(() if job.part is None else job.part.axes):
            scores, flat = scores[:0], flat[:0]
        found.append((scores, flat))
    flats = [flat for _, flat in found]
    totals = [_total(job) for job in jobs]
    wanted, below = [job.wanted for job in jobs], max(totals, default=0)
    try:
        masks = select_over_ranks(ranks.everyone, [s for s, _ in found], flats, wanted, below=below)
    except ValueError:  # on every rank: fewer candidates than there are free positions
        raise ValueError(
            "the gradients overflow, so positions cannot be ranked: lower the scale"
        ) from None
    winners = [places(flat, mask) for flat, mask in zip(flats, masks, strict=True)]
    known = joined(ranks.everyone, winners, totals)
    return [
        flat if job.part is None else job.part.to_part(flat, job.pattern.block_size)
        for job, flat in zip(jobs, known, strict=True)
    ]


def _total(job: _Job) -> int:
    """Positions of the whole layer."""
    out, in_ = job.pattern.shape if job.part is None else job.part.shape
    return out * in_ // job.pattern.block_size**2
