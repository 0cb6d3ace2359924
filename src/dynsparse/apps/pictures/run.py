"""From options to figures: load, train, test, report."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from dynsparse import data
from dynsparse.apps.pictures.display import Display
from dynsparse.apps.pictures.loggers import Logger, open_loggers
from dynsparse.apps.pictures.options import PictureOptions
from dynsparse.apps.pictures.resume import adopt, find_checkpoint, restore, save
from dynsparse.apps.pictures.summary import density, summary_table, training_figures
from dynsparse.apps.pictures.training import Report, Training
from dynsparse.training.records import Recorder

__all__ = ["run"]


def run(
    kind: type[Training],
    options: PictureOptions,
    console: Console | None = None,
    *,
    given: Collection[str] = (),
) -> dict[str, Any]:
    """Train and test as `options` say; returns what `--json` writes (see `training_figures`).

    Args:
        kind: the training to make of the options.
        options: what to do. With `restore`, options at their default become the checkpoint's.
        console: where progress goes; stdout if left out.
        given: options that hold even at their default: with `restore` they must agree.

    Raises:
        ValueError: options or files that are wrong; one line.
        OSError: files that cannot be read or written.
        ModuleNotFoundError: a logger that is not installed.
    """
    console = Console() if console is None else console
    options.check()
    checkpoint = None if options.restore is None else find_checkpoint(options.restore)
    seed = options.seed
    if checkpoint is not None:
        options, seed = adopt(kind.app, options, checkpoint, given)
        options.check()
    if seed is None:
        seed = int.from_bytes(os.urandom(4), "little")
    before = torch.get_num_threads()
    torch.set_num_threads(options.threads)
    try:
        return _run(kind, options, seed, checkpoint, console)
    finally:
        torch.set_num_threads(before)


def _run(
    kind: type[Training],
    options: PictureOptions,
    seed: int,
    checkpoint: Path | None,
    console: Console,
) -> dict[str, Any]:
    pictures = data.load(options.dataset, options.data_dir)
    if options.hold_out:
        pictures = pictures.hold_out(options.hold_out)
    training = kind(options, pictures, seed)
    if checkpoint is not None:
        restore(training, checkpoint)
    outputs = _Outputs(training, resumes=checkpoint is not None)

    for line in _headlines(training, pictures):
        console.print(line, highlight=False)
    last = None if options.test_mode == "tests" else _train(training, console, outputs)
    test = None if options.test_mode == "training" else training.test()
    figures = training_figures(training, last, test)
    for logger in outputs.loggers:
        logger.close(figures)
    console.print(summary_table(figures), highlight=False)
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return figures


class _Outputs:
    """Folders and files to write to, opened before the training: a wrong path costs no epoch."""

    def __init__(self, training: Training, *, resumes: bool) -> None:
        options = training.options
        self.recorder: Recorder | None = None
        self.loggers: list[Logger] = []
        if options.json is not None:
            _check_writable("json", options.json)
        if options.test_mode == "tests":
            return
        if options.checkpoint_path is not None:
            options.checkpoint_path.mkdir(parents=True, exist_ok=True)
        if options.records_path is not None:
            self.recorder = _recorder(training, options.records_path)
        self.loggers = open_loggers(options, resumes=resumes)


def _check_writable(flag: str, file: Path) -> None:
    if file.is_dir() or not file.parent.is_dir() or not os.access(file.parent, os.W_OK):
        raise ValueError(f"--{flag}: expected a file in a folder that can be written, got {file}")


def _recorder(training: Training, path: Path) -> Recorder:
    trainer = training.trainer
    if trainer is None:
        raise ValueError(
            "--records-path: expected a sparse layer to record, got dense layers alone: leave it "
            "out, or choose sparse layers and another method"
        )
    options = training.options
    metadata = {
        "app": training.app,
        "dataset": options.dataset,
        "method": options.method,
        "seed": training.seed,
        "epochs": options.epochs,
        "steps": training.total_steps,
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


def _headlines(training: Training, pictures: data.DataSet) -> list[str]:
    options = training.options
    return [
        f"{options.method} on {options.dataset}: {len(pictures.train):,} pictures to train, "
        f"{len(pictures.test):,} {'held out ' if options.hold_out else ''}to test",
        f"{training.headline()}, density {100 * density(training.network):.2f} %, "
        f"{options.optimizer}, batch {options.batch_size}, seed {training.seed}",
    ]


def _train(training: Training, console: Console, outputs: _Outputs) -> Report | None:
    """Train up to the last epoch wanted; the last epoch's figures, None if there was none left."""
    options = training.options
    last_epoch = options.stop_after or options.epochs
    whole: Report | None = None
    with Display(console, training) as display:
        while training.epoch < last_epoch:
            for report, whole in training.run_epoch():
                display.show(report, whole)
                figures = {
                    "loss": report.scores.loss,
                    "accuracy": report.scores.accuracy,
                    "learning_rate": report.learning_rate,
                    "replaced": report.replaced,
                    "seconds_per_step": report.seconds / report.steps,
                }
                for logger in outputs.loggers:
                    logger.log(report.step, figures)
                if outputs.recorder is not None:
                    outputs.recorder.log(report.step, figures)
            ended = training.epoch == last_epoch
            if options.checkpoint_path is not None and (
                ended or training.epoch % options.checkpoint_freq == 0
            ):
                save(training, options.checkpoint_path)
    return whole
