"""RigL as commonly implemented: dense weights times masks, growth by the dense gradient."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dynsparse.bench.contenders import MaskedLinear
from dynsparse.ops.grow import select
from dynsparse.training.schedule import Schedule


class MaskedRigL:
    """RigL on masks: `trainer.step()` as in `dynsparse.RigL`, from dense gradients.

    As in `SparseTrainer`, an update does not grow what it drops. Every state tensor of the
    optimizer with the weight's shape starts at zero where a weight was dropped or grown.

    Source: Evci et al. 2020, "Rigging the Lottery: Making All Tickets Winners".
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Schedule
    ) -> None:
        self.layers = [m for m in model.modules() if isinstance(m, MaskedLinear)]
        self.optimizer = optimizer
        self.schedule = schedule
        self.steps = 0
        self._arm()

    def _arm(self) -> None:
        for layer in self.layers:
            layer.keep_gradient = self.schedule.is_due(self.steps + 1)

    @torch.no_grad()
    def step(self) -> None:
        """After backward: the optimizer's step, then the pattern update if one is due."""
        self.optimizer.step()
        self.steps += 1
        if self.schedule.is_due(self.steps):
            for layer in self.layers:
                self._update(layer)
        self._arm()

    def _update(self, layer: MaskedLinear) -> None:
        held = layer.mask.flatten().bool()
        nnz = int(held.sum())
        count = min(self.schedule.drop_count(self.steps, nnz), held.numel() - nnz)
        if layer.product.grad is None:
            raise RuntimeError("no gradient reached a masked layer: call step() after backward()")
        score = layer.weight.abs().flatten()
        drop = select(score.masked_fill_(~held, torch.inf), count, largest=False)
        gradient = layer.product.grad.abs().flatten()
        grow = select(gradient.masked_fill_(held, -1.0), count)
        del layer.product
        layer.mask.view(-1)[drop] = 0
        layer.mask.view(-1)[grow] = 1
        state = self.optimizer.state[layer.weight].values()
        for tensor in (layer.weight, *state):
            if isinstance(tensor, Tensor) and tensor.shape == layer.weight.shape:
                tensor.view(-1)[drop] = 0
                tensor.view(-1)[grow] = 0
