"""Hugging Face transformers: sparse training in `Trainer`, and compact files of sparse models."""

from __future__ import annotations

import base64
import io
import os
from typing import TYPE_CHECKING, Any

import torch

from dynsparse.integrations import require_package
from dynsparse.integrations.follower import Algorithm, Follower
from dynsparse.training import SparseTrainer

with require_package("transformers", f"{__name__} needs", "'transformers[torch]'"):
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_callback import ExportableState

if TYPE_CHECKING:
    from transformers import PreTrainedModel, Trainer

__all__ = ["SparseCallback", "save_pretrained"]


def save_pretrained(model: PreTrainedModel, folder: str | os.PathLike[str], **options: Any) -> None:
    """Save a trained sparse model to a folder, with its weights in few bytes.

    A pattern takes at most one bit per block of the matrix, and values are in row-major order.
    After `import dynsparse`, `from_pretrained` of transformers loads the folder, sparse. The files
    of the model's own `save_pretrained` load in the same way but keep the order of the values,
    which the state of an optimizer depends on, with 8 more bytes per block.

    Args:
        model: a sparse model of transformers.
        folder: where to write.
        options: those of the model's own method, such as `max_shard_size` and `push_to_hub`.

    Raises:
        ImportError: transformers is older than version 5.
        ValueError: a model without sparse layers, or one that is quantized.
    """
    try:
        from dynsparse.nn import hf_quantizer
    except ImportError:
        raise ImportError("save_pretrained needs transformers 5 or later") from None
    hf_quantizer.set_quantizers(model)
    quantizer = getattr(model, "hf_quantizer", None)
    if not isinstance(quantizer, hf_quantizer.SparseQuantizer):
        what = "no sparse layers" if quantizer is None else f"a {type(quantizer).__name__}"
        raise ValueError(f"expected a model with sparse layers, got one with {what}")
    quantizer.packs = True
    try:
        model.save_pretrained(folder, **options)
    finally:
        quantizer.packs = False


class SparseCallback(TrainerCallback, ExportableState):
    """Pattern updates after the optimizer's steps, and exact resume from Trainer's checkpoints.

        trainer = Trainer(model, arguments, callbacks=[SparseCallback(ds.RigL)], ...)
        trainer.train()

    The model must be sparse before training. Trainer's checkpoints contain the model, whose state
    has the patterns, the optimizer and the random generators; the state of this callback is in
    their `trainer_state.json`. To resume algorithms that change the number of weights (`GMP`,
    `GraNet`, `SNFS`), give Trainer this callback when you make it, or call `before_reporters`, and
    the model as `model`, not by `model_init`.

    Args:
        algorithm: `ds.RigL` or another trainer class, or a function of (model, optimizer) that
            returns a trainer.
        options: keyword arguments of the algorithm. `total_steps` defaults to Trainer's `max_steps`
            if no schedule is given.
        telemetry: whether to add the figures of `Telemetry` for all layers together
            ("sparse/density", "sparse/churn", ...) to every entry of `log_history`. Trainer calls
            its reporters (TensorBoard, wandb, ...) before other callbacks; call `before_reporters`
            to let them see the figures.

    Attributes:
        sparse_trainer: the `SparseTrainer` of the current or last training, with the list of hooks
            `on_update` and the count `updates`.

    Raises:
        ValueError: when training begins: a model without sparse layers, a state that does not fit.
        RuntimeError: when training begins: an optimizer that is made later (FSDP, DeepSpeed).
    """

    def __init__(
        self, algorithm: Algorithm | None = None, *, telemetry: bool = True, **options: Any
    ) -> None:
        if algorithm is None:
            # To restore callbacks, Trainer creates a new one without arguments.
            raise ValueError(
                "SparseCallback needs an algorithm such as dynsparse.RigL; to resume, leave "
                "restore_callback_states_from_checkpoint at False: it restores itself"
            )
        self._follower = Follower(algorithm, options, telemetry)

    @property
    def sparse_trainer(self) -> SparseTrainer | None:
        return self._follower.trainer

    def before_reporters(self, trainer: Trainer) -> None:
        """Make this the first callback of `trainer`, adding it if needed, so that reporters see its
        figures. Call it before `trainer.train()`."""
        callbacks = trainer.callback_handler.callbacks
        callbacks[:] = [self, *(callback for callback in callbacks if callback is not self)]
        if trainer.model is not None:
            self._follower.allow_resizing(trainer.model)

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any
    ) -> None:
        # The model is restored before on_train_begin.
        self._follower.allow_resizing(parts["model"])

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any
    ) -> None:
        optimizer = parts.get("optimizer")
        # accelerate wraps the optimizer
        optimizer = getattr(optimizer, "optimizer", optimizer)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise RuntimeError(
                "SparseCallback needs the optimizer when training begins, got "
                f"{type(optimizer).__name__}: train without FSDP and DeepSpeed"
            )
        if state.global_step:
            # Annotated as a list; in a checkpoint it is a mapping of states by name.
            states: Any = state.stateful_callbacks
            saved = states.get(type(self).__name__)
            if not isinstance(saved, dict) or "trainer" not in saved.get("attributes", {}):
                raise ValueError(
                    "the checkpoint was saved without SparseCallback: resume from one that was "
                    "saved with it, or start a new training"
                )
            self._follower.load_state_dict(_decode(saved["attributes"]["trainer"]))
        self._follower.start(parts["model"], optimizer, state.max_steps)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any
    ) -> None:
        figures = self._follower.figures()
        for entry in (parts.get("logs"), state.log_history[-1] if state.log_history else None):
            if entry is not None:
                entry.update(figures)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any
    ) -> None:
        self._follower.stop()

    def state(self) -> dict[str, Any]:
        """The state that Trainer writes to its checkpoints as JSON."""
        state = self._follower.state_dict()
        return {"args": {}, "attributes": {} if state is None else {"trainer": _encode(state)}}


def _encode(state: dict[str, Any]) -> str:
    """A state, which may contain tensors, as a string for JSON."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def _decode(text: str) -> dict[str, Any]:
    try:
        return torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True)
    except Exception as error:  # of any kind: torch.load has several
        raise ValueError(
            f"the state of SparseCallback in the checkpoint is damaged: {error}"
        ) from None
