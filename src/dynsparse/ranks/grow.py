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

from collections.abc import Sequence

import torch
from torch import Tensor

from dynsparse.ops.conv.patches import are_patches
from dynsparse.ops.grow.in_rows import RowSearch
from dynsparse.ops.grow.scores import add_slabs
from dynsparse.ops.grow.selection import ascending
from dynsparse.ops.grow.threshold import NO_GUESS
from dynsparse.ops.grow.topk import check_pooling
from dynsparse.ranks.band import settle
from dynsparse.ranks.consistency import DeferredError, collective_errors
from dynsparse.ranks.exchanged import comm_volume
from dynsparse.ranks.grow_job import CHUNK_BYTES, GrowthJob
from dynsparse.ranks.keys import key_bits
from dynsparse.ranks.ranks import Ranks
from dynsparse.ranks.select import gather_sorted, masked_positions, select_over_ranks
from dynsparse.ranks.wanted import GrowRequest


def topk_over_ranks(
    ranks: Ranks,
    wanted: Sequence[GrowRequest],
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
        exchange: "pieces" or "samples" for all layers; whichever sends less when left out. Of
            convolutions pieces travel, unrounded: their samples are many times larger.

    Raises:
        ValueError, TypeError: as `topk_outside`, the same line on every rank.
    """
    pooling = check_pooling(pooling)
    jobs: list[GrowthJob] = []
    facts = [0] * _FACTS * len(wanted)
    with collective_errors(ranks, facts, "sum"):
        if wire not in (None, torch.bfloat16):
            raise ValueError(f"wire must be None or torch.bfloat16, got {wire}")
        if exchange not in (None, "pieces", "samples"):
            raise ValueError(f'exchange must be "pieces" or "samples", got {exchange!r}')
        jobs = [GrowthJob(one, ranks) for one in wanted]
        facts[:] = [fact for job in jobs for fact in _facts_of(job)]
    for i, job in enumerate(jobs):
        _learn(job, *facts[i * _FACTS : (i + 1) * _FACTS])
    for job in jobs:
        pieces, samples = comm_volume(ranks.size, job.usual, job.samples, job.wide, wire)
        job.by_samples = samples < pieces if exchange is None else exchange == "samples"
        job.by_samples = job.by_samples and not job.convolved
        whole = wire is None or ranks.size == 1 or job.by_samples or job.convolved
        job.rounded = not whole and job.dtype == torch.float32
    # In a rectangle there may be no room where there is in others of the layer.
    busy = [job for job in jobs if job.count]
    rounded = [job for job in jobs if job.wanted and job.rounded]
    failed = DeferredError()
    with failed:
        for job in jobs:
            job.check_pairs_there()
            if not job.by_samples:
                job.begin()
    _by_samples(ranks, [job for job in busy if job.by_samples], pooling, failed)
    _by_pieces(ranks, [job for job in busy if not job.by_samples], pooling, failed)
    joining = [0] * len(jobs)
    with collective_errors(ranks.all_ranks, joining, "sum"):
        failed.raise_pending()
        joining[:] = [len(job.found.sure) if ranks.is_lead_group(job.axes) else 0 for job in jobs]
    settle(
        ranks,
        [job.band for job in rounded],
        [job.pairs for job in rounded],
        pooling,
        [ranks.is_lead_group(job.axes) for job in rounded],
    )
    for job in busy:
        job.end()
    return _chosen(ranks, jobs, joining)


_FACTS = 5


def _facts_of(job: GrowthJob) -> list[int]:
    """What of a layer all ranks must know the sums of: samples, and of which type they are."""
    types = [tensor.dtype for pair in job.pairs for tensor in pair]
    return [
        job.held,
        sum(t != torch.bfloat16 for t in types),
        sum(t == torch.float64 for t in types),
        len(job.pairs),
        sum(are_patches(*pair) for pair in job.pairs),
    ]


def _learn(
    job: GrowthJob, samples: int, unlike: int, double: int, pairs: int, convolved: int
) -> None:
    """Take in what `_facts_of` says of all ranks together."""
    job.samples = samples
    job.dtype = torch.float64 if double else torch.float32
    job.wide = job.dtype if unlike else torch.bfloat16
    job.reached, job.convolved = pairs > 0, convolved > 0


def _by_pieces(
    ranks: Ranks, jobs: Sequence[GrowthJob], pooling: str, failed: DeferredError
) -> None:
    """Pieces of the gradient go to the owners of their rows, as many layers in one round as fit."""
    parts: list[tuple[GrowthJob, int, int]] = []
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


def _wire(job: GrowthJob) -> tuple[torch.dtype, torch.device]:
    return torch.bfloat16 if job.rounded else job.dtype, job.device


def _round(
    ranks: Ranks, parts: Sequence[tuple[GrowthJob, int, int]], pooling: str, failed: DeferredError
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
    got = ranks.all_to_all(sent, sizes, [own] * ranks.size).view(ranks.size, own)
    with failed:
        at = 0
        for (job, _, _), to_each, of_part in zip(parts, slabs, numbers, strict=True):
            piece = got[:, at : at + of_part[ranks.rank]]
            at += of_part[ranks.rank]
            if piece.numel():
                _take_in(job, piece, *to_each[ranks.rank], pooling)


def _numbers(job: GrowthJob, block_rows: int) -> int:
    """How many numbers on the wire hold the gradient of so many block rows."""
    rows = block_rows * job.pattern.block_size
    # Rounded pieces are followed by the largest error of each row, a float32 in the place of two.
    return rows * (job.pattern.shape[1] + (2 if job.rounded else 0))


def _local(job: GrowthJob, slabs: Sequence[tuple[int, int]], wire: torch.dtype) -> Tensor:
    """This rank's gradient of these block rows, slab after slab, as it is sent: [any]."""
    b, width = job.pattern.block_size, job.pattern.shape[1]
    rows = [(first * b, last * b) for first, last in slabs]
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


def _take_in(job: GrowthJob, pieces: Tensor, first: int, last: int, pooling: str) -> None:
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


def _by_samples(
    ranks: Ranks, jobs: Sequence[GrowthJob], pooling: str, failed: DeferredError
) -> None:
    """x goes to all ranks, the columns of dY to the owners of their rows."""
    if not jobs:
        return
    own = torch.tensor([job.held for job in jobs], device=ranks.device)
    counts = torch.stack(ranks.all_gather(own, [len(jobs)] * ranks.size)).tolist()
    held = [[of_rank[i] for of_rank in counts] for i in range(len(jobs))]
    long = [i for i, job in enumerate(jobs) if RowSearch.is_long(job.pattern, job.dtype)]
    for i, job in enumerate(jobs):
        _search(ranks, job, held[i], pooling, failed, guess=i in long)
    if not long:
        return
    there = torch.tensor(
        [[jobs[i].found.count, jobs[i].found.above] for i in long], device=ranks.device
    )
    for i, (count, above) in zip(long, ranks.sum(there).tolist(), strict=True):
        if not above <= jobs[i].count <= count:  # a wrong guess is mended by a second pass without
            _search(ranks, jobs[i], held[i], pooling, failed, guess=False)


def _search(
    ranks: Ranks,
    job: GrowthJob,
    held: Sequence[int],
    pooling: str,
    failed: DeferredError,
    *,
    guess: bool,
) -> None:
    """The best of this rank's slab; `held` says how many samples the ranks have."""
    out, in_ = job.pattern.shape
    own = held[ranks.rank]
    x = torch.zeros(own, in_, dtype=job.wide, device=job.device)
    dy = torch.zeros(out * own, dtype=job.wide, device=job.device)
    slabs = job.whole_slabs(ranks)
    # One slab after the other, all samples of each.
    to_slabs = [dy[f * own : s * own].view(own, s - f) for f, s in slabs]
    with failed:
        at = 0
        for pair in job.pairs:
            end = at + len(pair[0])
            x[at:end] = pair[0]
            for slab, (f, s) in zip(to_slabs, slabs, strict=True):
                slab[at:end] = pair[1][:, f:s]
            at = end
    xs = torch.cat(ranks.all_gather(x, held))
    first, last = slabs[ranks.rank]
    sizes = [(s - f) * own for f, s in slabs]
    columns = ranks.all_to_all(dy, sizes, [(last - first) * h for h in held])
    search, (low, high) = None, (torch.inf, -torch.inf)
    with failed:
        if job.most:
            pairs = [(xs, columns.view(len(xs), last - first))]
            search = RowSearch(
                pairs, job.pattern, job.exclude, pooling, job.dtype, job.first, job.last
            )
            # A share of those who join that is the slab's share of the rows.
            wanted = -(-job.count * (job.last - job.first) // job.pattern.grid[0])
            low, high = search.guess(min(wanted, job.most)) if guess else NO_GUESS
    if guess:  # what the lowest guess lets through is enough for all, and so for the highest
        ends = torch.tensor([-low, high], dtype=torch.float64, device=ranks.device)
        low, high = ranks.max(ends).tolist()
        low = -low
    with failed:
        if search is not None:
            job.found = search.best(job.most, low, high)


def _chosen(ranks: Ranks, jobs: Sequence[GrowthJob], joining: Sequence[int]) -> list[Tensor]:
    """The winners of all slabs, known to every rank; of a rectangle, those in it.

    Args:
        joining: for each layer how many of everyone's positions are sure.
    """
    found = []
    for job in jobs:
        own = job.found
        scores, flat, sure = own.scores, own.flat, own.sure
        if job.part is not None:
            flat, sure = (job.part.to_whole(f, job.pattern.block_size) for f in (flat, sure))
        if not ranks.is_lead_group(job.axes):
            scores, flat, sure = scores[:0], flat[:0], sure[:0]
        found.append((scores, flat, sure))
    flats = [flat for _, flat, _ in found]
    among = ranks.all_ranks
    totals = [job.total for job in jobs]
    wanted = [job.wanted - sure for job, sure in zip(jobs, joining, strict=True)]
    below = max(totals, default=0)
    # Other lines of a mesh may have samples of other types.
    bits = max((key_bits(job.dtype) for job in jobs), default=0) if among is ranks else None
    try:
        masks = select_over_ranks(
            among, [s for s, _, _ in found], flats, wanted, below=below, bits=bits
        )
    except ValueError:  # on every rank: fewer candidates than there are free positions
        raise ValueError(
            "the gradients overflow, so positions cannot be ranked: lower the scale"
        ) from None
    winners = [
        ascending(sure.cpu(), masked_positions(flat, mask).cpu())
        for (_, flat, sure), mask in zip(found, masks, strict=True)
    ]
    known = gather_sorted(among, winners, totals)
    return [
        flat if job.part is None else job.part.to_part(flat, job.pattern.block_size)
        for job, flat in zip(jobs, known, strict=True)
    ]
