"""What a trace says of patterns: how dense they are, and how much of them an update replaced."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dynsparse.nn import SparseLinear
from dynsparse.pattern import Rewiring
from dynsparse.tracing.spans import counter, is_traced


def count_density(layers: Mapping[str, SparseLinear]) -> None:
    """The counter "density": present weights over all weights of the layers together.

    Of a network without sparse layers it is 1.
    """
    if not is_traced():
        return
    have = sum(one.values.numel() for one in layers.values())
    total = sum(one.in_features * one.out_features for one in layers.values())
    counter("density", have / total if layers else 1.0)


def count_churn(rewirings: Iterable[Rewiring]) -> None:
    """The counter "churn": the share of the blocks there were that an update dropped.

    Of updates on a device it waits for them.
    """
    if not is_traced():
        return
    made = list(rewirings)
    before = sum(one.before.nnz for one in made)
    counter("churn", sum(len(one.dropped) for one in made) / before if before else 0.0)
