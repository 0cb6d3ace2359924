"""Static, SET and RigL: the trainer with its pieces chosen."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dynsparse.training.algorithms.choices import cosine_schedule, layer_or_global
from dynsparse.training.budgets import Budget
from dynsparse.training.drop import DropScore, magnitude
from dynsparse.training.grow import GradientGrowth, RandomGrowth
from dynsparse.training.schedule import Schedule
from dynsparse.training.trainer import GrownValue, SparseTrainer


class Static(SparseTrainer):
    """The pattern stays as it is: sparse training without pattern updates."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, *, ranks: Any = "auto"
    ) -> None:
        super().__init__(model, optimizer, schedule=None, growth=None, ranks=ranks)


class RigL(SparseTrainer):
    """Drop the smallest magnitudes, grow where the gradient is largest.

    Source: Evci et al. 2020, "Rigging the Lottery: Making All Tickets Winners".

    Args:
        model, optimizer, drop_score, regrow_dropped, initial_value, ranks: see `SparseTrainer`.
        total_steps: optimizer steps of the whole training.
        update_interval: steps between updates; when left out 100, or a tenth of `total_steps`
            where these are below 1,000.
        drop_fraction: share of a layer's blocks that the first update replaces; 0.3 when left out.
        schedule: in place of the cosine schedule of these three.
        pooling: how the gradient magnitudes of a block become its score: "sum", "avg", "max", or
            "none", which ranks as "sum".
        budget: "layer": every layer replaces its own share; "global": the lowest scores of all
            layers together leave, and each layer grows as many as it lost (see `GlobalBudget`,
            which over the stages of a pipeline is made with them); or another budget.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        total_steps: int | None = None,
        update_interval: int | None = None,
        drop_fraction: float | None = None,
        schedule: Schedule | None = None,
        pooling: str = "sum",
        drop_score: DropScore = magnitude,
        regrow_dropped: bool = False,
        initial_value: GrownValue = 0.0,
        budget: str | Budget = "layer",
        ranks: Any = "auto",
    ) -> None:
        super().__init__(
            model,
            optimizer,
            schedule=cosine_schedule(total_steps, update_interval, drop_fraction, schedule),
            growth=GradientGrowth(pooling),
            drop_score=drop_score,
            regrow_dropped=regrow_dropped,
            initial_value=initial_value,
            budget=layer_or_global(budget),
            ranks=ranks,
        )


class SET(SparseTrainer):
    """Drop the smallest magnitudes, grow at random.

    Source: Mocanu et al. 2018, "Scalable training of artificial neural networks with adaptive
    sparse connectivity inspired by network science". It differs from `RigL` in growth alone, so the
    share of blocks falls by the cosine here too; pass a `ConstantSchedule` for the paper's.

    Args:
        model, optimizer, drop_score, regrow_dropped, initial_value, ranks: see `SparseTrainer`.
        total_steps, update_interval, drop_fraction, schedule: see `RigL`.
        seed, generator: of the positions drawn; see `RandomGrowth`.
        budget: see `RigL`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        total_steps: int | None = None,
        update_interval: int | None = None,
        drop_fraction: float | None = None,
        schedule: Schedule | None = None,
        seed: int | None = None,
        generator: torch.Generator | None = None,
        drop_score: DropScore = magnitude,
        regrow_dropped: bool = False,
        initial_value: GrownValue = 0.0,
        budget: str | Budget = "layer",
        ranks: Any = "auto",
    ) -> None:
        super().__init__(
            model,
            optimizer,
            schedule=cosine_schedule(total_steps, update_interval, drop_fraction, schedule),
            growth=RandomGrowth(seed, generator),
            drop_score=drop_score,
            regrow_dropped=regrow_dropped,
            initial_value=initial_value,
            budget=layer_or_global(budget),
            ranks=ranks,
        )
