"""SNFS: growth by the momentum of the gradient, and blocks that move to the layers of large one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dynsparse.checks import check_flag
from dynsparse.training.algorithms.choices import cosine_schedule
from dynsparse.training.budgets import LayerBudget, MomentumBudget
from dynsparse.training.drop import DropScore, magnitude
from dynsparse.training.grow import GradientGrowth
from dynsparse.training.history import DenseMomentum, History, WindowMomentum
from dynsparse.training.schedule import Schedule
from dynsparse.training.trainer import GrownValue, SparseTrainer


class SNFS(SparseTrainer):
    """Drop the smallest magnitudes, grow where the momentum of the gradient is largest.

    How many of the dropped blocks a layer gets back is its share of the mean momentum magnitude, so
    layers change their capacity while the total stays.

    Source: Dettmers and Zettlemoyer 2019, "Sparse Networks from Scratch: Faster Training without
    Losing Performance". It differs from the paper in the momentum: the paper's is that of a dense
    gradient in every step. Here it is summed over the last `window` steps before an update, from
    their x and dY, which needs no dense matrix; `window=None` is the paper's, with its cost. It is
    the momentum of the gradient, not the optimizer's, which exists for present weights only.

    Args:
        model, optimizer, drop_score, regrow_dropped, initial_value, ranks: see `SparseTrainer`. The
            authors' code has `regrow_dropped=True`.
        total_steps, update_interval, drop_fraction, schedule, pooling: see `RigL`.
        momentum: decay per step, in [0, 1).
        window: steps that the momentum looks at; x and dY of so many steps are held at a time. None
            looks at all, in a dense matrix per layer.
        redistribute: False gives each layer back what it dropped.
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
        momentum: float = 0.9,
        window: int | None = 10,
        redistribute: bool = True,
        pooling: str = "sum",
        drop_score: DropScore = magnitude,
        regrow_dropped: bool = False,
        initial_value: GrownValue = 0.0,
        ranks: Any = "auto",
    ) -> None:
        history: History
        history = DenseMomentum(momentum) if window is None else WindowMomentum(momentum, window)
        super().__init__(
            model,
            optimizer,
            schedule=cosine_schedule(total_steps, update_interval, drop_fraction, schedule),
            growth=GradientGrowth(pooling),
            drop_score=drop_score,
            regrow_dropped=regrow_dropped,
            initial_value=initial_value,
            budget=MomentumBudget() if check_flag("redistribute", redistribute) else LayerBudget(),
            history=history,
            ranks=ranks,
        )
