"""From options to figures: load, train, test, report."""

from __future__ import annotations

import math
import os
from collections.abc import Collection
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from dynsparse import data
from dynsparse._core.files.atomic_write import atomic_write_text
from dynsparse.apps.common.resume import Checkpoint, restore, save
from dynsparse.apps.common.run import (
    Display,
    Logger,
    Names,
    Outputs,
    format_bytes,
    machine_tables,
    open_loggers,
    run_application,
    stop_on_interrupt,
)
from dynsparse.apps.common.training import NOTICE, Scores, Sums, random_ids, random_shares
from dynsparse.apps.image_classification.training import ImageOptions, Training
from dynsparse.nn import SparseLinear
from dynsparse.tracing import span


class TextLog:
    """A heading, then "<steps> <training accuracy>" per report.

    Args:
        step: of the training that goes on; lines of later steps, which a kill has left, are
            forgotten, and at 0 all are.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, label: str, step: int) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [f"Iteration {label}"]
        if step and path.exists():
            # The last piece has no line end: nothing, or a line whose writing was cut short.
            lines = [line for line in path.read_text().split("\n")[:-1] if _step_of(line) <= step]
        atomic_write_text(path, "".join(f"{line}\n" for line in lines))

    def log(self, step: int, figures: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(f"{step} {figures['accuracy']:.8f}\n")
            file.flush()
            os.fsync(file.fileno())

    def close(self, figures: dict[str, Any]) -> None:
        """Every line was written when it was logged."""


def _step_of(line: str) -> int:
    number = line.partition(" ")[0]
    return int(number) if number.isdecimal() else 0


def density(network: nn.Module) -> float:
    """Present weights / weights of the dense network; biases are not counted."""
    layers = _layers(network).values()
    return sum(_weight(layer).numel() for layer in layers) / sum(map(_positions, layers))


_Layer = nn.Linear | nn.Conv2d | SparseLinear


def _layers(network: nn.Module) -> dict[str, _Layer]:
    return {name: layer for name, layer in network.named_modules() if isinstance(layer, _Layer)}


def _weight(layer: _Layer) -> Tensor:
    return layer.values if isinstance(layer, SparseLinear) else layer.weight


def _shape(layer: _Layer) -> list[int]:
    """[out, in] of the matrix; in the rows of a convolution lies what its kernel sees."""
    if isinstance(layer, SparseLinear):
        return list(layer.pattern.shape)
    return [len(layer.weight), layer.weight[0].numel()]


def _positions(layer: _Layer) -> int:
    return math.prod(_shape(layer))


def memory(network: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, int]]:
    """Bytes of weights (biases too), pattern and optimizer state: as it is, and were it dense.

    The pattern is every index tensor the sparse layers hold; a dense network has none. The dense
    optimizer holds as many state entries per weight as this one does.
    """
    actual = {"weights": 0, "pattern": 0, "optimizer": 0}
    dense = dict(actual)
    sparse = [m for m in _layers(network).values() if isinstance(m, SparseLinear)]
    grown = {id(layer.values): _positions(layer) / layer.values.numel() for layer in sparse}
    for parameter in network.parameters():
        size = parameter.numel() * parameter.element_size()
        actual["weights"] += size
        factor = grown.get(id(parameter), 1.0)
        dense["weights"] += round(size * factor)
        for state in optimizer.state.get(parameter, {}).values():
            if isinstance(state, Tensor):
                size = state.numel() * state.element_size()
                actual["optimizer"] += size
                per_weight = state.numel() == parameter.numel()
                dense["optimizer"] += round(size * factor) if per_weight else size
    for layer in sparse:
        # The layer's index and the pattern may share memory: each storage counts once.
        by_columns = layer._current().index.order or ()
        tensors = [*layer.index, *by_columns, layer.pattern.cols]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        actual["pattern"] += sum(storages.values())
    return {"sparse": actual, "dense": dense}


def training_figures(
    training: Training, last: Scores | None, test: Scores | None
) -> dict[str, Any]:
    """The figures that `--json` writes.

    Accuracies and densities are shares in [0, 1], times are seconds. `accuracy` and
    `loss` are of the test images, None with `--test-mode training`.
    """
    network = training.model
    layers = _layers(network)
    count = sum(parameter.numel() for parameter in network.parameters())
    held = sum(_weight(layer).numel() for layer in layers.values())
    return {
        "accuracy": None if test is None else test.accuracy,
        "loss": None if test is None else test.loss,
        "density": density(network),
        "epochs": training.epoch,
        "dataset": training.options.dataset,
        **training.figures(),
        "train_accuracy": None if last is None else last.accuracy,
        "train_loss": None if last is None else last.loss,
        "parameters": {
            "sparse": count,
            "dense": count - held + sum(map(_positions, layers.values())),
        },
        "memory": memory(network, training.optimizer),
        "layers": [
            {
                "name": name,
                "shape": _shape(layer),
                "sparse": isinstance(layer, SparseLinear),
                "block_size": layer.block_size if isinstance(layer, SparseLinear) else 1,
                "density": _weight(layer).numel() / _positions(layer),
                "weights": _weight(layer).numel(),
            }
            for name, layer in layers.items()
        ],
    }


def summary_table(figures: dict[str, Any]) -> Table:
    """The closing table: this network against the same one dense, if it is not dense itself."""
    is_sparse = figures["method"] != "dense"
    table = Table(title=f"{figures['method']} on {figures['dataset']}", title_style="bold")
    table.add_column("")
    for heading in ("this network", "dense", "share") if is_sparse else ("this network",):
        table.add_column(heading, justify="right")

    def add_row(name: str, sparse: str, dense: str = "", share: float | None = None) -> None:
        cells = (sparse, dense, "" if share is None else f"{100 * share:.1f} %")
        table.add_row(name, *cells[: 3 if is_sparse else 1])

    if figures["accuracy"] is not None:
        add_row("test accuracy", f"{100 * figures['accuracy']:.2f} %")
        add_row("test loss", f"{figures['loss']:.4f}")
    sparse, dense = figures["parameters"]["sparse"], figures["parameters"]["dense"]
    add_row("parameters", f"{sparse:,}", f"{dense:,}", sparse / dense)
    sparse_memory, dense_memory = figures["memory"]["sparse"], figures["memory"]["dense"]
    for part in sparse_memory:
        if part == "pattern" and not is_sparse:
            continue
        share = sparse_memory[part] / dense_memory[part] if dense_memory[part] else None
        sizes = format_bytes(sparse_memory[part]), format_bytes(dense_memory[part])
        add_row(f"memory: {part}", *sizes, share)
    total, dense_total = sum(sparse_memory.values()), sum(dense_memory.values())
    add_row("memory: total", format_bytes(total), format_bytes(dense_total), total / dense_total)
    if figures["steps"]:
        step = "one step, with updates" if is_sparse else "one step"
        add_row("training", f"{figures['seconds']:.1f} s")
        add_row(step, f"{1000 * figures['seconds_per_step']:.3f} ms")
        if is_sparse:
            add_row("pattern updates", f"{figures['updates']:,}")
            add_row("connections replaced", f"{figures['replaced']:,}")
            add_row("time in pattern updates", f"{100 * figures['update_share']:.1f} %")
    return table


_COLUMNS = {"epoch": 7, "loss": 9, "accuracy": 10, "density": 10, "replaced": 11, "ms/step": 9}


def run(
    kind: type[Training],
    options: ImageOptions,
    console: Console | None = None,
    *,
    given: Collection[str] = (),
) -> dict[str, Any]:
    """Train and test as `options` say; returns `training_figures`.

    Args:
        kind: the training to make of the options.
        options, console, given: see `run_application`, also for what is raised.
    """
    return run_application(kind, options, partial(_run, kind), console, given)


def _run(
    kind: type[Training],
    options: ImageOptions,
    seed: int,
    checkpoint: Checkpoint | None,
    console: Console,
) -> dict[str, Any]:
    with span("data"):
        data_set = _load_data_set(options)
        if options.hold_out:
            data_set = data_set.hold_out(options.hold_out)
    with span("build"):
        training = kind(options, data_set, seed)
    if checkpoint is not None:
        restore(training, checkpoint)
    trains = options.trains
    writes = Outputs(training, partial(_open_loggers, training)) if trains else nullcontext()
    with writes as outputs:
        for line in _headlines(training, data_set):
            console.print(line, highlight=False)
        last = None
        if outputs is not None:
            with stop_on_interrupt(training, console):
                last = _train(training, console, outputs)
        test = None if options.test_mode == "training" else training.test()
        with span("report"):
            figures = training_figures(training, last, test)
            if outputs is not None:
                outputs.close(figures)
    with span("report"):
        console.print(summary_table(figures), highlight=False)
        for table in machine_tables(figures):
            console.print(table, highlight=False)
    return figures


def _load_data_set(options: ImageOptions) -> data.DataSet:
    if not options.synthetic_data:
        return data.load(options.dataset, options.data_dir)
    device = torch.device(options.device)
    parts = [
        data.LabelledImages(
            random_shares((count, data.PIXELS), device)
            if options.dataset in data.GREY
            else random_ids(256, (count, data.CIFAR_PIXELS), device).to(torch.uint8),
            random_ids(data.CLASSES, (count,), device),
        )
        for count in data.COUNTS[options.dataset]
    ]
    return data.DataSet(options.dataset, *parts)


def _open_loggers(training: Training) -> list[Logger]:
    options = training.options
    loggers: list[Logger] = []
    if options.log is not None:
        loggers.append(TextLog(options.log, options.label, training.step))
    return loggers + open_loggers(options, Names(train="train/", test="test/"))


def _headlines(training: Training, data_set: data.DataSet) -> list[str]:
    options = training.options
    notice = [NOTICE.format(device=options.device)] if options.synthetic_data else []
    return [
        *notice,
        f"{options.method} on {options.dataset}: {len(data_set.train):,} images to train, "
        f"{len(data_set.test):,} {'held out ' if options.hold_out else ''}to test",
        f"{training.headline()}, density {100 * density(training.model):.2f} %, "
        f"{options.optimizer}, batch {options.batch_size}, seed {training.seed}",
    ]


def _train(training: Training, console: Console, outputs: Outputs) -> Scores | None:
    """Train up to the last epoch wanted; the last epoch's scores, None if there was none left."""
    options = training.options
    last_epoch = options.stop_after or options.length
    sums: Sums | None = None
    with Display(console, _COLUMNS, training.total_steps, training.step) as display:
        while training.epoch < last_epoch:
            for window, sums in training.run_epoch():
                with span("report"):
                    line = None if sums is None else display.format_row(*_cells(training, sums))
                    display.show(training.step, display.format_row(*_cells(training, window)), line)
                    outputs.log(training.step, _report_figures(training, window))
            ended = training.epoch == last_epoch
            if options.checkpoint_path is not None and (
                ended or training.epoch % options.checkpoint_freq == 0
            ):
                save(training, options.checkpoint_path)
    return None if sums is None else sums.scores()


def _report_figures(training: Training, window: Sums) -> dict[str, Any]:
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
