"""What `--method` makes: a trainer, a denser beginning for methods that prune, a dense network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dynsparse.apps.common.options import TrainingOptions
from dynsparse.nn import SparseLinear
from dynsparse.pattern import SparsePattern
from dynsparse.training import ApplicationCosine, RoundedDownCosine, SparseTrainer, Static
from dynsparse.training.algorithms import BY_NAME


def replace_sparse(network: nn.Module, dense: Callable[[SparseLinear], nn.Linear]) -> None:
    """What `--method dense` is: the same network with dense(layer) for every sparse layer."""
    for module in list(network.modules()):
        for name, layer in list(module.named_children()):
            if isinstance(layer, SparseLinear):
                setattr(module, name, dense(layer))


def begin_denser(method: str, network: nn.Module, generator: torch.Generator) -> dict[str, float]:
    """For methods that prune: give sparse layers their first pattern; returns the last densities.

    The layers come with the densities asked for, which are those of the end. The result is
    {layer: density}, empty for all other methods.
    """
    if method not in BY_NAME or BY_NAME[method].least_first is None:
        return {}
    layers = {n: m for n, m in network.named_modules() if isinstance(m, SparseLinear)}
    final = {name: layer.density for name, layer in layers.items()}
    for name, layer in layers.items():
        layer.resizable = True
        layer.set_pattern(
            SparsePattern.random(
                layer.pattern.shape,
                BY_NAME[method].first_density(final[name]),
                block_size=layer.block_size,
                generator=generator,
            )
        )
        layer.reset_parameters(generator)
    return final


def build_trainer(
    options: TrainingOptions,
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    total_steps: int,
    update_interval: int,
    final: dict[str, float],
    generator: torch.Generator,
) -> SparseTrainer | None:
    """The trainer of `options.method`; None for a network without sparse layers.

    Args:
        total_steps: steps until the patterns stay; update_interval: steps between updates.
        final: what `begin_denser` returned.
        generator: draws the seed of random growth.

    Raises:
        ValueError: a schedule that does not fit the steps.
    """
    if not any(isinstance(module, SparseLinear) for module in network.modules()):
        return None
    if options.method not in BY_NAME:
        return Static(network, optimizer)
    algorithm = BY_NAME[options.method]
    known: dict[str, Any] = {
        "pooling": options.pooling_type.lower(),
        "densities": final,
        "scope": "layer",
    }
    if "schedule" in algorithm.arguments:
        known["schedule"] = _schedule(options, total_steps, update_interval)
    else:
        known |= {
            "total_steps": total_steps,
            "update_interval": update_interval,
            "drop_fraction": options.prune_ratio,
        }
    if "seed" in algorithm.arguments:
        known["seed"] = int(torch.randint(2**62, (), generator=generator))
    taken = {name: value for name, value in known.items() if name in algorithm.arguments}
    return algorithm.trainer(network, optimizer, **taken)


def _schedule(
    options: TrainingOptions, total_steps: int, update_interval: int
) -> ApplicationCosine:
    settings = dict(options.cosine_prune_schedule)
    # The flag counts pattern updates, the schedule counts optimizer steps.
    settings["zero_steps"] = settings.get("zero_steps", 0) * update_interval
    kind = RoundedDownCosine if options.prune_rounding == "down" else ApplicationCosine
    try:
        return kind(total_steps, update_interval, options.prune_ratio, **settings)
    except ValueError as error:
        raise ValueError(f"--cosine-prune-schedule: {error}") from None
