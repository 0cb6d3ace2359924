"""The frame of a run: options, checkpoint, seed, threads, what it writes, and how it stops."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from dynsparse._core.files.atomic_write import atomic_write_text, remove_temporary_files
from dynsparse._core.files.folders import lock_folder
from dynsparse.apps.common.options import TrainingOptions
from dynsparse.apps.common.resume import Checkpoint, fill_in, find_checkpoint, find_foreign, save
from dynsparse.apps.common.training import Stopped, Training
from dynsparse.options import check_applies, default_of, flag, options_of
from dynsparse.ranks import Ranks, collective_errors, ranks_of
from dynsparse.tracing import trace
from dynsparse.training.checkpoint.format import remove_checkpoint
from dynsparse.training.records import Recorder


@contextmanager
def process_group(device: str) -> Iterator[Ranks]:
    """The ranks of this program: this process alone, unless torchrun started several.

    The process group is initialised here and destroyed at the end, unless there was one before.

    Args:
        device: where each rank computes: "cuda" becomes the GPU of its number on the machine.
    """
    distributed = torch.distributed
    several = distributed.is_available() and distributed.is_torchelastic_launched()
    if not several or distributed.is_initialized():
        yield ranks_of("auto")
        return
    on_gpu = torch.device(device).type == "cuda"
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    distributed.init_process_group("nccl" if on_gpu else "gloo")
    try:
        yield ranks_of("auto")
    finally:
        distributed.destroy_process_group()


class Display(Progress):
    """A context that prints the heads of the columns, and then what is shown.

    Args:
        columns: {head: width}.
        total, completed: steps of the whole training, and those done before.
    """

    def __init__(
        self, console: Console, columns: dict[str, int], total: int, completed: int
    ) -> None:
        super().__init__(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=14),
            TimeRemainingColumn(compact=True),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._widths = columns
        self._bar = self.add_task("", total=total, completed=completed)

    def __enter__(self) -> Display:
        self.console.print(self.format_row(*self._widths), style="bold", highlight=False)
        super().__enter__()
        return self

    def format_row(self, *cells: str) -> str:
        """One line of cells, each as wide as its column."""
        return "".join(c.rjust(w) for c, w in zip(cells, self._widths.values(), strict=True))

    def show(self, completed: int, beside_bar: str, line: str | None) -> None:
        """Move the bar to `completed`, with a text beside it, and print a line above it."""
        self.update(self._bar, description=beside_bar, completed=completed)
        if line is not None:
            self.console.print(line, highlight=False)


class Logger(Protocol):
    def log(self, step: int, figures: dict[str, Any]) -> None:
        """Log figures of the steps up to `step`: loss, accuracy, learning_rate, replaced, ..."""
        ...

    def close(self, figures: dict[str, Any]) -> None:
        """Log the final figures of the training; nothing is logged afterwards."""
        ...


@dataclass(frozen=True)
class Names:
    """How an application names its figures: prefixes in TensorBoard, and its project at wandb.

    `tested` are those of the final figures that are of the test.
    """

    train: str = ""
    test: str = "test_"
    tested: tuple[str, ...] = ("accuracy", "loss")
    project: str | None = None


def open_loggers(options: TrainingOptions, names: Names) -> list[Logger]:
    """The loggers the options ask for.

    Raises:
        ModuleNotFoundError: tensorboard or wandb is asked for and not installed.
    """
    loggers: list[Logger] = []
    if options.tensorboard is not None:
        loggers.append(_TensorBoard(options.tensorboard, names))
    if options.use_wandb:
        loggers.append(_Wandb(options, names))
    return loggers


class _TensorBoard:
    def __init__(self, folder: Path, names: Names) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ModuleNotFoundError(
                "--tensorboard: expected the package tensorboard, which is not installed: "
                "pip install tensorboard"
            ) from None
        self._writer = SummaryWriter(str(folder))
        self._names = names

    def log(self, step: int, figures: dict[str, Any]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(f"{self._names.train}{name}", value, step)

    def close(self, figures: dict[str, Any]) -> None:
        for name in self._names.tested:
            if figures[name] is not None:
                self._writer.add_scalar(
                    f"{self._names.test}{name}", figures[name], figures["steps"]
                )
        final = {name: value for name, value in figures.items() if name != "history"}
        self._writer.add_text("figures", f"```json\n{json.dumps(final, indent=2)}\n```")
        self._writer.close()


class _Wandb:
    def __init__(self, options: TrainingOptions, names: Names) -> None:
        try:
            import wandb
        except ImportError:
            raise ModuleNotFoundError(
                "--use-wandb: expected the package wandb, which is not installed: pip install wandb"
            ) from None
        self._tested = names.tested
        self._run = wandb.init(
            project=options.wandb_project_name or names.project,
            name=options.wandb_name,
            tags=list(options.wandb_tags) or None,
            config={
                name: str(value) if isinstance(value, Path) else value
                for name, value in vars(options).items()
            },
        )

    def log(self, step: int, figures: dict[str, Any]) -> None:
        self._run.log(figures, step=step)

    def close(self, figures: dict[str, Any]) -> None:
        self._run.summary.update({f"test_{name}": figures[name] for name in self._tested})
        self._run.finish()


class Outputs:
    """All outputs of a training, opened before it, so that a wrong path costs no step.

    A context that holds a lock on the folders. Nothing of another training is
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
            if self._locks.enter_context(lock_folder(folder)):
                remove_temporary_files(folder)  # each as large as a checkpoint
        others: list[Path] = []
        if options.checkpoint_path is not None:
            others = find_foreign(training, options.checkpoint_path)
        if options.records_path is not None:
            self._recorder = _make_recorder(training, options.records_path)
        self._loggers = loggers()
        if self._recorder is not None:
            _start_record(self._recorder, training)
        # The newest first: what a kill leaves is what there was up to some moment.
        for file in reversed(others):
            remove_checkpoint(file)

    def __enter__(self) -> Outputs:
        return self

    def __exit__(self, *_: object) -> None:
        self._locks.close()

    def log(self, step: int, figures: dict[str, Any]) -> None:
        """Log figures of the steps up to `step`."""
        for logger in self._loggers:
            logger.log(step, figures)
        if self._recorder is not None:
            self._recorder.log(step, figures)

    def close(self, figures: dict[str, Any]) -> None:
        """Log the final figures."""
        for logger in self._loggers:
            logger.close(figures)


