"""The optimizers by the names of the original programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dynsparse.apps.common.options import TrainingOptions
from dynsparse.checks import is_number

Groups = list[dict[str, Any]]


def make_optimizer(
    options: TrainingOptions,
    defaults: dict[str, Any],
    groups: Callable[[float], Groups],
    rate: float,
    adam: Callable[..., torch.optim.Optimizer],
) -> torch.optim.Optimizer:
    """The optimizer of the options.

    Args:
        defaults: the arguments the optimizer has here, with their defaults.
        groups: the parameters for a weight decay, as torch's optimizers take them.
        rate: the first learning rate.
        adam: what "Adam" stands for.

    Raises:
        ValueError: an argument the optimizer does not have, or a value it does not take.
    """
    arguments = dict(defaults)
    for name, value in options.optimizer_arg.items():
        if name not in arguments:
            raise ValueError(
                f"--optimizer-arg: expected an argument of {options.optimizer} "
                f"({', '.join(arguments)}), got {name!r}"
            )
        switch = isinstance(arguments[name], bool)
        if not (isinstance(value, bool) if switch else is_number(value)):
            kind = "true or false" if switch else "a number"
            raise ValueError(f"--optimizer-arg: {name}: expected {kind}, got {value!r}")
        arguments[name] = value
    made = adam
    if options.optimizer == "Adam":
        arguments["betas"] = arguments.pop("beta1"), arguments.pop("beta2")
        arguments["eps"] = arguments.pop("epsilon")
    else:
        made = torch.optim.SGD
        if not arguments.get("momentum"):
            # Without momentum there is nothing nesterov could look ahead with.
            arguments.pop("nesterov", None)
    # fused: one call per step for all parameters; at small batches that is what a step costs.
    try:
        return made(groups(arguments["weight_decay"]), rate, fused=True, **arguments)
    except ValueError as error:
        raise ValueError(f"--optimizer-arg: {error}") from None
