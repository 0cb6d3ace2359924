"""The positions of largest gradient outside a pattern, from x and dY.

The dense gradient dY^T X is computed in chunks of rows. Each chunk is ranked against the best
candidates so far and then overwritten, so no [out, in] matrix exists.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dynsparse._core.checks import check_tensor, check_types, is_finite, shorten
from dynsparse.ops.conv.patches import are_patches, features_of
from dynsparse.ops.grow.free_positions import check_free_positions
from dynsparse.ops.grow.on_device import layers_at_once, topk_on_device
from dynsparse.ops.grow.scores import Pair
from dynsparse.ops.grow.search import NO_GUESS, Candidates, RowSearch
from dynsparse.ops.grow.selection import merge_sorted, select
from dynsparse.pattern import SparsePattern

POOLINGS = ("sum", "avg", "max", "none")
"""How the gradient magnitudes of a block become one score; "none" ranks as "sum"."""


class GrowCandidates(NamedTuple):
    """Positions to grow, on the device of x and dY.

    Attributes:
        flat: flat block positions, int64 [k].
        scores: their scores, [k].
    """

    flat: Tensor
    scores: Tensor


@check_types
def topk_outside(
    pairs: Sequence[Pair],
    pattern: SparsePattern,
    k: int,
    *,
    pooling: str = "sum",
    sort: bool = True,
) -> GrowCandidates:
    """Find the exact `k` positions of largest |sum over pairs of dY^T X| outside a pattern.

    Besides the result it needs one chunk of rows of the gradient (about 8 MiB) and the candidates
    of one more. 16-bit activations are accumulated in float32; float64 stays float64. Equal scores:
    the smaller flat position first. In large layers of single elements products of 16-bit integers,
    from copies of x and dY, tell which positions may be among the largest, and only their scores
    are computed in float32 (`search.screen_positions`). On a device there is no host
    synchronisation, chunks are larger, and x and dY are not checked for NaN.

    Args:
        pairs: (x [batch, in], dY [batch, out]) of every micro-batch; batches may differ in size.
            Those of convolutions are patches, see `ops.conv.patches`.
        pattern: positions that are taken.
        k: number of positions.
        pooling: reduces the magnitudes of a block to its score: "sum", "avg" or "max"; "none" ranks
            by the sum. Elements (block size 1) need no pooling.
        sort: best first; False saves time and leaves them in order of position.

    Raises:
        ValueError: `k` is larger than the number of free positions, no pairs, shapes that do not
            fit, gradients that are not finite, an unknown pooling.

    Source: Evci et al. 2020, "Rigging the Lottery", section 3 (grow criterion). Pooling follows
    Graphcore's dynamic sparsity application: magnitudes first, then the reduction.
    """
    pooling = check_pooling(pooling)
    k = check_free_positions(pattern, k)
    dtype = check_pairs(pairs, pattern) if k else torch.float32
    if k == 0:
        return _no_candidates(torch.device("cpu"), dtype)
    if not pairs[0][0].is_cpu:
        flat, scores = topk_on_device([pairs], [pattern], k, pooling, dtype)
        return _make_candidates(flat.squeeze(0), scores.squeeze(0), sort)

    candidates = _search(pairs, pattern, k, pooling, dtype, scored=True)
    return _make_candidates(candidates.flat, candidates.scores, sort)


def topk_of_layers(
    pairs: Sequence[Sequence[Pair]],
    patterns: Sequence[SparsePattern],
    counts: Sequence[int],
    dtypes: Sequence[torch.dtype],
    pooling: str,
) -> list[GrowCandidates]:
    """`topk_outside` of layers on devices, by position; layers of equal sizes are ranked together.

    Args:
        pairs, patterns, counts: the arguments of each layer, checked.
        dtypes: of their scores, from `check_pairs`.
    """
    groups: dict[Hashable, list[int]] = {}
    for i, (own, pattern, k, dtype) in enumerate(zip(pairs, patterns, counts, dtypes, strict=True)):
        device = own[0][0].device if k else None
        sizes = pattern.shape, pattern.block_size, pattern.nnz, pattern._is_row_major
        key = *sizes, k, dtype, device
        groups.setdefault(key, []).append(i)
    found: dict[int, GrowCandidates] = {}
    for group in groups.values():
        pattern, k, dtype = patterns[group[0]], counts[group[0]], dtypes[group[0]]
        if k == 0:
            found |= {i: _no_candidates(patterns[i]._device, dtype) for i in group}
            continue
        step = layers_at_once(pattern, dtype)
        for batch in [group[i : i + step] for i in range(0, len(group), step)]:
            flat, scores = topk_on_device(
                [pairs[i] for i in batch], [patterns[i] for i in batch], k, pooling, dtype
            )
            found |= zip(batch, map(GrowCandidates, flat, scores), strict=True)
    return [found[i] for i in range(len(patterns))]


@check_types
def best_free(scores: Tensor, pattern: SparsePattern, k: int) -> Tensor:
    """Return the `k` positions of the largest scores outside a pattern: flat, ascending, int64 [k].

    `topk_outside` for backends that compute the scores themselves. Equal scores: the smaller
    position first.

    Args:
        scores: the scores of all blocks, [out / b, in / b], none negative.
        pattern: positions that are not free.
        k: number of positions.

    Raises:
        ValueError: scores of another shape; `k` is larger than the number of free positions.
    """
    check_tensor("scores", scores)
    if tuple(scores.shape) != tuple(pattern.grid):
        raise ValueError(f"expected scores {list(pattern.grid)}, got {list(scores.shape)}")
    k = check_free_positions(pattern, k)
    free = scores.flatten().clone()
    free[pattern.flat.to(free.device)] = -torch.inf
    return select(free, k)


def best_positions(
    pairs: Sequence[Pair], pattern: SparsePattern, k: int, *, pooling: str = "sum"
) -> Tensor:
    """Return the positions of `topk_outside`, ascending, without computing most of the scores."""
    if not k or not isinstance(pairs, Sequence) or not pairs or not pairs[0][0].is_cpu:
        return topk_outside(pairs, pattern, k, pooling=pooling, sort=False).flat
    k = check_free_positions(pattern, k)
    dtype = check_pairs(pairs, pattern)
    candidates = _search(pairs, pattern, k, check_pooling(pooling), dtype, scored=False)
    ranked, scored = candidates.flat, k - len(candidates.sure)
    if scored < len(ranked):
        ranked = ranked.index_select(0, select(candidates.scores, scored))
    return merge_sorted(candidates.sure, ranked)


def _search(
    pairs: Sequence[Pair],
    pattern: SparsePattern,
    k: int,
    pooling: str,
    dtype: torch.dtype,
    *,
    scored: bool,
) -> Candidates:
    """Find at least `k` positions, with the best among them; exactly `k` if `scored`."""
    search = RowSearch(pairs, pattern, pooling, dtype)
    low, high = search.guess(k) if search.is_long(pattern, dtype) else NO_GUESS
    candidates = search.find_best(k, low, torch.inf if scored else high)
    if candidates.count < k or candidates.above > k:  # the guess was wrong
        candidates = search.find_best(k, *NO_GUESS)
    if candidates.count < k:
        raise ValueError("the gradients overflow, so positions cannot be ranked: lower the scale")
    return candidates


def _no_candidates(device: torch.device, dtype: torch.dtype) -> GrowCandidates:
    flat = torch.zeros(0, dtype=torch.int64, device=device)
    return GrowCandidates(flat, torch.zeros(0, dtype=dtype, device=device))


def _make_candidates(flat: Tensor, values: Tensor, sort: bool) -> GrowCandidates:
    """Return the candidates, sorted by score if `sort`."""
    if not sort:
        return GrowCandidates(flat, values)
    order = values.sort(descending=True, stable=True).indices
    return GrowCandidates(flat.index_select(0, order), values.index_select(0, order))


def check_pooling(pooling: str) -> str:
    """Return the pooling in lower case, after checking it."""
    if not isinstance(pooling, str) or pooling.lower() not in POOLINGS:
        raise ValueError(f"pooling must be one of {', '.join(POOLINGS)}, got {pooling!r}")
    return pooling.lower()


def check_pairs(pairs: Sequence[Pair], pattern: SparsePattern) -> torch.dtype:
    """Check that shapes fit and entries are finite; return the dtype to accumulate in.

    Entries on a device are not checked, which would be a host synchronisation.
    """
    if not isinstance(pairs, Sequence):
        raise TypeError(f"pairs must be a sequence of (x, dY), got {shorten(pairs)}")
    if len(pairs) == 0:
        raise ValueError(
            "expected at least one pair (x, dY), got none: growth needs a backward pass"
        )
    out_features, in_features = pattern.shape
    for pair in pairs:
        if not isinstance(pair, Sequence) or len(pair) != 2:
            raise TypeError(f"pairs must be (x, dY), got {shorten(pair)}")
        x, dy = check_tensor("x", pair[0]), check_tensor("dY", pair[1])
        fits = x.dim() == dy.dim() == 2 and len(x) == len(dy)
        fits = fits or are_patches(x, dy)
        if not fits or features_of(x, dy) != (out_features, in_features):
            raise ValueError(
                f"expected x [batch, {in_features}] and dY [batch, {out_features}], "
                f"got {list(x.shape)} and {list(dy.shape)}"
            )
        for name, tensor in (("x", x), ("dY", dy)):
            if not tensor.is_floating_point():
                raise TypeError(f"{name} must be of a floating point type, got {tensor.dtype}")
            if tensor.device != pairs[0][0].device:
                raise ValueError(
                    f"all of x and dY must be on one device, got {pairs[0][0].device} and "
                    f"{tensor.device}"
                )
            if tensor.is_cpu and not is_finite(tensor):
                raise ValueError(
                    f"{name} holds NaN or infinity, so positions cannot be ranked: "
                    "the training has diverged"
                )
    tensors = [tensor for pair in pairs for tensor in pair]
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
