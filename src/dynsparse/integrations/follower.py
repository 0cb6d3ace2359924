"""A sparse trainer that follows an optimizer stepped by another library."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dynsparse._core.checks import check_flag, check_kind
from dynsparse.nn.sparse_module import SparseModule
from dynsparse.training import SparseTrainer, Telemetry

__all__ = ["Algorithm", "Follower"]

Algorithm = Callable[..., SparseTrainer]
"""`ds.RigL` or another trainer class, or a function (model, optimizer) -> trainer."""


_LOGGED = (
    "density", "blocks", "churn", "jaccard", "dead_inputs", "dead_outputs", "zero_outputs",
)  # fmt: skip


class Follower:
    """Creates the sparse trainer when training begins and lets it follow the optimizer's steps.

    Args:
        algorithm: called as algorithm(model, optimizer, **options).
        options: keyword arguments of the algorithm. `total_steps` is added if the algorithm takes
            it and neither it nor a `schedule` is given.
        watch: whether to collect telemetry.

    Attributes:
        trainer: the `SparseTrainer`, None before `start`.
        telemetry: its `Telemetry`; None before `start` and without `watch`.
    """

    def __init__(self, algorithm: Algorithm, options: dict[str, Any], watch: bool = False) -> None:
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
        self._sizes: dict[SparseModule, int] = {}  # of the layers that are resizable until `start`
        self._watch = check_flag("telemetry", watch)
        self.telemetry: Telemetry | None = None

    def allow_resizing(self, model: nn.Module) -> None:
        """Let layers take the number of blocks of a checkpoint that is loaded before `start`."""
        for layer in model.modules():
            if isinstance(layer, SparseModule) and not layer.resizable:
                self._sizes[layer] = layer.pattern.nnz
                layer.resizable = True

    def start(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, total_steps: int | None
    ) -> SparseTrainer:
        """Create the trainer, restore a state that was loaded before, and follow `optimizer`.

        Raises:
            TypeError: the algorithm does not return a trainer.
            ValueError: arguments that the algorithm refuses; a state that does not fit; a
                checkpoint that changed the number of blocks of layers that keep theirs.
        """
        self.stop()
        sizes, self._sizes = self._sizes, {}
        for layer in sizes:
            layer.resizable = False
        options = dict(self._options)
        takes_total = "total_steps" in inspect.signature(self._algorithm).parameters
        if takes_total and total_steps is not None and "schedule" not in options:
            options.setdefault("total_steps", total_steps)
        trainer = self._algorithm(model, optimizer, **options)
        if not isinstance(trainer, SparseTrainer):
            raise TypeError(
                f"the algorithm must return a trainer such as dynsparse.RigL, got {trainer!r}"
            )
        for name, layer in trainer.layers.items():
            before, nnz = sizes.get(layer), layer.pattern.nnz
            if before not in (None, nnz) and not layer.resizable:
                raise ValueError(
                    f"the layer {name!r} had {before} blocks and the checkpoint has {nnz}: make "
                    "the model with the density that it had in the first training"
                )
        if self._saved is not None:
            trainer.load_state_dict(self._saved)
            self._saved = None
        self.trainer, self._follows = trainer, True
        self.telemetry = Telemetry(trainer) if self._watch else None
        return trainer

    def figures(self) -> dict[str, int | float]:
        """Figures of all layers together, as "sparse/name", for a logger; {} without telemetry.

        Figures that count from the first pattern on are left out, as they start over on resuming.
        """
        if self.telemetry is None:
            return {}
        figures = self.telemetry.figures()
        return {f"sparse/{name}": figures[f"all/{name}"] for name in _LOGGED}

    def stop(self) -> None:
        """Stop following; the trainer stays available."""
        if self.trainer is not None:
            self.trainer.stop()
        self._follows = False

    def state_dict(self) -> dict[str, Any] | None:
        """The state of the trainer, or a loaded state that waits for it, or None."""
        return self._saved if self.trainer is None else self.trainer.state_dict()

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Restore `state`: now, or when the trainer is created."""
        if state is None:
            return
        if self.trainer is None or not self._follows:
            self._saved = state
        else:
            self.trainer.load_state_dict(state)
