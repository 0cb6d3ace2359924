"""From options to figures: load, train, test, report."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from rich.console import Console

from dynsparse import data
from dynsparse.apps.common.display import Display
from dynsparse.apps.common.loggers import Logger, Names, open_loggers
from dynsparse.apps.common.outputs import Outputs
from dynsparse.apps.common.resume import Checkpoint, restore, save
from dynsparse.apps.common.run import run_with
from dynsparse.apps.common.stopping import stoppable
from dynsparse.apps.common.synthetic import NOTICE, random_ids, random_shares
from dynsparse.apps.common.training import Scores, Sums
from dynsparse.apps.pictures.options import PictureOptions
from dynsparse.apps.pictures.summary import density, summary_table, training_figures
from dynsparse.apps.pictures.text_log import TextLog
from dynsparse.apps.pictures.training import Training
from dynsparse.tracing import span

_COLUMNS = {"epoch": 7, "loss": 9, "accuracy": 10, "density": 10, "replaced": 11, "ms/step": 9}


def run(
    kind: type[Training],
    options: PictureOptions,
    console: Console | None = None,
    *,
    given: Collection[str] = (),
) -> dict[str, Any]:
    """Train and test as `options` say; returns `training_figures`.

    Args:
        kind: the training to make of the options.
        options, console, given: see `run_with`, which says what is raised, too.
    """
    return run_with(kind, options, partial(_run, kind), console, given)


def _run(
    kind: type[Training],
    options: PictureOptions,
    seed: int,
    checkpoint: Checkpoint | None,
    console: Console,
) -> dict[str, Any]:
    with span("data"):
        pictures = _pictures(options)
        if options.hold_out:
            pictures = pictures.hold_out(options.hold_out)
    with span("build"):
        training = kind(options, pictures, seed)
    if checkpoint is not None:
        restore(training, checkpoint)
    trains = options.trains
    writes = Outputs(training, partial(_loggers, training)) if trains else nullcontext()
    with writes as outputs:
        for line in _headlines(training, pictures):
            console.print(line, highlight=False)
        last = None
        if outputs is not None:
            with stoppable(training, console):
                last = _train(training, console, outputs)
        test = None if options.test_mode == "training" else training.test()
        with span("report"):
            figures = training_figures(training, last, test)
            if outputs is not None:
                outputs.close(figures)
    with span("report"):
        console.print(summary_table(figures), highlight=False)
    return figures


def _pictures(options: PictureOptions) -> data.DataSet:
    if not options.synthetic_data:
        return data.load(options.dataset, options.data_dir)
    device = torch.device(options.device)
    parts = [
        data.Pictures(
            random_shares((count, data.PIXELS), device)
            if options.dataset in data.GREY
            else random_ids(256, (count, data.CIFAR_PIXELS), device).to(torch.uint8),
            random_ids(data.CLASSES, (count,), device),
        )
        for count in data.COUNTS[options.dataset]
    ]
    return data.DataSet(options.dataset, *parts)


def _loggers(training: Training) -> list[Logger]:
    options = training.options
    loggers: list[Logger] = []
    if options.log is not None:
        loggers.append(TextLog(options.log, options.label, training.step))
    return loggers + open_loggers(options, Names(train="train/", test="test/"))


def _headlines(training: Training, pictures: data.DataSet) -> list[str]:
    options = training.options
    notice = [NOTICE.format(device=options.device)] if options.synthetic_data else []
    return [
        *notice,
        f"{options.method} on {options.dataset}: {len(pictures.train):,} pictures to train, "
        f"{len(pictures.test):,} {'held out ' if options.hold_out else ''}to test",
        f"{training.headline()}, density {100 * density(training.model):.2f} %, "
        f"{options.optimizer}, batch {options.batch_size}, seed {training.seed}",
    ]


def _train(training: Training, console: Console, outputs: Outputs) -> Scores | None:
    """Train up to the last epoch wanted; the last epoch's scores, None if there was none left."""
    options = training.options
    last_epoch = options.stop_after or options.length
    whole: Sums | None = None
    with Display(console, _COLUMNS, training.total_steps, training.step) as display:
        while training.epoch < last_epoch:
            for window, whole in training.run_epoch():
                with span("report"):
                    line = None if whole is None else display.row(*_cells(training, whole))
                    display.show(training.step, display.row(*_cells(training, window)), line)
                    outputs.log(training.step, _reported(training, window))
            ended = training.epoch == last_epoch
            if options.checkpoint_path is not None and (
                ended or training.epoch % options.checkpoint_freq == 0
            ):
                save(training, options.checkpoint_path)
    return None if whole is None else whole.scores()


def _reported(training: Training, window: Sums) -> dict[str, Any]:
    scores = window.scores()
    return {
        "loss": scores.loss,
        "accuracy": scores.accuracy,
        "learning_rate": training.rate,
        "replaced": window.replaced,
        "seconds_per_step": window.seconds / window.steps,
    }


def _cells(training: Training, sums: Sums) -> list[str]:
    scores = sums.scores()
    return [
        f"{-(-training.step // training.batches)}/{training.options.length}",
        f"{scores.loss:.4f}",
        f"{100 * scores.accuracy:.2f} %",
        f"{100 * density(training.model):.2f} %",
        f"{sums.replaced:,}",
        f"{1000 * sums.seconds / sums.steps:.3f}",
    ]
