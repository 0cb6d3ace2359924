"""What one layer wants to grow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from dynsparse.ops.grow.scores import Pair
from dynsparse.pattern import SparsePattern
from dynsparse.ranks.grid import Part


@dataclass(frozen=True)
class GrowRequest:
    """What one layer wants to grow.

    Attributes:
        name: of the layer, for errors.
        pairs: (x [batch, in], dY [batch, out]) of this rank; none where no backward pass came
            through the layer here.
        pattern: positions that are taken; the same on all ranks, as is what follows.
        count: how many positions.
        exclude: further positions that are not free: int64 [any], sorted and distinct.
        scores: what computes scores of all blocks from pairs and a pooling, on a target of the
            layer; None: they are computed here.
        part: where this rank holds a rectangle of the layer: pattern, pairs and exclude are of the
            rectangle, count is of the whole layer.
        ranked: takes the scores that the choice went by, where who asks looks through them without
            waiting; None: the choice looks through them itself.
    """

    name: str
    pairs: Sequence[Pair]
    pattern: SparsePattern
    count: int
    exclude: Tensor | None = None
    part: Part | None = None
    scores: Callable[[Sequence[Pair], str], Tensor] | None = None
    ranked: list[Tensor] | None = None
