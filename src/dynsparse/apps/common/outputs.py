"""Folders and files that a training writes to."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dynsparse.apps.common.loggers import Logger
from dynsparse.apps.common.training import Training
from dynsparse.training.records import Recorder

__all__ = ["Outputs", "bytes_text", "check_writable"]


class Outputs:
    """All of them, opened before the training: a wrong path costs no step.

    Raises:
        ValueError: nothing to record, or no record to go on with.
        OSError: a folder that cannot be written.
    """

    def __init__(self, training: Training, loggers: Sequence[Logger]) -> None:
        options = training.options
        if options.checkpoint_path is not None:
            options.checkpoint_path.mkdir(parents=True, exist_ok=True)
        self._recorder: Recorder | None = None
        if options.records_path is not None:
            self._recorder = _recorder(training, options.records_path)
        self._loggers = loggers

    def log(self, step: int, figures: dict[str, Any]) -> None:
        """Figures of the steps up to `step`."""
        for logger in self._loggers:
            logger.log(step, figures)
        if self._recorder is not None:
            self._recorder.log(step, figures)

    def close(self, figures: dict[str, Any]) -> None:
        """The final figures."""
        for logger in self._loggers:
            logger.close(figures)


def _recorder(training: Training, path: Path) -> Recorder:
    trainer = training.trainer
    if trainer is None:
        raise ValueError(
            "--records-path: expected a sparse layer to record, got dense layers alone: leave it "
            "out, or choose sparse layers and another method"
        )
    metadata = {
        "app": training.app,
        "method": training.options.method,
        "seed": training.seed,
        **training.metadata(),
    }
    recorder = Recorder(path, metadata)
    if training.step:
        if not recorder.has_record:
            raise ValueError(
                f"--records-path: expected the record of the restored training, got {path} without "
                "one: name its folder, or leave --records-path out"
            )
        recorder.truncate(training.step)
    else:
        recorder.start({name: layer.pattern for name, layer in trainer.layers.items()})
    trainer.on_update.append(recorder.update)
    return recorder


def check_writable(name: str, file: Path) -> None:
    """Raise ValueError, naming the flag, for a file that cannot be written."""
    if file.is_dir() or not file.parent.is_dir() or not os.access(file.parent, os.W_OK):
        raise ValueError(f"--{name}: expected a file in a folder that can be written, got {file}")


def bytes_text(count: int) -> str:
    """KiB, MiB or GiB, whichever reads best."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count / 1024:,.1f} KiB"
