"""What sparse training mostly is elsewhere: a mask over a dense matrix, in every pass.

The baseline of the benchmarks, written as favourably as plain torch allows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dynsparse.nn import SparseConv1d, SparseConv2d, SparseLinear
from dynsparse.ops.grow import select
from dynsparse.training.schedule import Schedule


class MaskedLinear(nn.Linear):
    """The same layer as a `SparseLinear`, as a dense weight [out, in] times a mask.

    Attributes:
        mask: [out, in] of the weight's type, 1 where a weight is present.
        keep_gradient: whether the next backward keeps the dense gradient, in `product.grad`.
    """

    mask: Tensor
    product: Tensor

    @torch.no_grad()
    def __init__(self, layer: SparseLinear) -> None:
        dtype = layer.values.dtype
        super().__init__(
            layer.in_features, layer.out_features, bias=layer.bias is not None, dtype=dtype
        )
        self.register_buffer("mask", layer.pattern.to_mask().to(dtype))
        self.weight.copy_(layer.to_dense())
        if layer.bias is not None:
            self.bias.copy_(layer.bias)
        self.keep_gradient = False

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]; autograd masks the gradient of the weight, too."""
        product = self.weight * self.mask
        if self.keep_gradient:
            product.retain_grad()
            self.product = product
        return F.linear(x, product, self.bias)


def masked_twin(model: nn.Sequential) -> nn.Sequential:
    """The same network with `MaskedLinear` for `SparseLinear`; other layers are copied."""
    twins: list[nn.Module] = []
    for layer in model:
        if isinstance(layer, (SparseConv1d, SparseConv2d)):
            raise TypeError(f"masked_twin takes linear layers, got {type(layer).__name__}")
        if isinstance(layer, SparseLinear):
            twins.append(MaskedLinear(layer))
        elif isinstance(layer, nn.Linear):
            twin = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
            twin.load_state_dict(layer.state_dict())
            twins.append(twin)
        else:
            twins.append(layer)
    return nn.Sequential(*twins)


class MaskedRigL:
    """RigL on masks: `trainer.step()` as in `dynsparse.RigL`, from dense gradients.

    What is dropped is not grown at once, as in `SparseTrainer`. Every state tensor of the optimizer
    that has the weight's shape starts at zero where a weight was dropped or grown.

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
