"""The algorithms that choose the components of a `SparseTrainer`, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from dynsparse._core.checks import check_choice, check_flag
from dynsparse.training.budgets import (
    Budget,
    GlobalBudget,
    GradualBudget,
    LayerBudget,
    MomentumBudget,
    SoftBudget,
)
from dynsparse.training.drop import DropScore, MagnitudeGradient, magnitude
from dynsparse.training.grow import GradientGrowth, GrownValue, NoGrowth, RandomGrowth
from dynsparse.training.history import DenseMomentum, History, WindowMomentum
from dynsparse.training.schedule import (
    CosineSchedule,
    ElasticSchedule,
    GradualSchedule,
    Schedule,
    default_interval,
)
from dynsparse.training.trainer import SparseTrainer


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
        update_interval: steps between updates; defaults to 100, or a tenth of `total_steps` below
            1,000 steps.
        drop_fraction: share of a layer's blocks that the first update replaces; defaults to 0.3.
        schedule: replaces the cosine schedule of these three.
        pooling: how the gradient magnitudes of a block become its score: "sum", "avg", "max", or
            "none", which ranks as "sum".
        budget: "layer": every layer replaces its own share; "global": the lowest scores of all
            layers together leave, and each layer grows as many as it lost (see `GlobalBudget`);
            or another budget.
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
            budget=_make_budget(budget),
            ranks=ranks,
        )


class SET(SparseTrainer):
    """Drop the smallest magnitudes, grow at random.

    Source: Mocanu et al. 2018, "Scalable training of artificial neural networks with adaptive
    sparse connectivity inspired by network science". Only growth differs from `RigL`, so the share
    of blocks falls by the cosine here too; pass a `ConstantSchedule` for the paper's.

    Args:
        model, optimizer, drop_score, regrow_dropped, initial_value, ranks: see `SparseTrainer`.
        total_steps, update_interval, drop_fraction, schedule, budget: see `RigL`.
        seed: the seed of the random positions; see `RandomGrowth`.
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
            growth=RandomGrowth(seed),
            drop_score=drop_score,
            regrow_dropped=regrow_dropped,
            initial_value=initial_value,
            budget=_make_budget(budget),
            ranks=ranks,
        )


class MEST(SparseTrainer):
    """Drop the smallest |w| + gradient_weight |dL/dw|, grow at random, less and less.

    With `soft_memory_bound` an update first drops what a layer has beyond its initial number of
    blocks and then grows the schedule's share on top of it, so that new blocks compete with old
    ones only once they have been trained; the last update cuts back to the initial number. In
    between, values, optimizer state and time are larger by that share.

    Source: Yuan et al. 2021, "MEST: Accurate and Fast Memory-Economic Sparse Training Framework on
    the Edge": the score, elastic mutation (EM) and the soft memory bound (&S). Here mutation falls
    by a cosine, in the paper in a few steps chosen by hand. The paper's data efficiency is left
    out.

    Args:
        model, optimizer, regrow_dropped, initial_value, ranks: see `SparseTrainer`.
        total_steps, update_interval, drop_fraction: see `RigL`.
        schedule: in place of these three; with a soft memory bound its last update must replace
            nothing, as that of `ElasticSchedule`.
        gradient_weight: the lambda of the score; with 0 only the magnitude counts.
        soft_memory_bound: see above.
        seed: the seed of the random positions; see `RandomGrowth`.
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
            growth=RandomGrowth(seed),
            drop_score=MagnitudeGradient(gradient_weight),
            regrow_dropped=regrow_dropped,
            initial_value=initial_value,
            budget=SoftBudget() if soft_memory_bound else LayerBudget(),
            ranks=ranks,
        )


class SNFS(SparseTrainer):
    """Drop the smallest magnitudes, grow where the momentum of the gradient is largest.

    A layer gets back its share of the mean momentum magnitude, so layers change their capacity
    while the total stays.

    Source: Dettmers and Zettlemoyer 2019, "Sparse Networks from Scratch: Faster Training without
    Losing Performance". The paper's momentum is that of a dense gradient in every step. Here it is
    summed over the last `window` steps before an update, from their x and dY, which needs no dense
    matrix; `window=None` is the paper's, with its cost. It is the momentum of the gradient, not the
    optimizer's, which exists for present weights only.

    Args:
        model, optimizer, drop_score, regrow_dropped, initial_value, ranks: see `SparseTrainer`. The
            authors' code has `regrow_dropped=True`.
        total_steps, update_interval, drop_fraction, schedule, pooling: see `RigL`.
        momentum: decay per step, in [0, 1).
        window: number of steps in the momentum; x and dY of that many steps are held at a time.
            None counts all steps, with a dense matrix per layer.
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


