"""Resuming is exact, and a checkpoint is whole whenever the training is killed."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console
from saved_states import assert_equal, state

from dynsparse import SparsePattern
from dynsparse.apps.common.resume import find_checkpoint
from dynsparse.apps.pictures import Training
from dynsparse.apps.pictures.mnist import Options, run
from dynsparse.training.checkpoint import save_checkpoint
from dynsparse.training.records import Records

QUIET = Console(quiet=True)
TINY = {"batch_size": 64, "hidden_sizes": (32,), "steps_per_epoch": 4, "epochs": 2, "seed": 7}


def tiny(**changes):
    return run(Options(**{**TINY, **changes}), QUIET)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "dynsparse.cli", "mnist", *arguments]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"method": "set", "optimizer": "Momentum", "permute_input": "random"},
        {"method": "static", "optimizer": "GradientDescent"},
        {"method": "dense"},
        {"block_size": 8, "pooling_type": "AVG", "permute_input": "block"},
        {"data_type": "bfloat16"},
    ],
    ids=str,
)
def test_two_epochs_equal_one_and_one(tmp_path, changes):
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    expected = tiny(checkpoint_path=whole, **changes)
    tiny(checkpoint_path=halves, stop_after=1, **changes)
    torch.manual_seed(99)
    got = tiny(checkpoint_path=halves, restore=halves, **changes)
    assert_equal(state(whole / "epoch-0002.ckpt"), state(halves / "epoch-0002.ckpt"))
    for key in ("accuracy", "loss", "updates", "replaced", "steps", "epochs"):
        assert got[key] == expected[key]


@pytest.mark.slow
def test_a_new_process_resumes_bit_for_bit(tmp_path):
    """Train 2 epochs = train 1, new process, restore, train 1."""
    flags = ["--batch-size", "64", "--hidden-size", "32", "--epochs", "2", "--seed", "7"]
    runs = [
        [*flags, "--checkpoint-path", "whole"],
        [*flags, "--checkpoint-path", "halves", "--stop-after", "1", "--records-path", "rec"],
        ["--restore", "halves", "--checkpoint-path", "halves", "--records-path", "rec"],
    ]
    for arguments in runs:
        subprocess.run(command(*arguments), cwd=tmp_path, check=True, capture_output=True)
    assert_equal(
        state(tmp_path / "whole" / "epoch-0002.ckpt"),
        state(tmp_path / "halves" / "epoch-0002.ckpt"),
    )
    saved = state(tmp_path / "whole" / "epoch-0002.ckpt")
    last = Records.load(tmp_path / "rec").pattern("fc1", -1)
    rows, cols = (saved["model"][f"fc1.{name}"] for name in ("rows", "cols"))
    assert last == SparsePattern(rows, cols, shape=last.shape)


def test_the_record_and_the_log_go_on(tmp_path):
    outputs = {"records_path": tmp_path / "rec", "log": tmp_path / "log.txt"}
    tiny(checkpoint_path=tmp_path / "a", **outputs)
    expected = Records.load(tmp_path / "rec")
    patterns = [p for _, p in expected.patterns("fc1")]
    # Back to the first epoch: what the record says of the second is forgotten and made anew.
    tiny(restore=tmp_path / "a" / "epoch-0001.ckpt", records_path=tmp_path / "rec")
    again = Records.load(tmp_path / "rec")
    assert again.steps == expected.steps
    assert [p for _, p in again.patterns("fc1")] == patterns
    assert len((tmp_path / "log.txt").read_text().splitlines()) == 1 + 2 * 5


def test_flags_left_out_are_those_of_the_checkpoint(tmp_path):
    tiny(checkpoint_path=tmp_path, stop_after=1, densities=(0.2, 1.0), droprate=0.3)
    figures = run(Options(restore=tmp_path), QUIET)
    assert figures["epochs"] == 2
    assert figures["seed"] == 7
    assert figures["layers"][0]["density"] == pytest.approx(0.2, abs=1e-4)


def test_testing_a_checkpoint_changes_nothing(tmp_path):
    trained = tiny(checkpoint_path=tmp_path)
    before = sorted(tmp_path.iterdir())
    tested = run(Options(restore=tmp_path, test_mode="tests", checkpoint_path=tmp_path), QUIET)
    assert tested["accuracy"] == trained["accuracy"]
    assert tested["train_loss"] is None
    assert sorted(tmp_path.iterdir()) == before


def test_checkpoint_frequency_and_the_newest(tmp_path):
    tiny(checkpoint_path=tmp_path, epochs=5, checkpoint_freq=2)
    names = sorted(f.name for f in tmp_path.iterdir())
    assert names == ["epoch-0002.ckpt", "epoch-0004.ckpt", "epoch-0005.ckpt"]
    assert find_checkpoint(Training, tmp_path).name == "epoch-0005.ckpt"
    assert find_checkpoint(Training, tmp_path / "epoch-0002.ckpt").name == "epoch-0002.ckpt"
    (tmp_path / "epoch-12345.ckpt").touch()
    (tmp_path / "epoch-99999.ckpt.tmp").touch()
    assert find_checkpoint(Training, tmp_path).name == "epoch-12345.ckpt"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    tiny(checkpoint_path=folder, stop_after=1)
    return folder / "epoch-0001.ckpt"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 32}, "--batch-size: "),
        ({"epochs": 3}, "was trained with 2, got 3: leave --epochs out, or start anew"),
        ({"method": "set"}, "was trained with 'rigl', got 'set'"),
        ({"densities": (0.2, 0.3)}, "--densities: "),
        ({"optimizer_arg": {"beta1": 0.8}}, "--optimizer-arg: "),
        ({"seed": 8}, "--seed: "),
        ({"records_path": Path("rec")}, "expected the record of the restored training"),
    ],
    ids=str,
)
def test_another_training_is_refused(checkpoint, changes, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"was trained with|expected the record") as error:
        tiny(restore=checkpoint, **changes)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_damaged_and_foreign_files_are_refused(checkpoint, tmp_path):
    content = checkpoint.read_bytes()
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1
    damaged = {
        "empty": b"",
        "foreign": b"PK\x03\x04 something else entirely" * 9,
        "cut": content[:-1],
        "cut header": content[:30],
        "flipped": bytes(flipped),
        "newer": content[:16] + b"\x09\0\0\0" + content[20:],
    }
    for name, wrong in damaged.items():
        file = tmp_path / name
        file.write_bytes(wrong)
        with pytest.raises(ValueError, match=r"not a dynsparse|truncated|damaged|version") as error:
            tiny(restore=file)
        assert str(file) in str(error.value)
        assert "\n" not in str(error.value)


def test_a_checkpoint_of_something_else_is_refused(tmp_path):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    save_checkpoint(tmp_path / "a.ckpt", model=model, optimizer=optimizer)
    with pytest.raises(ValueError, match="expected a checkpoint of `dynsparse mnist`"):
        tiny(restore=tmp_path / "a.ckpt")


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_a_loadable_checkpoint(tmp_path):
    flags = ["--batch-size", "64", "--hidden-size", "32", "--epochs", "500", "--seed", "7"]
    path = tmp_path / "ckpt"
    for moment in (0.0, 0.05, 0.13):
        shutil.rmtree(path, ignore_errors=True)
        process = subprocess.Popen(
            command(*flags, "--checkpoint-path", str(path)),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        while not list(path.glob("epoch-*.ckpt")):
            assert process.poll() is None
            time.sleep(0.01)
        time.sleep(moment)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        figures = run(Options(restore=path, test_mode="tests"), QUIET)
        assert figures["epochs"] >= 1
        for file in path.glob("epoch-*.ckpt"):
            state(file)
