"""Steps whose loss is scaled, as float16 needs it."""

from __future__ import annotations

import torch

from dynsparse.checks import check_kind
from dynsparse.pattern import Rewiring
from dynsparse.training.trainer import SparseTrainer


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
    rewirings = trainer._step_by(lambda: scaler.step(trainer.optimizer))
    scaler.update()
    return rewirings
