"""The optimizers' defaults, and the learning rate over the training."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from dynsparse.apps.common.optimizer import Groups, make_optimizer
from dynsparse.apps.pictures.options import PictureOptions

# name: (how the learning rate grows with the batch, arguments with their defaults)
_OPTIMIZERS: dict[str, tuple[float, dict[str, Any]]] = {
    "GradientDescent": (1.0, {}),
    "Momentum": (1.0, {"momentum": 0.9, "nesterov": True}),
    "Adam": (0.5, {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8}),
}
_BATCH = 16
# The original's rates after each fifth of the training, as shares of the first.
_FIFTHS = (1.0, 0.5, 0.25, 0.05, 0.005)
# Evci et al. 2020, "Rigging the Lottery", section 4.2: a fifth after every 30,000 of 97,656 steps.
_DROP, _DROP_EVERY = 0.2, 30_000 / 97_656


def build_optimizer(options: PictureOptions, network: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of `options` over all parameters.

    Raises:
        ValueError: an argument the optimizer does not have, or a value it does not take.
    """

    def groups(weight_decay: float) -> Groups:
        return [{"params": list(network.parameters()), "weight_decay": weight_decay}]

    _, arguments = _OPTIMIZERS[options.optimizer]
    defaults = {**arguments, "weight_decay": options.decays[options.optimizer]}
    return make_optimizer(options, defaults, groups, first_learning_rate(options), torch.optim.Adam)


def first_learning_rate(options: PictureOptions) -> float:
    """The rate the training starts with: as given, or the default scaled to the batch size.

    In proportion to the batch for the SGD family (Goyal et al. 2017, arXiv:1706.02677), to its
    square root for Adam (Malladi et al. 2022, arXiv:2205.10287).
    """
    if options.learning_rate is not None:
        return options.learning_rate
    power, _ = _OPTIMIZERS[options.optimizer]
    return options.rates[options.optimizer] * (options.batch_size / _BATCH) ** power


def learning_rate(options: PictureOptions, step: int, total_steps: int) -> float:
    """The rate of step `step` in [0, total_steps): stateless, so a resumed training agrees."""
    first = first_learning_rate(options)
    passed = step / total_steps
    if options.decay == "cosine":
        return first * 0.5 * (1 + math.cos(math.pi * passed))
    if options.decay == "drops":
        return first * _DROP ** int(passed / _DROP_EVERY)
    if options.decay == "steps":
        return first * _FIFTHS[int(passed * len(_FIFTHS))]
    return first
