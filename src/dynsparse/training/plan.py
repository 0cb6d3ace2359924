"""What an update is going to do to all layers, before it does anything to one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from dynsparse.nn import SparseLinear
from dynsparse.pattern import Rewiring, SparsePattern
from dynsparse.training.budgets import Budget, Counts, Survey
from dynsparse.training.change import Change, check_scores, naming
from dynsparse.training.drop import lowest
from dynsparse.training.gradients import Pair
from dynsparse.training.grow import Growth
from dynsparse.training.history import History
from dynsparse.training.initial import GradientStep, learning_rate_of
from dynsparse.training.memory import released_memory
from dynsparse.training.schedule import Schedule

__all__ = ["GrownValue", "plan_changes"]

GrownValue = float | GradientStep | Callable[[SparseLinear, Rewiring], Tensor]
"""What grown weights start with: a number, a `GradientStep`, or a function that returns [grown] or
[grown, b, b]."""


def plan_changes(
    step: int,
    layers: Mapping[str, SparseLinear],
    *,
    schedule: Schedule,
    growth: Growth,
    budget: Budget,
    history: History,
    optimizer: torch.optim.Optimizer,
    regrow_dropped: bool,
    initial_value: GrownValue,
    scores: Callable[[str, SparseLinear], Tensor],
) -> dict[str, Change]:
    """The changes by layer name, all of them checked. Nothing has changed but random generators.

    Args:
        step: that ends in the update.
        layers: that it may change.
        scores: from a layer's name and the layer to its drop scores [nnz].
        schedule, growth, budget, history, optimizer, regrow_dropped, initial_value: see
            `SparseTrainer`.

    Raises:
        RuntimeError, TypeError, ValueError: with the layer's name, where something does not fit.
    """

    def checked_scores(name: str) -> Tensor:
        with naming(name):
            return check_scores(scores(name, layers[name]), layers[name].pattern.nnz)

    survey = Survey(
        step=step,
        schedule=schedule,
        patterns={name: layer.pattern for name, layer in layers.items()},
        scores=checked_scores,
        history=history,
        regrow_dropped=regrow_dropped,
    )
    changes = {}
    for name, counts in budget.counts(survey).items():
        if counts.drop <= 0 and counts.grow <= 0:
            continue
        layer = layers[name]
        start: Tensor | float | None = None
        with naming(name):
            with released_memory(layer.values):
                ranked = scores(name, layer)
                pairs = history.pairs(name)
                drop, grow = _positions(
                    layer.pattern, counts, ranked, growth, pairs, regrow_dropped
                )
                del ranked, pairs
                if isinstance(initial_value, GradientStep):
                    start = _stepped(initial_value, name, layer, grow, history, optimizer)
            with released_memory(layer.values):
                rewiring = Rewiring.make(layer.pattern, drop, grow)
            if not isinstance(initial_value, GradientStep):
                given = initial_value
                start = given(layer, rewiring) if callable(given) else given
            changes[name] = Change.planned(layer, rewiring, start, optimizer)
    return changes


def _positions(
    pattern: SparsePattern,
    counts: Counts,
    scores: Tensor,
    growth: Growth,
    pairs: list[Pair],
    regrow_dropped: bool,
) -> tuple[Tensor, Tensor]:
    """The slots that leave, and the positions that join."""
    drop = lowest(scores, counts.drop)
    if not regrow_dropped or not counts.drop:
        return drop, growth.choose(pattern, counts.grow, pairs)
    stays = torch.ones(pattern.nnz, dtype=torch.bool)
    stays[drop] = False
    kept = SparsePattern.from_flat(
        pattern.flat[stays], shape=pattern.shape, block_size=pattern.block_size
    )
    grow = growth.choose(kept, counts.grow, pairs)
    return drop[~torch.isin(pattern.flat[drop], grow)], grow[~pattern.contains(grow)]


def _stepped(
    start: GradientStep,
    name: str,
    layer: SparseLinear,
    grow: Tensor,
    history: History,
    optimizer: torch.optim.Optimizer,
) -> Tensor:
    pattern = layer.pattern
    grown = SparsePattern.from_flat(
        grow.sort().values, shape=pattern.shape, block_size=pattern.block_size
    )
    return start.values(history, name, grown, learning_rate_of(optimizer, layer.values))
