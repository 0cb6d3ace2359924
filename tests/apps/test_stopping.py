"""Ctrl-C ends every training with a checkpoint from which it resumes exactly."""

import io
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from checkpoint_files import write_parts
from rich.console import Console
from saved_states import assert_equal, state

from dynsparse.apps import lm
from dynsparse.apps.common.training import Sums, Training
from dynsparse.apps.image_classification import mnist, transformer
from dynsparse.cli.app import run as command

TEXT = "the cat sat on the mat, the dog sat on the log.\n" * 40
APPS = {
    "mnist": (
        mnist,
        {"batch_size": 64, "hidden_sizes": (32,), "steps_per_epoch": 4, "epochs": 2, "seed": 7},
    ),
    "mnist-transformer": (
        transformer,
        {"batch_size": 256, "hidden_length": 16, "ff_length": 8, "attention_heads": 2, "seed": 7}
        | {"qkv_length": 8, "dropout_keep_prob": 0.9, "epochs": 2},
    ),
    "lm": (
        lm,
        {"layers": 1, "hidden_size": 16, "ff_size": 32, "heads": 2, "sequence_length": 8}
        | {"batch_size": 4, "steps": 12, "warmup_steps": 2, "valid_interval": 4, "seed": 7}
        | {"update_interval": 3, "sparsity": 0.5, "droprate": 0.1, "data": "text.txt"},
    ),
}
ENDS = {"mnist": "epoch-0002", "mnist-transformer": "epoch-0002", "lm": "step-0000012"}


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(TEXT)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def interrupt_at(monkeypatch):
    """Send Ctrl-C inside the step with the given number."""
    steps = set()
    plain = Training.optimise

    def optimise(self, sums):
        if self.step + 1 in steps:
            steps.discard(self.step + 1)
            signal.raise_signal(signal.SIGINT)
        plain(self, sums)

    monkeypatch.setattr(Training, "optimise", optimise)
    return steps.update


def train(name, **changes):
    module, options = APPS[name]
    shown = io.StringIO()
    console = Console(file=shown, width=80)
    try:
        figures = module.run(module.Options(**{**options, **changes}), console)
    except KeyboardInterrupt:
        figures = None
    return figures, shown.getvalue()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("at", [3, 6, 100])
@pytest.mark.parametrize("name", APPS)
def test_resume_after_interrupt_is_exact(name, at, interrupt_at, capfd):
    expected, _ = train(name, checkpoint_path=Path("whole"))
    last = expected["steps"]
    at = min(at, last)
    outputs = {"checkpoint_path": Path("halves"), "records_path": Path("record")}
    interrupt_at([at])
    figures, shown = train(name, **outputs, json=Path("figures.json"))
    assert figures is None
    assert capfd.readouterr().err.count("stopping after this step; Ctrl-C again") == 1
    line = shown.splitlines()[-1]
    assert shown.splitlines()[-2] == f"stopped after step {at:,}; to continue:"
    words = shlex.split(line)
    assert words[:3] == ["dynsparse", name, "--restore"]
    saved = Path(words[3])
    assert saved.parent == Path("halves")
    assert ("+" in saved.name) == (name != "lm" and at not in (last // 2, last))
    assert {"--checkpoint-path", "--records-path", "--json"} <= set(words)
    torch.manual_seed(3)
    assert command(words[1:]) == 0
    assert_equal(*(state(Path(f) / f"{ENDS[name]}.ckpt") for f in ("whole", "halves")))
    again = json.loads(Path("figures.json").read_text())
    keys = ["accuracy", "loss", "updates", "replaced", "steps"]
    for key in [*keys, "train_loss"] if at < last else keys:
        assert again.get(key) == expected.get(key), key


def test_interrupted_twice(interrupt_at):
    expected, _ = train("mnist", checkpoint_path=Path("whole"))
    interrupt_at([3, 5])
    _, shown = train("mnist", checkpoint_path=Path("halves"))
    _, shown = train("mnist", checkpoint_path=Path("halves"), restore=Path("halves"))
    assert "stopped after step 5" in shown
    assert {f.name for f in Path("halves").iterdir()} >= {"epoch-0000+3.ckpt", "epoch-0000+5.ckpt"}
    figures, _ = train("mnist", checkpoint_path=Path("halves"), restore=Path("halves"))
    assert figures["accuracy"] == expected["accuracy"]
    assert_equal(*(state(Path(f) / "epoch-0002.ckpt") for f in ("whole", "halves")))


def test_creates_the_default_checkpoint_folder(interrupt_at):
    interrupt_at([2])
    _, shown = train("mnist")
    (file,) = Path().glob("mnist-*/epoch-0000+2.ckpt")
    assert shown.splitlines()[-1] == f"dynsparse mnist --restore {file}"


def test_second_interrupt_stops_immediately(interrupt_at, monkeypatch):
    plain = Training.finish_window
    monkeypatch.setattr(
        Training, "finish_window", lambda s, w: (signal.raise_signal(signal.SIGINT), plain(s, w))
    )
    interrupt_at([5])
    figures, shown = train("mnist", checkpoint_path=Path("halves"))
    assert figures is None
    assert "stopped after" in shown or not list(Path("halves").iterdir())
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_installed_handler_is_kept():
    def own(number, frame):
        raise AssertionError("not called")

    signal.signal(signal.SIGINT, own)
    train("mnist", epochs=1)
    assert signal.getsignal(signal.SIGINT) is own


@pytest.mark.parametrize("name", ["mnist", "lm"])
def test_damaged_states_raise(name, interrupt_at):
    interrupt_at([3])
    train(name)
    (file,) = Path().glob(f"{name}-*/*.ckpt")
    parts = state(file)
    for wrong in (5, {"window": 1, "more": 2}, {**parts["extra"]["partial"], "window": {}}):
        write_parts(file, parts | {"extra": parts["extra"] | {"partial": wrong}})
        with pytest.raises(ValueError, match=r"of a training that stopped, got|expected sums"):
            train(name, restore=file)


def test_sums_are_restored():
    sums = Sums()
    sums.add(torch.tensor(3.5), torch.tensor(2), 4)
    assert vars(Sums.from_state(sums.state())) == vars(sums)


@pytest.mark.slow
def test_ctrl_c_in_a_terminal():
    """Signals a separate process; the resume command that it prints works."""
    flags = ["mnist", "--epochs", "200", "--batch-size", "64", "--seed", "3"]
    program = [sys.executable, "-m", "dynsparse.cli"]
    process = subprocess.Popen(
        [*program, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    try:
        for line in process.stdout:
            if "1/200" in line:
                break
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "dynsparse: interrupted" in err
    words = shlex.split(out.splitlines()[-1])
    done = subprocess.run(
        [*program, *words[1:], "--test-mode", "tests"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
