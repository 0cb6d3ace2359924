"""DeepR: a connection has a sign for life, and leaves when its weight crosses zero."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from dynsparse.checks import check_not_negative
from dynsparse.nn import SparseLinear
from dynsparse.pattern import Rewiring
from dynsparse.training.budgets import Budget, Counts, Survey
from dynsparse.training.grow import RandomGrowth
from dynsparse.training.initial import learning_rate_of
from dynsparse.training.schedule import ConstantSchedule
from dynsparse.training.trainer import SparseTrainer

__all__ = ["DeepR", "SignBudget"]


class SignBudget(Budget):
    """All blocks of negative score leave, and as many join: no more than there is room for."""

    def counts(self, survey: Survey) -> dict[str, Counts]:
        found = {}
        for name in survey.patterns:
            count = min(int((survey.scores(name) < 0).sum()), survey.room(name, 0))
            found[name] = Counts(count, count)
        return found


class DeepR(SparseTrainer):
    """Weights that change their sign leave; as many join at random, with a sign drawn for them.

    After the optimizer's step every weight w with the sign s loses learning rate * l1 * s, and gets
    noise of the standard deviation sqrt(2 * learning rate * temperature). An update drops the
    weights with s w < 0; blocks when the sum of s w over the block is below 0. Grown weights begin
    at zero.

    Source: Bellec et al. 2018, "Deep Rewiring: Training very sparse deep networks", algorithm 1.
    It differs from the paper in that the number of connections is constant per layer, not over
    all of them, and what an update drops it does not grow again. With an `update_interval` above 1
    a weight may cross zero and come back unnoticed. The paper's noise belongs to plain gradient
    descent; with other optimizers it is a heuristic.

    Args:
        model, optimizer: see `SparseTrainer`.
        total_steps: optimizer steps of the whole training; the pattern may change until its end.
        update_interval: steps between updates; 1 is the paper's.
        l1: strength of the pull to zero, at least 0.
        temperature: of the noise, at least 0.
        seed, generator: of the positions, signs and noise drawn; see `RandomGrowth`.
    """

    growth: RandomGrowth

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        total_steps: int,
        update_interval: int = 1,
        l1: float = 1e-4,
        temperature: float = 0.0,
        seed: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self.l1 = check_not_negative("l1", l1)
        self.temperature = check_not_negative("temperature", temperature)
        super().__init__(
            model,
            optimizer,
            schedule=ConstantSchedule(total_steps, update_interval, drop_fraction=1.0),
            growth=RandomGrowth(seed, generator),
            budget=SignBudget(),
        )
        self.signs = {name: self._first_signs(layer.values) for name, layer in self.layers.items()}

    def _first_signs(self, values: Tensor) -> Tensor:
        signs = values.detach().sign().to(torch.int8)
        return torch.where(signs == 0, self._draw_signs(signs.shape).to(signs.device), signs)

    def _draw_signs(self, shape: torch.Size) -> Tensor:
        coins = torch.randint(2, shape, generator=self.growth.generator, dtype=torch.int8)
        return coins.mul_(2).sub_(1)

    @torch.no_grad()
    def _after_step(self) -> None:
        for name, layer in self._trained().items():
            values = layer.values
            rate = learning_rate_of(self.optimizer, values)
            if self.l1:
                values.sub_(self.signs[name].to(values), alpha=rate * self.l1)
            if self.temperature:
                noise = torch.randn(
                    values.shape, generator=self.growth.generator, dtype=values.dtype
                )
                values.add_(noise.to(values), alpha=math.sqrt(2 * rate * self.temperature))

    def _scores(self, name: str, layer: SparseLinear) -> Tensor:
        aligned = layer.values.detach() * self.signs[name]
        return aligned if aligned.dim() == 1 else aligned.sum((1, 2))

    def _rewired(self, name: str, rewiring: Rewiring) -> None:
        signs = self.signs[name]
        shape = torch.Size([len(rewiring.grown), *signs.shape[1:]])
        self.signs[name] = rewiring.apply(signs, self._draw_signs(shape))

    def _own_options(self) -> dict[str, float]:
        return {"l1": self.l1, "temperature": self.temperature}

    def _own_state(self) -> dict[str, Tensor]:
        return dict(self.signs)

    def _load_own_state(self, state: dict[str, Tensor]) -> None:
        self.signs = {n: state[n].to(layer.values.device) for n, layer in self.layers.items()}
