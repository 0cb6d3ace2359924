"""Steps whose loss is scaled, as float16 needs it."""

from __future__ import annotations

import torch

from dynsparse.checks import check_kind
from dynsparse.pattern import Rewiring
from dynsparse.training.initial import GradientStep
from dynsparse.training.trainer import SparseTrainer

__all__ = ["scaled_step"]


def scaled_step(trainer: SparseTrainer, scaler: torch.amp.GradScaler) -> dict[str, Rewiring] | None:
    """`trainer.step()` after `scaler.scale(loss).backward()`, and `scaler.update()`.

    A step that the scaler skips, because the scaled gradients overflow, is none: the trainer does
    not count it, and an update that was due comes with the next step. Growth ranks gradients that
    are scaled, which changes no rank.

    Args:
        trainer: any of this library.
        scaler: `torch.amp.GradScaler`; one that is not enabled makes this `trainer.step()`.

    Returns:
        The rewirings by layer name when patterns changed, otherwise None.

    Raises:
        ValueError: grown weights that start with a step against their gradient (`GradientStep`),
            which would be the scaled one; an optimizer that decides by itself which steps it skips
            (`fused=True`).
        RuntimeError, TypeError, ValueError: see `SparseTrainer.step`.
    """
    check_kind("trainer", trainer, SparseTrainer, "a trainer such as RigL")
    check_kind("scaler", scaler, torch.amp.GradScaler, "a torch.amp.GradScaler")
    optimizer = trainer.optimizer
    if scaler.is_enabled() and isinstance(trainer.initial_value, GradientStep):
        raise ValueError(
            "expected grown weights that start with a number, got a GradientStep, which would go "
            "against the scaled gradient: use bfloat16, which needs no scaler"
        )
    if scaler.is_enabled() and getattr(optimizer, "_step_supports_amp_scaling", False):
        raise ValueError(
            f"expected an optimizer whose steps the scaler skips, got {type(optimizer).__name__} "
            "with fused=True, which skips them unheard: leave fused out"
        )
    taken: list[bool] = []

    def before(*_: object) -> None:
        trainer.before_optimizer_step()
        taken.append(True)

    # The scaler steps the optimizer where the gradients are finite, and only there.
    hook = optimizer.register_step_pre_hook(before)
    try:
        scaler.step(optimizer)
    finally:
        hook.remove()
    scaler.update()
    return trainer.after_optimizer_step() if taken else None
