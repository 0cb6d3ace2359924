"""Sparse training in a Lightning `Trainer`: one callback."""

from __future__ import annotations

from typing import Any

from dynsparse.integrations import require_package
from dynsparse.integrations.follower import Algorithm, Follower
from dynsparse.training import SparseTrainer
from dynsparse.training.checkpoint import random_state

with require_package("lightning", f"{__name__} needs"):
    from lightning.pytorch import Callback, LightningModule, Trainer

__all__ = ["SparseCallback"]


class SparseCallback(Callback):
    """Pattern updates after the optimizer's steps, and exact resume from Lightning's checkpoints.

        trainer = lightning.Trainer(callbacks=[SparseCallback(ds.RigL, update_interval=100)])
        trainer.fit(module, data)

    The module must be sparse before `fit`. Gradient accumulation, clipping and bf16 precision work
    as usual. Besides the optimizer and the model, whose state has the patterns, checkpoints contain
    the state of the sparse trainer, and of the global random generators of torch, NumPy and Python,
    which Lightning does not save.

    Args:
        algorithm: `ds.RigL` or another trainer class, or a function of (module, optimizer) that
            returns a trainer.
        options: keyword arguments of the algorithm. `total_steps` defaults to Lightning's
            `estimated_stepping_batches` if no schedule is given.
        restore_random_state: whether to restore the random generators on resuming.
        telemetry: whether to log the figures of `Telemetry` for all layers together
            ("sparse/density", "sparse/churn", ...) to all loggers after every update.

    Attributes:
        sparse_trainer: the `SparseTrainer` of the current or last training, with the list of hooks
            `on_update` and the count `updates`.

    Raises:
        ValueError: when fit begins: a module without sparse layers, more than one optimizer, a
            state that does not fit.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        *,
        restore_random_state: bool = True,
        telemetry: bool = True,
        **options: Any,
    ) -> None:
        self._follower = Follower(algorithm, options, telemetry)
        self._restore_random_state = restore_random_state

    @property
    def sparse_trainer(self) -> SparseTrainer | None:
        return self._follower.trainer

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":  # the module is restored before on_fit_start
            self._follower.allow_resizing(pl_module)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        optimizers = trainer.optimizers
        if len(optimizers) != 1:
            raise ValueError(
                f"SparseCallback follows one optimizer, configure_optimizers returned "
                f"{len(optimizers)}: return one"
            )
        total = trainer.estimated_stepping_batches
        known = isinstance(total, int) and total > 0
        sparse = self._follower.start(pl_module, optimizers[0], int(total) if known else None)

        def log(step: int, _: object) -> None:
            for logger in trainer.loggers:
                logger.log_metrics(self._follower.figures(), step=step)

        if self._follower.telemetry is not None:
            sparse.on_update.append(log)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._follower.stop()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        self._follower.stop()

    def state_dict(self) -> dict[str, Any]:
        return {"trainer": self._follower.state_dict(), "random": random_state.global_states()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._follower.load_state_dict(state_dict["trainer"])
        # Restored here, because the first batches are drawn before any hook of the training.
        if self._restore_random_state:
            random_state.restore_global_states(state_dict["random"])
