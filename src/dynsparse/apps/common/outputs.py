"""Folders and files that a training writes to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from dynsparse.apps.common.folders import check_continued, check_new, check_own
from dynsparse.apps.common.identity import KEY
from dynsparse.apps.common.loggers import Logger
from dynsparse.apps.common.training import Training
from dynsparse.files.atomic_write import remove_temporary_files
from dynsparse.files.folders import only_writer
from dynsparse.ranks import collective_errors
from dynsparse.training.checkpoint.format import remove_checkpoint
from dynsparse.training.records import Recorder


class Outputs:
    """All of them, opened before the training: a wrong path costs no step.

    A context, inside which nobody else writes to the same folders. Nothing of another training is
    overwritten or deleted without --overwrite, and with it only when all else has been checked.

    Args:
        loggers: opens those that figures go to besides the record.

    Raises:
        ValueError: nothing to record, no record to go on with, a folder that another training
            writes or has written to.
        OSError: a folder that cannot be written.
    """

    def __init__(self, training: Training, loggers: Callable[[], Sequence[Logger]]) -> None:
        self._recorder: Recorder | None = None
        self._loggers: Sequence[Logger] = ()
        self._locks = ExitStack()
        try:
            with collective_errors(training.ranks):
                if training.ranks.rank == 0:  # which writes for all
                    self._open(training, loggers)
        except BaseException:
            self._locks.close()
            raise

    def _open(self, training: Training, loggers: Callable[[], Sequence[Logger]]) -> None:
        options = training.options
        if options.records_path is not None and training.trainer is None:
            raise ValueError(
                "--records-path: expected a sparse layer to record, got dense layers alone: leave "
                "it out, or choose sparse layers and another method"
            )
        folders = [f for f in (options.checkpoint_path, options.records_path) if f is not None]
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        for folder in sorted({folder.resolve() for folder in folders}):
            if self._locks.enter_context(only_writer(folder)):
                remove_temporary_files(folder)  # each as large as a checkpoint
        others: list[Path] = []
        if options.checkpoint_path is not None:
            others = check_own(training, options.checkpoint_path, overwrite=options.overwrite)
        if options.records_path is not None:
            self._recorder = _recorder(training, options.records_path)
        self._loggers = loggers()
        # The newest first: what a kill leaves is what there was up to some moment.
        for file in reversed(others):
            remove_checkpoint(file)
        if self._recorder is not None:
            _go_on(self._recorder, training)

    def __enter__(self) -> Outputs:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._locks.close()

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
    metadata = {
        "app": training.app,
        KEY: training.identity,
        "method": training.options.method,
        "seed": training.seed,
        **training.metadata(),
    }
    recorder = Recorder(path, metadata)
    if training.step:
        check_continued(recorder, training)
    else:
        check_new(recorder, overwrite=training.options.overwrite)
    return recorder


def _go_on(recorder: Recorder, training: Training) -> None:
    trainer = training.trainer
    assert trainer is not None
    patterns = {name: layer.pattern for name, layer in trainer.layers.items()}
    if training.step:
        recorder.truncate(training.step, patterns)
    else:
        recorder.start(patterns, overwrite=training.options.overwrite)
    trainer.on_update.append(recorder.update)


def bytes_text(count: int) -> str:
    """KiB, MiB or GiB, whichever reads best."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count / 1024:,.1f} KiB"
