"""Ctrl-C ends a training after the step under way, with a checkpoint to go on from."""

from __future__ import annotations

import os
import shlex
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from rich.console import Console

from dynsparse.apps.common.resume import save
from dynsparse.apps.common.training import Stopped, Training
from dynsparse.options import default_of, flag, options_of


@contextmanager
def stoppable(training: Training, console: Console) -> Iterator[None]:
    """Inside, the first Ctrl-C lets `training` raise `Stopped`; the second is a KeyboardInterrupt.

    What was trained is then written: to --checkpoint-path, or to a folder of its own in the current
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

    def ask(number: int, frame: FrameType | None) -> None:
        if training.stop_asked:
            raise KeyboardInterrupt
        training.stop_asked = True
        os.write(2, b"\ndynsparse: stopping after this step; Ctrl-C again stops at once\n")

    signal.signal(signal.SIGINT, ask)
    try:
        with suppress(Stopped):
            yield
        if training.stop_asked:
            _write(training, console)
            raise KeyboardInterrupt
    finally:
        training.stop_asked = False
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _write(training: Training, console: Console) -> None:
    folder = training.options.checkpoint_path
    if folder is None:
        folder = Path(f"{training.app}-{training.identity[:8]}")
        folder.mkdir(exist_ok=True)
    path = save(training, folder)
    lines = f"stopped after step {training.step:,}; to go on:", resuming_line(training, path)
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def resuming_line(training: Training, path: Path) -> str:
    """The command that goes on from a checkpoint, and writes where this training does."""
    options = training.options
    words = ["dynsparse", training.app, "--restore", str(path)]
    fields = type(options).__dataclass_fields__
    for name, known in options_of(type(options)).items():
        value = getattr(options, name)
        left_out = name in ("restore", "overwrite") or known.defines != "run"
        if left_out or value == default_of(fields[name]):
            continue
        words.append(f"--{flag(name)}")
        if not isinstance(value, bool):
            words += map(str, value) if isinstance(value, (list, tuple)) else [str(value)]
    return shlex.join(words)
