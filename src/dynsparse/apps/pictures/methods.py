"""The training algorithms by the names of `--method`, each made for a program's options."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dynsparse.apps.pictures.options import PictureOptions
from dynsparse.nn import SparseLinear
from dynsparse.pattern import SparsePattern
from dynsparse.training import (
    GMP,
    MEST,
    SET,
    SNFS,
    ApplicationCosine,
    DeepR,
    GraNet,
    RigL,
    SparseTrainer,
    Static,
    TopKAST,
)

__all__ = ["begin_denser", "build_trainer"]


def begin_denser(
    options: PictureOptions, network: nn.Module, generator: torch.Generator
) -> dict[str, float]:
    """For methods that prune: give sparse layers their first pattern; returns the last densities.

    The layers come with the densities asked for, which are those of the end. GMP begins dense,
    GraNet half dense. The result is {layer: density}, empty for all other methods.
    """
    if options.method not in ("gmp", "granet"):
        return {}
    final = {n: m.density for n, m in network.named_modules() if isinstance(m, SparseLinear)}
    for name, density in final.items():
        layer = network.get_submodule(name)
        assert isinstance(layer, SparseLinear)
        first = 1.0 if options.method == "gmp" else max(0.5, density)
        layer.resizable = True
        layer.set_pattern(
            SparsePattern.random(
                layer.pattern.shape, first, block_size=layer.block_size, generator=generator
            )
        )
        layer.reset_parameters(generator)
    return final


def build_trainer(
    options: PictureOptions,
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    total_steps: int,
    update_interval: int,
    final: dict[str, float],
    generator: torch.Generator,
) -> SparseTrainer | None:
    """The trainer of `options.method`; None for a network without sparse layers.

    Raises:
        ValueError: a schedule that does not fit the steps.
    """
    if not any(isinstance(module, SparseLinear) for module in network.modules()):
        return None
    method, pooling = options.method, options.pooling_type.lower()
    times: dict[str, Any] = {"total_steps": total_steps, "update_interval": update_interval}
    if not options.changes_pattern:
        return Static(network, optimizer)
    if method == "gmp":
        return GMP(network, optimizer, **times, densities=final)
    if method == "granet":
        share: dict[str, Any] = {
            "drop_fraction": options.prune_ratio,
            "scope": "layer",
            "densities": final,
        }
        return GraNet(network, optimizer, **times, **share, pooling=pooling)
    if method == "deepr":
        return DeepR(network, optimizer, **times, seed=_seed(generator))
    schedule = _schedule(options, total_steps, update_interval)
    if method == "rigl":
        return RigL(network, optimizer, schedule=schedule, pooling=pooling)
    if method == "snfs":
        return SNFS(network, optimizer, schedule=schedule, pooling=pooling)
    random: dict[str, type[SET | MEST | TopKAST]] = {"set": SET, "mest": MEST, "topkast": TopKAST}
    return random[method](network, optimizer, schedule=schedule, seed=_seed(generator))


def _seed(generator: torch.Generator) -> int:
    return int(torch.randint(2**62, (), generator=generator))


def _schedule(options: PictureOptions, total_steps: int, update_interval: int) -> ApplicationCosine:
    settings = dict(options.cosine_prune_schedule)
    # The flag counts pattern updates, the schedule counts optimizer steps.
    settings["zero_steps"] = settings.get("zero_steps", 0) * update_interval
    try:
        return ApplicationCosine(total_steps, update_interval, options.prune_ratio, **settings)
    except ValueError as error:
        raise ValueError(f"--cosine-prune-schedule: {error}") from None
