"""Parts of a trainer that the variants exchange, and statistics of its updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dynsparse import SparsePattern, training
from dynsparse.pattern import Rewiring
from dynsparse.ranks import ALONE, GrowRequest, Ranks

Pairs = Sequence[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class LateCosine(training.CosineSchedule):
    """RigL's schedule, without its updates before the step `first`."""

    first: int = 0

    def is_due(self, step: int) -> bool:
        return step >= self.first and super().is_due(step)


class SomeLayers(training.LayerBudget):
    """Only layers with `part` in their names change."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self.part = part

    def counts(self, survey: training.Survey) -> dict[str, training.Counts]:
        return {n: c for n, c in super().counts(survey).items() if self.part in n}


class CorrelationGrowth(training.GradientGrowth):
    """Grows where gradient / (RMS of the input * RMS of the output's gradient) is largest."""

    def choose(
        self, requests: Sequence[GrowRequest], step: int, ranks: Ranks = ALONE
    ) -> list[Tensor]:
        scaled = [replace(r, pairs=_scaled(r.pairs)) for r in requests]
        return super().choose(scaled, step, ranks)


def _scaled(pairs: Pairs) -> Pairs:
    """x and dY divided by the root of the sum of squares of each feature."""
    x_scale, dy_scale = (
        sum(pair[side].square().sum(0) for pair in pairs).sqrt().clamp_min(1e-12) for side in (0, 1)
    )
    return [(x / x_scale, dy / dy_scale) for x, dy in pairs]


class NoisyGrowth(training.GradientGrowth):
    """RigL's growth by the first batch; compares growth by 1, 4, 16 and 32 batches with growth by
    64 others.

    `found` gets per layer {batches: [shared part of the choice, rank correlation]}; entry 0 is the
    expected shared part of a random choice.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[dict[int, list[float]]] = []

    def choose(
        self, requests: Sequence[GrowRequest], step: int, ranks: Ranks = ALONE
    ) -> list[Tensor]:
        for request in requests:
            self._measure(request.pattern, request.count, request.pairs)
        return super().choose([replace(r, pairs=r.pairs[:1]) for r in requests], step, ranks)

    def _measure(self, taken: SparsePattern, count: int, pairs: Pairs) -> None:
        if len(pairs) > 64:
            free = ~taken.to_mask().flatten()
            many = sum(dy.t() @ x for x, dy in pairs[-64:]).abs().flatten()[free]
            best = _best(many, count)
            layer = {0: [count / len(many), 0.0]}
            for n in (1, 4, 16, 32):
                few = sum(dy.t() @ x for x, dy in pairs[:n]).abs().flatten()[free]
                both = torch.stack([few, many]).argsort().argsort().double()
                same = float((_best(few, count) & best).sum()) / count
                layer[n] = [same, float(torch.corrcoef(both)[0, 1])]
            self.found.append(layer)


def _best(scores: Tensor, count: int) -> Tensor:
    chosen = torch.zeros(len(scores), dtype=torch.bool)
    chosen[scores.topk(count).indices] = True
    return chosen


class Protected:
    """Magnitudes as drop scores; weights grown by the previous update are dropped last."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def __call__(self, values: Tensor) -> Tensor:
        scores = training.magnitude(values)
        fresh = self.watch.fresh.get(id(values))
        return scores if fresh is None else scores + fresh * (1 + scores.max())


class Watch:
    """Collects statistics of updates.

    Attributes:
        fresh: id of a layer's values -> mask of the slots that the last update grew.
        updates: per update, over all layers: the number of grown weights; the share of the previous
            update's grown weights that it drops; the share of grown weights at positions used
            before; the shares of inputs and of outputs over which the grown weights spread
            (1 / sum p^2, over their number); the share of all positions ever used.
    """

    def __init__(self, trainer: training.SparseTrainer) -> None:
        self.trainer = trainer
        self.fresh: dict[int, Tensor] = {}
        self.updates: list[dict[str, float]] = []
        self._ever = {n: layer.pattern.to_mask().flatten() for n, layer in trainer.layers.items()}
        trainer.on_update.append(self)

    def __call__(self, step: int, rewirings: dict[str, Rewiring]) -> None:
        total: dict[str, float] = dict.fromkeys(
            ("grown", "fresh", "wasted", "known", "inputs", "outputs"), 0.0
        )
        for name, rewiring in rewirings.items():
            values = self.trainer.layers[name].values
            fresh = self.fresh.get(id(values))
            if fresh is not None:
                stay = torch.zeros_like(fresh)
                stay[rewiring.source[rewiring.source >= 0].long()] = True
                total["fresh"] += int(fresh.sum())
                total["wasted"] += int((fresh & ~stay).sum())
            now = torch.zeros(rewiring.after.nnz, dtype=torch.bool)
            now[rewiring.grown] = True
            self.fresh[id(values)] = now
            flat = rewiring.after.flat[rewiring.grown].long()
            width, count = rewiring.after.shape[1], len(flat)
            total["grown"] += count
            total["known"] += int(self._ever[name][flat].sum())
            self._ever[name][flat] = True
            total["inputs"] += count * _spread(flat % width, width)
            total["outputs"] += count * _spread(flat // width, rewiring.after.shape[0])
        grown = max(1.0, total["grown"])
        positions = sum(len(ever) for ever in self._ever.values())
        self.updates.append(
            {
                "step": step,
                "grown": total["grown"],
                "wasted": total["wasted"] / max(1.0, total["fresh"]),
                "known": total["known"] / grown,
                "inputs": total["inputs"] / grown,
                "outputs": total["outputs"] / grown,
                "ever": sum(int(ever.sum()) for ever in self._ever.values()) / positions,
            }
        )


def _spread(features: Tensor, count: int) -> float:
    shares = torch.bincount(features, minlength=count).double()
    shares /= shares.sum().clamp_min(1)
    return float(1 / shares.square().sum().clamp_min(1e-12)) / count


def fill_second_moment(optimizer: torch.optim.Optimizer, layers: dict[str, Any]) -> Any:
    """An `on_update` callback: Adam's second moment of grown weights becomes the others' median."""

    def fill(step: int, rewirings: dict[str, Rewiring]) -> None:
        for name, rewiring in rewirings.items():
            moments = optimizer.state[layers[name].values]["exp_avg_sq"]
            moments[rewiring.grown] = moments[rewiring.source >= 0].median()

    return fill
