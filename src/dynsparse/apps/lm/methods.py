"""The training algorithms by the names of `--method`, each made for a language model's options."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from dynsparse.training import (
    MEST,
    SET,
    SNFS,
    ApplicationCosine,
    RigL,
    Schedule,
    SparseTrainer,
    Static,
)

if TYPE_CHECKING:
    from dynsparse.apps.lm.options import Options

__all__ = ["METHODS", "build_trainer"]

Maker = Callable[["Options", nn.Module, torch.optim.Optimizer, torch.Generator], SparseTrainer]


def _rigl(
    options: Options, model: nn.Module, optimizer: torch.optim.Optimizer, _: torch.Generator
) -> SparseTrainer:
    pooling = options.pooling_type.lower()
    return RigL(model, optimizer, schedule=_schedule(options), pooling=pooling)


def _set(
    options: Options,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    generator: torch.Generator,
) -> SparseTrainer:
    seed = int(torch.randint(2**62, (), generator=generator))
    return SET(model, optimizer, schedule=_schedule(options), seed=seed)


def _static(
    options: Options, model: nn.Module, optimizer: torch.optim.Optimizer, _: torch.Generator
) -> SparseTrainer:
    return Static(model, optimizer)


def _snfs(
    options: Options, model: nn.Module, optimizer: torch.optim.Optimizer, _: torch.Generator
) -> SparseTrainer:
    pooling = options.pooling_type.lower()
    return SNFS(model, optimizer, schedule=_schedule(options), pooling=pooling)


def _mest(
    options: Options,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    generator: torch.Generator,
) -> SparseTrainer:
    seed = int(torch.randint(2**62, (), generator=generator))
    return MEST(model, optimizer, schedule=_schedule(options), seed=seed)


METHODS: dict[str, Maker] = {
    "rigl": _rigl,
    "set": _set,
    "snfs": _snfs,
    "mest": _mest,
    "static": _static,
}


def build_trainer(
    options: Options,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    generator: torch.Generator,
) -> SparseTrainer | None:
    """The trainer of `options.method`, None for dense.

    Raises:
        ValueError: a schedule that does not fit the steps.
    """
    if options.method == "dense":
        return None
    return METHODS[options.method](options, model, optimizer, generator)


def _schedule(options: Options) -> Schedule:
    """The application's cosine, falling to nothing at `prune_end` of the training."""
    settings = dict(options.cosine_prune_schedule)
    # The flag counts pattern updates, the schedule counts optimizer steps.
    settings["zero_steps"] = settings.get("zero_steps", 0) * options.update_interval
    end = max(1, round(options.prune_end * options.steps))
    try:
        return ApplicationCosine(end, options.update_interval, options.prune_ratio, **settings)
    except ValueError as error:
        raise ValueError(f"--cosine-prune-schedule: {error}") from None
