"""GMP and GraNet: layers that begin dense or denser and end sparse, and shrink on the way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from dynsparse.training.budgets import GradualBudget
from dynsparse.training.drop import DropScore, magnitude
from dynsparse.training.grow import GradientGrowth, NoGrowth
from dynsparse.training.schedule import GradualSchedule, default_interval
from dynsparse.training.trainer import GrownValue, SparseTrainer


class GMP(SparseTrainer):
    """Gradual magnitude pruning: the smallest magnitudes leave, nothing joins.

    The density falls from that of the layers to `final_density` along a cubic, and the layers
    really become smaller: values, optimizer state, memory and time. Begin with layers of density 1
    for the paper's method.

    Source: Zhu and Gupta 2017, "To prune, or not to prune: exploring the efficacy of pruning for
    model compression". It differs from the paper in that what was pruned is gone: masked dense
    weights can come back when the optimizer moves them, sparse ones cannot.

    Args:
        model, optimizer, drop_score, ranks: see `SparseTrainer`.
        final_density: of all layers together at the end, in (0, 1]; may be left out when
            `densities` names every layer.
        total_steps: optimizer steps of the whole training.
        update_interval: steps between updates; see `RigL`.
        start_fraction, end_fraction: pruning begins and ends at these parts of `total_steps`.
        scope: "layer": every layer follows the cubic to its own final density; "global": the
            smallest magnitudes of all layers together leave.
        allocation, densities: final densities of the layers with scope "layer": "uniform", "er" or
            "erk", and those of single layers by name.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        total_steps: int,
        final_density: float | None = None,
        update_interval: int | None = None,
        start_fraction: float = 0.0,
        end_fraction: float = 0.75,
        scope: str = "layer",
        allocation: str = "uniform",
        densities: Mapping[str, float] | None = None,
        drop_score: DropScore = magnitude,
        ranks: Any = "auto",
    ) -> None:
        super().__init__(
            model,
            optimizer,
            schedule=GradualSchedule(
                total_steps,
                default_interval(total_steps) if update_interval is None else update_interval,
                start_fraction,
                end_fraction,
            ),
            growth=NoGrowth(),
            drop_score=drop_score,
            budget=GradualBudget(
                final_density, scope=scope, allocation=allocation, densities=densities
            ),
            ranks=ranks,
        )


class GraNet(SparseTrainer):
    """Gradual pruning, and at every update as many blocks more pruned as are grown by gradient.

    The density falls as that of `GMP`, from dense or, sparse to sparse, from the density of the
    layers. Each update prunes to its density, then replaces a share of the rest: the smallest
    magnitudes leave, the largest gradients join. The share falls by a cosine over the whole
    training, and replacing goes on after pruning has ended.

    Source: Liu et al. 2021, "Sparse Training via Boosting Pruning Plasticity with
    Neuroregeneration". It differs from the authors' code in that a block which is pruned and at
    once regrown keeps its weight, while theirs begins at zero when the pruning, rather than the
    replacing, took it; and in that one block always stays in every layer.

    Args:
        model, optimizer, drop_score, initial_value, ranks: see `SparseTrainer`.
        regrow_dropped: True, as in the paper; with False a dense layer has nowhere to grow at its
            first update.
        final_density, total_steps, update_interval, start_fraction, end_fraction: see `GMP`.
        scope: "global", as in the paper, or "layer"; see `GMP`, as for allocation and densities.
        drop_fraction: share of what is left that the first update replaces.
        pooling: see `RigL`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        total_steps: int,
        final_density: float | None = None,
        update_interval: int | None = None,
        drop_fraction: float = 0.5,
        start_fraction: float = 0.0,
        end_fraction: float = 0.75,
        scope: str = "global",
        allocation: str = "uniform",
        densities: Mapping[str, float] | None = None,
        pooling: str = "sum",
        drop_score: DropScore = magnitude,
        regrow_dropped: bool = True,
        initial_value: GrownValue = 0.0,
        ranks: Any = "auto",
    ) -> None:
        super().__init__(
            model,
            optimizer,
            schedule=GradualSchedule(
                total_steps,
                default_interval(total_steps) if update_interval is None else update_interval,
                start_fraction,
                end_fraction,
                drop_fraction,
            ),
            growth=GradientGrowth(pooling),
            drop_score=drop_score,
            regrow_dropped=regrow_dropped,
            initial_value=initial_value,
            budget=GradualBudget(
                final_density, scope=scope, allocation=allocation, densities=densities
            ),
            ranks=ranks,
        )