def _make_recorder(training: Training, path: Path) -> Recorder:
    metadata = {
        "app": training.app,
        "method": training.options.method,
        "seed": training.seed,
        **training.metadata(),
    }
    recorder = Recorder(path, metadata)
    if training.step and not recorder.has_record:
        raise ValueError(
            f"--records-path: expected the record of the restored training, got {path} without "
            "one: name its folder, or leave --records-path out"
        )
    if not training.step and recorder.holds_updates and not training.options.overwrite:
        raise ValueError(
            f"--records-path: expected a folder without the record of another training, got {path} "
            "with one: go on with that training by --restore, choose another folder, or let the "
            "record be deleted with --overwrite"
        )
    return recorder


def _start_record(recorder: Recorder, training: Training) -> None:
    trainer = training.trainer
    assert trainer is not None
    patterns = {name: layer.pattern for name, layer in trainer.layers.items()}
    if training.step:
        recorder.truncate(training.step, patterns)
    else:
        recorder.start(patterns, overwrite=training.options.overwrite)
    # A record counts the training's steps, as its figures do, with those that a scaler skips.
    trainer.on_update.append(lambda _, rewirings: recorder.update(training.step, rewirings))


def format_bytes(count: int) -> str:
    """A number of bytes in KiB, MiB or GiB, whichever reads best."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count / 1024:,.1f} KiB"


_MOST_OPERATIONS = 12


def machine_tables(figures: dict[str, Any]) -> list[Table]:
    """Tables of the programs of `MachineSteps` and of the costliest operations of a step; none if
    the steps were taken on the host."""
    machine_figures = figures.get("target")
    if machine_figures is None:
        return []
    programs = _machine_table("Last run of each program on the simulated machine")
    for heading in ("fullest tile", "to host", "from host"):
        programs.add_column(heading, justify="right")
    for name, cost in machine_figures["programs"].items():
        sizes = (cost[size] for size in ("max_tile_bytes", "to_host_bytes", "from_host_bytes"))
        programs.add_row(*_machine_cells(name, cost), *map(format_bytes, sizes))
    operations = _machine_table("Costliest operations of a step")
    for name, cost in list(machine_figures["operations"].items())[:_MOST_OPERATIONS]:
        operations.add_row(*_machine_cells(name, cost))
    return [programs, operations]


def _machine_table(title: str) -> Table:
    table = Table(title=title, title_style="bold")
    table.add_column("", no_wrap=True)
    for heading in ("cycles", "time", "TFLOP/s"):
        table.add_column(heading, justify="right")
    return table


def _machine_cells(name: str, cost: dict[str, float]) -> list[str]:
    time = f"{1e6 * cost['seconds']:.1f} us"
    return [name, f"{cost['cycles']:,.0f}", time, f"{cost['tflops']:.3g}"]


@contextmanager
def stop_on_interrupt(training: Training, console: Console) -> Iterator[None]:
    """The first Ctrl-C inside makes `training` raise `Stopped`; the second is a KeyboardInterrupt.

    After `Stopped` a checkpoint is written: to --checkpoint-path, or to a new folder in the current
    one. On several ranks, which the signal reaches at different steps, Ctrl-C stays what it was, as
    it does where the program has a handler of its own, and outside the main thread.

    Raises:
        KeyboardInterrupt: after that.
    """
    ours = (
        training.ranks.alone
        and threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if not ours:
        yield
        return

    def handle_interrupt(number: int, frame: FrameType | None) -> None:
        if training.stop_asked:
            raise KeyboardInterrupt
        training.stop_asked = True
        os.write(2, b"\ndynsparse: stopping after this step; Ctrl-C again stops at once\n")

    signal.signal(signal.SIGINT, handle_interrupt)
    try:
        with suppress(Stopped):
            yield
        if training.stop_asked:
            _save_stopped(training, console)
            raise KeyboardInterrupt
    finally:
        training.stop_asked = False
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _save_stopped(training: Training, console: Console) -> None:
    folder = training.options.checkpoint_path
    if folder is None:
        folder = Path(f"{training.app}-{secrets.token_hex(4)}")
        folder.mkdir(exist_ok=True)
    path = save(training, folder)
    lines = f"stopped after step {training.step:,}; to continue:", resume_command(training, path)
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def resume_command(training: Training, path: Path) -> str:
    """The command that goes on from a checkpoint, and writes where this training does."""
    options = training.options
    words = ["dynsparse", training.app, "--restore", str(path)]
    fields = type(options).__dataclass_fields__
    for name, option in options_of(type(options)).items():
        value = getattr(options, name)
        left_out = name in ("restore", "overwrite") or option.defines != "run"
        if left_out or value == default_of(fields[name]):
            continue
        words.append(f"--{flag(name)}")
        if not isinstance(value, bool):
            words += map(str, value) if isinstance(value, (list, tuple)) else [str(value)]
    return shlex.join(words)


_Options = TypeVar("_Options", bound=TrainingOptions)


def run_application(
    kind: type[Training],
    options: _Options,
    body: Callable[[_Options, int, Checkpoint | None, Console], dict[str, Any]],
    console: Console | None = None,
    given: Collection[str] = (),
) -> dict[str, Any]:
    """Run an application with `options`; returns the figures of `body`, which `--json` writes.

    Started by torchrun in several processes, these train together: each takes its share of every
    batch, and the first shows progress and writes files.

    Args:
        kind: whose checkpoints to look for.
        options: what to do. With `restore`, options at their default become the checkpoint's.
        body: called with the complete options, the seed, the checkpoint to start from, and where
            progress goes.
        console: where progress goes; defaults to stdout.
        given: options that were asked for, even at their default: with `restore` they must agree,
            and they must apply to the others.

    Raises:
        ValueError: options or files that are wrong; one line.
        OSError: files that cannot be read or written.
        ModuleNotFoundError: a logger that is not installed.
    """
    with process_group(options.device) as ranks:
        checkpoint = None
        with collective_errors(ranks):
            options.check()
            if options.restore is not None:
                checkpoint = Checkpoint.read(kind.app, find_checkpoint(kind, options.restore))
                options = fill_in(options, checkpoint, given)
                options.check()
            check_applies(options, given)
        seed = int.from_bytes(os.urandom(4), "little") if options.seed is None else options.seed
        seed = int(ranks.broadcast(torch.tensor([seed], device=ranks.device)))
        if ranks.rank:
            console = Console(quiet=True)  # the first rank speaks for all
        before = torch.get_num_threads()
        torch.set_num_threads(options.threads)
        try:
            with nullcontext() if options.trace is None else trace(options.trace):
                figures = body(options, seed, checkpoint, Console() if console is None else console)
        finally:
            torch.set_num_threads(before)
        if options.json is not None and ranks.rank == 0:
            atomic_write_text(options.json, json.dumps(figures, indent=2) + "\n")
        return figures