class GMP(SparseTrainer):
    """Gradual magnitude pruning: the smallest magnitudes leave, nothing joins.

    The density falls from that of the layers to `final_density` along a cubic, and the layers
    shrink with it: values, optimizer state, memory and time. Begin with layers of density 1 for the
    paper's method.

    Source: Zhu and Gupta 2017, "To prune, or not to prune: exploring the efficacy of pruning for
    model compression". Here pruned weights are gone; the paper's masked dense weights can come back
    when the optimizer moves them.

    Args:
        model, optimizer, drop_score, ranks: see `SparseTrainer`.
        final_density: the density of all layers together at the end, in (0, 1]; optional when
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
        interval = default_interval(total_steps) if update_interval is None else update_interval
        super().__init__(
            model,
            optimizer,
            schedule=GradualSchedule(total_steps, interval, start_fraction, end_fraction),
            growth=NoGrowth(),
            drop_score=drop_score,
            budget=GradualBudget(
                final_density, scope=scope, allocation=allocation, densities=densities
            ),
            ranks=ranks,
        )


class GraNet(SparseTrainer):
    """Gradual pruning; every update also replaces some blocks, growing by gradient.

    The density falls as in `GMP`, from dense or, sparse to sparse, from the density of the layers.
    Each update prunes to its density, then replaces a share of the rest: the smallest magnitudes
    leave, the largest gradients join. The share falls by a cosine over the whole training, and
    replacing goes on after pruning has ended.

    Source: Liu et al. 2021, "Sparse Training via Boosting Pruning Plasticity with
    Neuroregeneration". In the authors' code a block that is pruned and regrown in one update starts
    at zero if the pruning, rather than the replacing, took it; here it keeps its weight, and one
    block always stays in every layer.

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
        interval = default_interval(total_steps) if update_interval is None else update_interval
        super().__init__(
            model,
            optimizer,
            schedule=GradualSchedule(
                total_steps, interval, start_fraction, end_fraction, drop_fraction
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


def cosine_schedule(
    total_steps: int | None,
    update_interval: int | None,
    drop_fraction: float | None,
    schedule: Schedule | None,
    kind: type[CosineSchedule] = CosineSchedule,
    **more: float,
) -> Schedule:
    """Return `schedule` or, if it is None, a schedule of class `kind` with the numbers given.

    Raises:
        ValueError: both are given, or neither.
    """
    numbers = {
        "total_steps": total_steps,
        "update_interval": update_interval,
        "drop_fraction": drop_fraction,
    }
    numbers = {name: value for name, value in numbers.items() if value is not None}
    if schedule is not None:
        if numbers:
            raise ValueError(f"a schedule replaces {', '.join(numbers)}: give one or the other")
        return schedule
    if total_steps is None:
        raise ValueError("give total_steps, the optimizer steps of the whole training, or schedule")
    numbers.setdefault("update_interval", default_interval(total_steps))
    return kind(**numbers, **more)  # type: ignore[arg-type]


def _make_budget(budget: str | Budget) -> Budget:
    """Return the budget of that name, or the budget that was given."""
    if isinstance(budget, Budget):
        return budget
    name = check_choice("budget", budget, ("layer", "global"))
    return LayerBudget() if name == "layer" else GlobalBudget()
