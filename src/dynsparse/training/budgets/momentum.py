"""The budget that moves blocks to the layers of large momentum."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from dynsparse.pattern import SparsePattern
from dynsparse.training.budgets.basic import Budget, Counts, Survey, check_one_block_size


class MomentumBudget(Budget):
    """Each layer drops the schedule's share; the total is grown in proportion to mean momentum.

    A layer's part is the mean |momentum| of its present weights, before the update, over the sum of
    these means. What a layer has no room for goes to the others. The total of all layers stays, and
    every layer keeps at least one block.

    Source: Dettmers and Zettlemoyer 2019, "Sparse Networks from Scratch", section 3.
    """

    changes_capacity = True

    def begin(self, patterns: Mapping[str, SparsePattern]) -> None:
        check_one_block_size(patterns, "redistribution")

    def counts(self, survey: Survey) -> dict[str, Counts]:
        drops, means, room = [], [], []
        momentum = survey.mean_momentum()
        for (name, pattern), mean in zip(survey.patterns.items(), momentum, strict=True):
            count = survey.schedule.drop_count(survey.step, pattern.nnz)
            drop = min(count, max(0, pattern.nnz - 1))
            drops.append(drop)
            means.append(mean)
            room.append(survey.room(name, drop))
            if not math.isfinite(means[-1]):
                raise ValueError(
                    f"the momentum of layer {name!r} is {means[-1]}, so layers cannot be ranked: "
                    "the training has diverged"
                )
        # Where there is no room for all, as many less leave, so that the total stays.
        while (short := sum(drops) - sum(room)) > 0:
            largest = max(range(len(drops)), key=drops.__getitem__)
            taken = min(short, drops[largest])
            drops[largest] -= taken
            room = [survey.room(n, d) for n, d in zip(survey.patterns, drops, strict=True)]
        grows = apportion(sum(drops), means if any(means) else [float(d) for d in drops], room)
        pairs = zip(survey.patterns, drops, grows, strict=True)
        return {name: Counts(drop, grow) for name, drop, grow in pairs}


def apportion(total: int, weights: Sequence[float], most: Sequence[int]) -> list[int]:
    """`total` as whole numbers in proportion to `weights`, none above its `most`.

    What exceeds a `most` is shared among the others in proportion to their weights, or, where all
    of these are zero, evenly. Rounding is by largest remainder, the first of equals first.

    Raises:
        ValueError: a total that all `most` together cannot hold.
    """
    if total > sum(most):
        raise ValueError(f"cannot share {total} among layers with room for {sum(most)}")
    found = [0] * len(weights)
    open_ = [i for i in range(len(weights)) if most[i] > 0]
    left = total
    while left:
        scale = math.fsum(weights[i] for i in open_)
        quota = {i: left * (weights[i] / scale if scale else 1 / len(open_)) for i in open_}
        full = [i for i in open_ if quota[i] >= most[i]]
        if not full:
            for i in open_:
                found[i] = math.floor(quota[i])
            order = sorted(open_, key=lambda i: (math.floor(quota[i]) - quota[i], i))
            for i in order[: total - sum(found)]:
                found[i] += 1
            break
        for i in full:
            found[i] = most[i]
            left -= most[i]
        open_ = [i for i in open_ if i not in full]
    return found
