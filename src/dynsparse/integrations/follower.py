"""A sparse trainer that follows an optimizer which another library steps."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dynsparse.checks import check_kind
from dynsparse.training import SparseTrainer

__all__ = ["Algorithm", "Follower"]

Algorithm = Callable[..., SparseTrainer]
"""`ds.RigL` and its kin, or a function of (model, optimizer) that returns a trainer."""


class Follower:
    """Makes the sparse trainer when training begins, and lets it follow the optimizer's steps.

    Args:
        algorithm: called as algorithm(model, optimizer, **options).
        options: `total_steps` is filled in where the algorithm takes it and neither it nor a
            `schedule` is given.

    Attributes:
        trainer: the `SparseTrainer`, None before `start`.
    """

    def __init__(self, algorithm: Algorithm, options: dict[str, Any]) -> None:
        if not callable(algorithm):
            raise TypeError(
                "expected an algorithm such as dynsparse.RigL, or a function of (model, optimizer) "
                f"that returns a trainer, got {algorithm!r}"
            )
        check_kind("options", options, dict, "arguments by name")
        self.trainer: SparseTrainer | None = None
        self._algorithm = algorithm
        self._options = options
        self._saved: dict[str, Any] | None = None
        self._follows = False

    def start(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, total_steps: int | None
    ) -> SparseTrainer:
        """Make the trainer, continue from a state loaded before, and follow `optimizer`.

        Raises:
            TypeError: the algorithm returns something else than a trainer.
            ValueError: what the algorithm refuses; a state that does not fit.
        """
        self.stop()
        options = dict(self._options)
        takes_total = "total_steps" in inspect.signature(self._algorithm).parameters
        if takes_total and total_steps is not None and "schedule" not in options:
            options.setdefault("total_steps", total_steps)
        trainer = self._algorithm(model, optimizer, **options)
        if not isinstance(trainer, SparseTrainer):
            raise TypeError(
                f"the algorithm must return a trainer such as dynsparse.RigL, got {trainer!r}"
            )
        if self._saved is not None:
            trainer.load_state_dict(self._saved)
            self._saved = None
        self.trainer, self._follows = trainer, True
        return trainer

    def stop(self) -> None:
        """Follow no more; the trainer stays, to be looked at."""
        if self.trainer is not None:
            self.trainer.stop()
        self._follows = False

    def state_dict(self) -> dict[str, Any] | None:
        """The trainer's state, or the one loaded for a trainer to come, or None."""
        return self._saved if self.trainer is None else self.trainer.state_dict()

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Continue from `state`: now, or when the trainer is made."""
        if state is None:
            return
        if self.trainer is None or not self._follows:
            self._saved = state
        else:
            self.trainer.load_state_dict(state)
