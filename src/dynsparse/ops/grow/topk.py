"""The positions of largest gradient outside a pattern, from x and dY.

The dense gradient dY^T X is computed in chunks of rows. Each chunk is ranked against the best
candidates so far and then overwritten, so that no [out, in] matrix ever exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dynsparse.checks import check_tensor
from dynsparse.files.shorten import shortened
from dynsparse.ops.conv.patches import are_patches, features_of
from dynsparse.ops.grow.free_positions import check_free_positions
from dynsparse.ops.grow.in_rows import Found, RowSearch
from dynsparse.ops.grow.on_device import best_outside
from dynsparse.ops.grow.scores import Pair
from dynsparse.ops.grow.selection import ascending, select
from dynsparse.ops.grow.threshold import NO_GUESS
from dynsparse.pattern import SparsePattern
from dynsparse.typed import typed

POOLINGS = ("sum", "avg", "max", "none")
"""How the gradient magnitudes of a block become one score; "none" ranks as "sum"."""


class GrowCandidates(NamedTuple):
    """Positions to grow: `flat` block positions int64 [k], and their `scores` [k]; both are where
    x and dY are."""

    flat: Tensor
    scores: Tensor


@typed
def topk_outside(
    pairs: Sequence[Pair],
    pattern: SparsePattern,
    k: int,
    *,
    pooling: str = "sum",
    exclude: Tensor | None = None,
    sort: bool = True,
) -> GrowCandidates:
    """The exact `k` positions of largest |sum over pairs of dY^T X| that are not in `pattern`.

    Beside the result it needs one chunk of rows of the gradient (about 8 MiB) and room for the
    candidates of one more. 16-bit activations are accumulated in float32; float64 stays
    float64. Equal scores: the smaller flat position first. For large layers of single elements
    products of 16-bit integers, from copies of x and dY, say which positions may be among the
    largest, whose scores are computed in float32 (`screen.py`). On a device nothing waits for it,
    the panels are larger, and x and dY are not looked through for NaN.

    Args:
        pairs: (x [batch, in], dY [batch, out]) of every micro-batch; batches may differ in size.
            Those of convolutions are patches, see `ops.conv.patches`.
        pattern: positions that are taken.
        k: how many positions.
        pooling: how the magnitudes of a block become its score: "sum", "avg" or "max"; "none" has
            no options and ranks by the sum. Elements (block size 1) need no pooling.
        exclude: further positions that may not be chosen: flat block positions, int64 [any],
            sorted and distinct; for instance those dropped a moment ago.
        sort: best first; False saves time and leaves the candidates in order of position.

    Raises:
        ValueError: more positions asked for than are free, no pairs, tensors whose shapes do not
            fit, gradients that are not finite, an unknown pooling.

    Source: Evci et al. 2020, "Rigging the Lottery", section 3 (grow criterion). Pooling follows
    Graphcore's dynamic sparsity application: magnitudes first, then the reduction.
    """
    pooling = check_pooling(pooling)
    k, exclude = check_free_positions(pattern, k, exclude)
    dtype = check_pairs(pairs, pattern) if k else torch.float32
    if k == 0:
        return GrowCandidates(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=dtype))
    if not pairs[0][0].is_cpu:
        return _candidates(*best_outside(pairs, pattern, k, pooling, exclude, dtype), sort)

    found = _found(pairs, pattern, k, pooling, exclude, dtype, scored=True)
    return _candidates(found.flat, found.scores, sort)


def best_positions(
    pairs: Sequence[Pair], pattern: SparsePattern, k: int, *, pooling: str = "sum"
) -> Tensor:
    """The positions that `topk_outside` finds, in order of position; most of their scores need not
    be known."""
    if not k or not isinstance(pairs, Sequence) or not pairs or not pairs[0][0].is_cpu:
        return topk_outside(pairs, pattern, k, pooling=pooling, sort=False).flat
    k, exclude = check_free_positions(pattern, k, None)
    dtype = check_pairs(pairs, pattern)
    found = _found(pairs, pattern, k, check_pooling(pooling), exclude, dtype, scored=False)
    ranked = found.flat.index_select(0, select(found.scores, k - len(found.sure)))
    return ascending(found.sure, ranked)


def _found(
    pairs: Sequence[Pair],
    pattern: SparsePattern,
    k: int,
    pooling: str,
    exclude: Tensor,
    dtype: torch.dtype,
    *,
    scored: bool,
) -> Found:
    """At least `k` positions, the best among them; exactly `k` if all of them are scored."""
    search = RowSearch(pairs, pattern, exclude, pooling, dtype)
    low, high = search.guess(k) if search.is_long(pattern, dtype) else NO_GUESS
    found = search.best(k, low, torch.inf if scored else high)
    if found.count < k or found.above > k:  # a wrong guess is mended by a second pass without one
        found = search.best(k, *NO_GUESS)
    if found.count < k:
        raise ValueError("the gradients overflow, so positions cannot be ranked: lower the scale")
    return found


def _candidates(flat: Tensor, values: Tensor, sort: bool) -> GrowCandidates:
    """Of positions in order."""
    if not sort:
        return GrowCandidates(flat, values)
    order = values.sort(descending=True, stable=True).indices
    return GrowCandidates(flat.index_select(0, order), values.index_select(0, order))


def check_pooling(pooling: str) -> str:
    """The pooling in lower case; "SUM" and "sum" are the same."""
    if not isinstance(pooling, str) or pooling.lower() not in POOLINGS:
        raise ValueError(f"pooling must be one of {', '.join(POOLINGS)}, got {pooling!r}")
    return pooling.lower()


def check_pairs(pairs: Sequence[Pair], pattern: SparsePattern) -> torch.dtype:
    """Shapes fit and entries are finite; returns the type to accumulate in.

    Entries elsewhere than on the CPU are not looked at, which would make the host wait.
    """
    if not isinstance(pairs, Sequence):
        raise TypeError(f"pairs must be a sequence of (x, dY), got {shortened(pairs)}")
    if len(pairs) == 0:
        raise ValueError("expected at least one pair (x, dY), got none: growth needs a backward")
    out_features, in_features = pattern.shape
    for pair in pairs:
        if not isinstance(pair, Sequence) or len(pair) != 2:
            raise TypeError(f"pairs must be (x, dY), got {shortened(pair)}")
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
            if not tensor.is_cpu or not tensor.numel():
                continue
            if not bool(torch.stack(torch.aminmax(tensor)).isfinite().all()):
                raise ValueError(
                    f"{name} holds NaN or infinity, so positions cannot be ranked: "
                    "the training has diverged"
                )
    tensors = [tensor for pair in pairs for tensor in pair]
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
