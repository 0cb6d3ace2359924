"""Growth over ranks: the best positions for the gradient of all samples, which no rank ever holds.

The gradient is the sum over ranks of dY^T X, where each rank holds its own samples. Each rank owns
a range of block rows. Either every rank sends its part of the gradient to the owners of the rows
(by gradients), or x goes to all ranks and the columns of dY to the owners (by samples), whichever
sends less. The owner adds up in the order of ranks and keeps its best positions, and a selection
over ranks decides which of them join. No [out, in] matrix exists anywhere, and the result is that
of one process with all samples.

Source: Evci et al. 2020, "Rigging the Lottery", section 3 (the rule); the communication is this
library's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dynsparse.ops.conv.patches import are_patches, samples_of
from dynsparse.ops.grow.free_positions import check_free_positions
from dynsparse.ops.grow.scores import Pair, add_row_ranges, pool
from dynsparse.ops.grow.search import NO_GUESS, Candidates, RowSearch, RunningBest
from dynsparse.ops.grow.selection import merge_sorted
from dynsparse.ops.grow.topk import check_pairs, check_pooling
from dynsparse.pattern import SparsePattern
from dynsparse.ranks.consistency import DeferredError, collective_errors
from dynsparse.ranks.grid import ShardSpec
from dynsparse.ranks.ranks import Ranks
from dynsparse.ranks.select import (
    chunk,
    chunk_of,
    gather_sorted,
    key_bits,
    masked_positions,
    select_over_ranks,
)

# Size of what a rank sends in one all-to-all.
_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True)
class GrowRequest:
    """The positions that one layer grows.

    Attributes:
        name: the name of the layer, for errors.
        pairs: (x [batch, in], dY [batch, out]) of this rank; empty if no backward pass reached the
            layer here.
        pattern: positions that are not free; like the rest the same on all ranks.
        count: number of positions to grow.
        scores: computes the scores of all blocks from pairs and a pooling, on the backend of the
            layer; None if the host computes them.
        spec: the shard of the layer that this rank holds: pattern and pairs are of the shard, count
            is of the full layer.
        ranked: a list to which the scores that ranked the positions are appended, if the caller
            checks them later without waiting for the device; None if they are checked at once.
    """

    name: str
    pairs: Sequence[Pair]
    pattern: SparsePattern
    count: int
    spec: ShardSpec | None = None
    scores: Callable[[Sequence[Pair], str], Tensor] | None = None
    ranked: list[Tensor] | None = None


def comm_volume(
    ranks: int, shape: tuple[int, int], samples: int, sample_dtype: torch.dtype
) -> tuple[float, float]:
    """Return the bytes that one rank sends for one layer, on average: by gradients, by samples.

    Args:
        ranks: number of ranks.
        shape: (out, in).
        samples: number of samples of all ranks together.
        sample_dtype: the dtype in which samples are sent.
    """
    out, in_ = shape
    others = (ranks - 1) / ranks
    by_gradients = others * out * in_ * (8 if sample_dtype == torch.float64 else 4)
    return by_gradients, others * samples * (in_ + out / ranks) * sample_dtype.itemsize


def topk_over_ranks(
    ranks: Ranks,
    requests: Sequence[GrowRequest],
    *,
    pooling: str = "sum",
) -> list[Tensor]:
    """Find for each layer the `count` positions of largest |sum over ranks and pairs of dY^T X|.

    Positions of its pattern are excluded; among equal scores the smaller position comes first, as
    in `ops.grow.topk_outside`. Layers are sent by samples or by gradients, whichever sends less;
    convolutions always by gradients, since their samples are many times larger.

    For a sharded layer the result has the positions in this rank's shard, as many as fall into it:
    `ranks` are those with other samples for the same shard, and the ranks of the whole mesh select
    together.

    Args:
        pooling: see `topk_outside`.

    Returns:
        For each layer flat block positions, ascending, int64 [count] on the CPU; the same on every
        rank.

    Raises:
        ValueError, TypeError: as `topk_outside`, the same line on every rank.
    """
    pooling = check_pooling(pooling)
    jobs: list[_Job] = []
    totals = [0] * _COUNTS * len(requests)
    with collective_errors(ranks, all_reduce=totals, op="sum"):
        jobs = [_Job(request, ranks) for request in requests]
        totals[:] = [count for job in jobs for count in job.count_samples()]
    for i, job in enumerate(jobs):
        job.decide(ranks, totals[i * _COUNTS : (i + 1) * _COUNTS])
    # A shard may have no free position where others of the layer have some.
    busy = [job for job in jobs if job.count]
    failed = DeferredError()
    with failed:
        for job in jobs:
            job.check_reached()
            if not job.by_samples:
                job.prepare()
    _exchange_samples(ranks, [job for job in busy if job.by_samples], pooling, failed)
    _exchange_gradients(ranks, [job for job in busy if not job.by_samples], pooling, failed)
    sure = [0] * len(jobs)
    with collective_errors(ranks.all_ranks, all_reduce=sure, op="sum"):
        failed.raise_pending()
        sure[:] = [len(job.candidates.sure) if ranks.is_lead_group(job.axes) else 0 for job in jobs]
    for job in busy:
        job.finish()
    return _select(ranks, jobs, sure)


# ---- one layer ----

_COUNTS = 5
"""How many numbers `_Job.count_samples` returns."""


class _Job:
    """The growth of one layer on this rank, which owns the block rows [first, last)."""

    best: RunningBest
    candidates: Candidates  # in this rank's rows
    dtype: torch.dtype  # in which gradients are added up
    sample_dtype: torch.dtype  # in which samples are sent
    by_samples: bool
    reached: bool  # by a backward pass, on any rank

    def __init__(self, request: GrowRequest, ranks: Ranks) -> None:
        self.name, self.pattern, self.spec = request.name, request.pattern, request.spec
        self.total_count = request.count  # of the full layer
        self.pairs = list(request.pairs)
        try:
            count = request.count
            if request.spec is not None:
                count = min(count, request.pattern.total - request.pattern.nnz)
            self.count = check_free_positions(request.pattern, count)
            if self.pairs:
                check_pairs(self.pairs, request.pattern)
        except (TypeError, ValueError) as error:
            raise type(error)(f"layer {self.name!r}: {error}") from error
        self.local_samples = sum(samples_of(x) for x, _ in self.pairs)  # samples of this rank
        self.first, self.last = chunk_of(ranks, request.pattern.grid[0])
        self.device = self.pairs[0][0].device if self.pairs else ranks.device
        none = torch.zeros(0, dtype=torch.int64, device=self.device)
        self.candidates = Candidates.from_scores(none.float(), none)

    def count_samples(self) -> list[int]:
        """Return the numbers of samples, of tensors of some dtypes, and of pairs, for `decide`."""
        types = [tensor.dtype for pair in self.pairs for tensor in pair]
        return [
            self.local_samples,
            sum(t != torch.bfloat16 for t in types),
            sum(t == torch.float64 for t in types),
            len(self.pairs),
            sum(are_patches(*pair) for pair in self.pairs),
        ]

    def decide(self, ranks: Ranks, totals: Sequence[int]) -> None:
        """Set what is sent, and in which dtypes, the same on all ranks.

        Args:
            totals: the sums of `count_samples` over ranks.
        """
        samples, other_types, double, pairs, patches = totals
        self.dtype = torch.float64 if double else torch.float32
        self.sample_dtype = self.dtype if other_types else torch.bfloat16
        self.reached = pairs > 0
        by_gradients, by_samples = comm_volume(
            ranks.size, self.mean_shape, samples, self.sample_dtype
        )
        self.by_samples = by_samples < by_gradients and not patches

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes over which the layer is sharded."""
        return () if self.spec is None else self.spec.axes

    @property
    def total(self) -> int:
        """Number of block positions of the full layer."""
        out, in_ = self.pattern.shape if self.spec is None else self.spec.shape
        return out * in_ // self.pattern.block_size**2

    @property
    def mean_shape(self) -> tuple[int, int]:
        """The shape of the layer, or the mean shape of its shards: the same on all ranks of a mesh,
        which decide alike."""
        if self.spec is None:
            return self.pattern.shape
        out, in_ = (dim.borders[-1] // (len(dim.borders) - 1) for dim in self.spec.dim_shards)
        return out, in_

    def check_reached(self) -> None:
        """Raise ValueError if there is no gradient to grow by."""
        if self.reached or not self.count:
            return
        raise ValueError(
            f"layer {self.name!r}: expected at least one pair (x, dY), got none on any rank: "
            "growth needs a backward pass"
        )

    def prepare(self) -> None:
        """Allocate the memory that collects the best positions round by round."""
        if self.count:
            room = min(self._round_rows(1), max(self.last - self.first, 1)) * self.pattern.grid[1]
            self.best = RunningBest(max(1, self.max_count), room, -1.0, self.dtype, self.device)

    @property
    def max_count(self) -> int:
        """Upper bound of the positions that join in this rank's rows."""
        return min(self.count, (self.last - self.first) * self.pattern.grid[1])

    def _round_rows(self, shares: int) -> int:
        """Return the number of block rows whose gradient, `shares` times, fits one round."""
        row = self.pattern.shape[1] * self.pattern.block_size * self.dtype.itemsize
        return max(1, _CHUNK_BYTES // (shares * row))

    def rounds(self, ranks: Ranks) -> Iterator[tuple[int, int]]:
        """Yield the block rows of each round, counted from the first row of every owner."""
        share = self._max_rows(ranks)
        rows = self._round_rows(ranks.size)
        for begin in range(0, share, rows):
            yield begin, min(begin + rows, share)

    def _max_rows(self, ranks: Ranks) -> int:
        """Return the number of block rows of the first rank, which has the most."""
        return chunk(self.pattern.grid[0], ranks.size, 0)[1]

    def ranges_by_owner(self, ranks: Ranks, begin: int, end: int) -> list[tuple[int, int]]:
        """Return for each owner its block rows [begin, end) as block rows of the layer."""
        chunks = [chunk(self.pattern.grid[0], ranks.size, owner) for owner in range(ranks.size)]
        return [(min(first + begin, last), min(first + end, last)) for first, last in chunks]

    def rows_by_owner(self, ranks: Ranks) -> list[tuple[int, int]]:
        """Return for each owner all of its rows, in elements."""
        b = self.pattern.block_size
        ranges = self.ranges_by_owner(ranks, 0, self._max_rows(ranks))
        return [(first * b, last * b) for first, last in ranges]

    def local_gradient(self, ranges: Sequence[tuple[int, int]]) -> Tensor:
        """Compute this rank's gradient of these ranges of block rows, as it is sent: [any]."""
        b, width = self.pattern.block_size, self.pattern.shape[1]
        rows = [(first * b, last * b) for first, last in ranges]
        grad = torch.zeros(
            sum(end - begin for begin, end in rows), width, dtype=self.dtype, device=self.device
        )
        add_row_ranges(grad, self.pairs, rows)
        return grad.view(-1)

    def add(self, parts: Tensor, first: int, pooling: str) -> None:
        """Rank the sum of what all ranks sent, [ranks, any], for block rows from `first` on."""
        b, width = self.pattern.block_size, self.pattern.shape[1]
        grad = parts[0].clone()
        for part in parts[1:]:
            grad += part
        grad = grad.view(-1, width)
        scores = grad if b == 1 else pool(grad.abs_(), pooling, b)
        self.best.add(scores, self.pattern, first)

    def finish(self) -> None:
        """Set `candidates`, after all gradients were added."""
        if not self.by_samples:
            self.best.compact()
            count = self.best.count
            self.candidates = Candidates.from_scores(
                self.best.scores[:count], self.best.flat[:count]
            )


# ---- what is sent ----


def _exchange_gradients(
    ranks: Ranks, jobs: Sequence[_Job], pooling: str, failed: DeferredError
) -> None:
    """Send gradients to the owners of their rows, as many layers in one round as fit."""
    parts: list[tuple[_Job, int, int]] = []
    size = 0
    for job in jobs:
        for begin, end in job.rounds(ranks):
            more = (end - begin) * job.pattern.block_size * job.pattern.shape[1]
            more *= ranks.size * job.dtype.itemsize
            if parts and (
                size + more > _CHUNK_BYTES
                or (parts[0][0].dtype, parts[0][0].device) != (job.dtype, job.device)
            ):
                _exchange_round(ranks, parts, pooling, failed)
                parts, size = [], 0
            parts.append((job, begin, end))
            size += more
    if parts:
        _exchange_round(ranks, parts, pooling, failed)


def _exchange_round(
    ranks: Ranks, parts: Sequence[tuple[_Job, int, int]], pooling: str, failed: DeferredError
) -> None:
    """Send, in one all-to-all, the gradient of these rows of all owners, of each part."""
    dtype, device = parts[0][0].dtype, parts[0][0].device
    ranges = [job.ranges_by_owner(ranks, begin, end) for job, begin, end in parts]
    # How many numbers of each part go to each owner.
    numels = [
        [(last - first) * job.pattern.block_size * job.pattern.shape[1] for first, last in by_owner]
        for (job, _, _), by_owner in zip(parts, ranges, strict=True)
    ]
    sizes = [sum(of_part[owner] for of_part in numels) for owner in range(ranks.size)]
    sent = torch.zeros(sum(sizes), dtype=dtype, device=device)
    with failed:
        grads = [job.local_gradient(r) for (job, _, _), r in zip(parts, ranges, strict=True)]
        if len(grads) == 1:
            sent = grads[0]
        else:
            pieces = [grad.split(of_part) for grad, of_part in zip(grads, numels, strict=True)]
            by_owner = [of_part[owner] for owner in range(ranks.size) for of_part in pieces]
            torch.cat(by_owner, out=sent)
    received = sizes[ranks.rank]
    received_rows = ranks.all_to_all(sent, sizes, [received] * ranks.size).view(
        ranks.size, received
    )
    with failed:
        at = 0
        for (job, _, _), of_owner, of_part in zip(parts, ranges, numels, strict=True):
            part = received_rows[:, at : at + of_part[ranks.rank]]
            at += of_part[ranks.rank]
            if part.numel():
                job.add(part, of_owner[ranks.rank][0], pooling)


def _exchange_samples(
    ranks: Ranks, jobs: Sequence[_Job], pooling: str, failed: DeferredError
) -> None:
    """Send x to all ranks, and the columns of dY to the owners of their rows."""
    if not jobs:
        return
    local = torch.tensor([job.local_samples for job in jobs], device=ranks.device)
    counts = torch.stack(ranks.all_gather(local, [len(jobs)] * ranks.size)).tolist()
    samples = [[of_rank[i] for of_rank in counts] for i in range(len(jobs))]
    long = [i for i, job in enumerate(jobs) if RowSearch.is_long(job.pattern, job.dtype)]
    for i, job in enumerate(jobs):
        _search(ranks, job, samples[i], pooling, failed, guess=i in long)
    if not long:
        return
    sample = torch.tensor(
        [[jobs[i].candidates.count, jobs[i].candidates.above] for i in long], device=ranks.device
    )
    for i, (count, above) in zip(long, ranks.sum(sample).tolist(), strict=True):
        if not above <= jobs[i].count <= count:  # the guess was wrong: search again without one
            _search(ranks, jobs[i], samples[i], pooling, failed, guess=False)


def _search(
    ranks: Ranks,
    job: _Job,
    samples_by_rank: Sequence[int],
    pooling: str,
    failed: DeferredError,
    *,
    guess: bool,
) -> None:
    """Find the best positions in this rank's rows.

    Args:
        samples_by_rank: number of samples of each rank.
        guess: whether to search above a guessed threshold.
    """
    out, in_ = job.pattern.shape
    samples = samples_by_rank[ranks.rank]
    x = torch.zeros(samples, in_, dtype=job.sample_dtype, device=job.device)
    dy = torch.zeros(out * samples, dtype=job.sample_dtype, device=job.device)
    rows = job.rows_by_owner(ranks)
    # The rows of one owner after the other, all samples of each.
    to_owners = [dy[f * samples : s * samples].view(samples, s - f) for f, s in rows]
    with failed:
        at = 0
        for pair in job.pairs:
            end = at + len(pair[0])
            x[at:end] = pair[0]
            for columns, (f, s) in zip(to_owners, rows, strict=True):
                columns[at:end] = pair[1][:, f:s]
            at = end
    all_x = torch.cat(ranks.all_gather(x, samples_by_rank))
    first, last = rows[ranks.rank]
    sizes = [(s - f) * samples for f, s in rows]
    all_dy = ranks.all_to_all(dy, sizes, [(last - first) * count for count in samples_by_rank])
    search, (low, high) = None, (torch.inf, -torch.inf)
    with failed:
        if job.max_count:
            pairs = [(all_x, all_dy.view(len(all_x), last - first))]
            search = RowSearch(pairs, job.pattern, pooling, job.dtype, job.first, job.last)
            # This rank's share of the rows, of the positions that join.
            share = -(-job.count * (job.last - job.first) // job.pattern.grid[0])
            low, high = search.guess(min(share, job.max_count)) if guess else NO_GUESS
    if guess:  # the lowest of all lower thresholds and the highest of all upper ones are safe
        bounds = torch.tensor([-low, high], dtype=torch.float64, device=ranks.device)
        low, high = ranks.max(bounds).tolist()
        low = -low
    with failed:
        if search is not None:
            job.candidates = search.find_best(job.max_count, low, high)


def _select(ranks: Ranks, jobs: Sequence[_Job], sure: Sequence[int]) -> list[Tensor]:
    """Select the best of all ranks' positions, on every rank; for a shard, those in it.

    Args:
        sure: for each layer the number of positions of all ranks that join without a score.
    """
    candidates = []
    for job in jobs:
        scores, flat, certain = job.candidates.scores, job.candidates.flat, job.candidates.sure
        if job.spec is not None:
            flat, certain = (job.spec.to_full(f, job.pattern.block_size) for f in (flat, certain))
        if not ranks.is_lead_group(job.axes):
            scores, flat, certain = scores[:0], flat[:0], certain[:0]
        candidates.append((scores, flat, certain))
    totals = [job.total for job in jobs]
    # Other groups of a mesh may have samples of other types.
    bits = None
    if ranks.all_ranks is ranks:
        bits = max((key_bits(job.dtype) for job in jobs), default=0)
    try:
        masks = select_over_ranks(
            ranks.all_ranks,
            [scores for scores, _, _ in candidates],
            [flat for _, flat, _ in candidates],
            [job.total_count - n for job, n in zip(jobs, sure, strict=True)],
            below=max(totals, default=0),
            bits=bits,
        )
    except ValueError:  # on every rank: fewer candidates than there are free positions
        raise ValueError(
            "the gradients overflow, so positions cannot be ranked: lower the scale"
        ) from None
    joining = [
        merge_sorted(certain.cpu(), masked_positions(flat, mask).cpu())
        for (_, flat, certain), mask in zip(candidates, masks, strict=True)
    ]
    return [
        flat if job.spec is None else job.spec.to_local(flat, job.pattern.block_size)
        for job, flat in zip(jobs, gather_sorted(ranks.all_ranks, joining, totals), strict=True)
    ]
