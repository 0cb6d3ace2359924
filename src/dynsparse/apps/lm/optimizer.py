"""The optimizer, and the learning rate over the training: warm-up, then decay by a power."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from dynsparse.apps.common.optimizer import Groups, make_optimizer
from dynsparse.apps.lm.options import Options

# The arguments of each optimizer with their defaults.
_ARGUMENTS: dict[str, dict[str, Any]] = {
    "GradientDescent": {"weight_decay": 0.0},
    "Momentum": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.0},
    "Adam": {"beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": 0.1},
}


def build_optimizer(options: Options, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of the options; weight decay, decoupled with Adam, is of matrices alone.

    Raises:
        ValueError: an argument the optimizer does not have, or a value it does not take.
    """
    return make_optimizer(
        options,
        _ARGUMENTS[options.optimizer],
        partial(_groups, model),
        options.peak_learning_rate,
        torch.optim.AdamW,
    )


def _groups(model: nn.Module, weight_decay: float) -> Groups:
    """Matrices, which decay, and the rest: biases, norms and positions."""
    decaying: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        is_matrix = name.rpartition(".")[2] in ("weight", "values") and "norm" not in name
        (decaying if is_matrix else others).append(parameter)
    return [
        {"params": decaying, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]


def learning_rate(options: Options, step: int) -> float:
    """The rate of step `step`, from 0: stateless, so a resumed training agrees.

    It rises in proportion to the steps for `warm_up`, then falls from the peak to the least
    rate as (1 - share of the `cooldown_steps` passed) ^ decay_power, and stays there.
    """
    peak, least = options.peak_learning_rate, options.min_learning_rate
    if step < options.warm_up:
        return peak * (step + 1) / options.warm_up
    cooldown = options.cooldown_steps or options.steps - options.warm_up
    passed = min(1.0, (step - options.warm_up) / cooldown)
    return least + (peak - least) * (1 - passed) ** options.decay_power
