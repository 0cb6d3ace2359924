"""MEST: a drop score that spares weights the loss still pulls at, and growth at random."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dynsparse.checks import check_flag
from dynsparse.training.algorithms.choices import cosine_schedule
from dynsparse.training.budgets import LayerBudget, SoftBudget
from dynsparse.training.drop import MagnitudeGradient
from dynsparse.training.grow import RandomGrowth
from dynsparse.training.schedule import CosineSchedule, ElasticSchedule, Schedule
from dynsparse.training.trainer import GrownValue, SparseTrainer


class MEST(SparseTrainer):
    """Drop the smallest |w| + gradient_weight |dL/dw|, grow at random, less and less.

    With `soft_memory_bound` an update first drops what a layer has beyond its blocks of the start
    and then grows the schedule's share on top of them, so that new blocks compete with old ones
    only after they were trained; the last update cuts back to the blocks of the start. Values,
    optimizer state and time are larger by that share in between.

    Source: Yuan et al. 2021, "MEST: Accurate and Fast Memory-Economic Sparse Training Framework on
    the Edge": the score, elastic mutation (EM) and the soft memory bound (&S). It differs from the
    paper in how mutation falls: by a cosine here, in a few steps chosen by hand there. The paper's
    data efficiency is no part of it.

    Args:
        model, optimizer, regrow_dropped, initial_value, ranks: see `SparseTrainer`.
        total_steps, update_interval, drop_fraction: see `RigL`.
        schedule: in place of these three; with a soft memory bound its last update must replace
            nothing, as that of `ElasticSchedule`.
        gradient_weight: the lambda of the score; 0 leaves the magnitude alone.
        soft_memory_bound: see above.
        seed, generator: of the positions drawn; see `RandomGrowth`.
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
        gradient_weight: float = 0.01,
        soft_memory_bound: bool = False,
        seed: int | None = None,
        generator: torch.Generator | None = None,
        regrow_dropped: bool = False,
        initial_value: GrownValue = 0.0,
        ranks: Any = "auto",
    ) -> None:
        check_flag("soft_memory_bound", soft_memory_bound)
        kind = ElasticSchedule if soft_memory_bound else CosineSchedule
        super().__init__(
            model,
            optimizer,
            schedule=cosine_schedule(total_steps, update_interval, drop_fraction, schedule, kind),
            growth=RandomGrowth(seed, generator),
            drop_score=MagnitudeGradient(gradient_weight),
            regrow_dropped=regrow_dropped,
            initial_value=initial_value,
            budget=SoftBudget() if soft_memory_bound else LayerBudget(),
            ranks=ranks,
        )
