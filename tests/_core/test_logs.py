"""Logging of the library, and the environment variables that control it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest
import torch

import dynsparse as ds
from dynsparse._core import logs
from dynsparse.cli.app import run as command
from dynsparse.training.checkpoint import load_checkpoint, save_checkpoint
from popsparse import PlanningCache, plan
from popsparse.machine import Target

PYTHON = [sys.executable, "-W", "error", "-c"]


@pytest.fixture(autouse=True)
def _as_before(monkeypatch):
    yield
    for name in ("DYNSPARSE_LOG_LEVEL", "DYNSPARSE_LOG_DEST"):
        monkeypatch.delenv(name, raising=False)
    logs.configure()
    assert logging.getLogger("dynsparse").propagate


def train(tmp_path):
    model = torch.nn.Sequential(ds.nn.SparseLinear(16, 8, density=0.3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = ds.SET(model, optimizer, total_steps=10, update_interval=2, seed=0)
    for _ in range(2):
        model(torch.randn(4, 16)).sum().backward()
        trainer.step()
    path = tmp_path / "a.ckpt"
    save_checkpoint(path, model=model, optimizer=optimizer, trainer=trainer)
    load_checkpoint(path, model=model)
    return path


def test_updates_checkpoints_and_choices_are_logged(tmp_path, caplog):
    with caplog.at_level(logging.DEBUG, "dynsparse"):
        path = train(tmp_path)
    assert "update after step 2 of 1 layers" in caplog.messages
    assert any("blocks dropped" in one for one in caplog.messages)
    assert any(one.startswith(f"saved {path}, ") for one in caplog.messages)
    assert f"loaded {path}" in caplog.messages
    assert all(record.name.startswith("dynsparse.") for record in caplog.records)


def test_plans_and_cached_plans_are_logged(caplog):
    cache = PlanningCache()
    with caplog.at_level(logging.DEBUG, "dynsparse"):
        for _ in range(2):
            plan(64, 64, 8, 0.5, target=Target(tiles=4), cache=cache)
    planned = [one for one in caplog.records if one.message.startswith("planned ")]
    assert [one.levelname for one in planned] == ["INFO"]
    assert sum("made earlier" in one for one in caplog.messages) == 1


@pytest.mark.parametrize(
    ("level", "shown"), [("info", True), ("DEBUG", True), ("Warn", False), ("TRACE", True)]
)
def test_log_level_from_the_environment(tmp_path, monkeypatch, capsys, level, shown):
    monkeypatch.setenv("DYNSPARSE_LOG_LEVEL", level)
    logs.configure()
    train(tmp_path)
    out, err = capsys.readouterr()
    assert ("INFO dynsparse.training.trainer: update after step 2" in err) == shown
    assert ("DEBUG" in err) == (level in ("DEBUG", "TRACE"))
    assert not out


def test_log_file_is_appended(tmp_path, monkeypatch, capsys):
    file = tmp_path / "log.txt"
    file.write_text("before\n")
    monkeypatch.setenv("DYNSPARSE_LOG_LEVEL", "INFO")
    monkeypatch.setenv("DYNSPARSE_LOG_DEST", str(file))
    logs.configure()
    train(tmp_path)
    lines = file.read_text().splitlines()
    assert lines[0] == "before"
    assert any("update after step 2" in line for line in lines)
    assert capsys.readouterr() == ("", "")


def test_standard_output(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DYNSPARSE_LOG_LEVEL", "INFO")
    monkeypatch.setenv("DYNSPARSE_LOG_DEST", "stdout")
    logs.configure()
    train(tmp_path)
    out, err = capsys.readouterr()
    assert "update after step 2" in out
    assert not err


@pytest.mark.parametrize(
    ("level", "place", "said"),
    [
        ("loud", "", "expected OFF, ERROR, WARNING, INFO or DEBUG, got 'loud'"),
        ("", "stderr", "expected DYNSPARSE_LOG_LEVEL with it"),
        ("INFO", "/there/is/none", "expected stderr, stdout or a file that can be written"),
        ("INFO", "/", "expected stderr, stdout or a file"),
    ],
)
def test_invalid_settings_raise_one_line(monkeypatch, capsys, level, place, said):
    monkeypatch.setenv("DYNSPARSE_LOG_LEVEL", level)
    monkeypatch.setenv("DYNSPARSE_LOG_DEST", place)
    with pytest.raises(ValueError, match=said):
        logs.configure()
    assert command(["info"]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_warnings_show_the_line_of_the_caller():
    layer = ds.nn.SparseLinear(4, 4, density=0.5)
    with pytest.warns(UserWarning, match="uses the dense weight") as caught:
        torch.nn.functional.relu(layer.weight)
    assert caught[0].filename == __file__
    model = torch.nn.Sequential(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="the pattern never changes") as caught:
        ds.RigL(model, optimizer, total_steps=4, update_interval=10)
    assert caught[0].filename == __file__


@pytest.mark.slow
def test_library_is_logged_at_first_use():
    program = "import dynsparse as ds, torch; ds.nn.SparseLinear(8, 8, density=0.5)(torch.ones(8))"
    ended = subprocess.run(
        [*PYTHON, program],
        env=os.environ | {"DYNSPARSE_LOG_LEVEL": "loud"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 1
    assert "ValueError: DYNSPARSE_LOG_LEVEL: expected OFF, ERROR" in ended.stderr


def test_import_logs_the_kernels():
    program = "import dynsparse as ds, torch; ds.nn.SparseLinear(8, 8, density=0.5)(torch.ones(8))"
    ended = subprocess.run(
        [*PYTHON, program],
        env=os.environ | {"DYNSPARSE_LOG_LEVEL": "INFO", "DYNSPARSE_ISA": "none"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "INFO dynsparse._core.native: no compiled kernels: DYNSPARSE_ISA=none" in ended.stderr
    assert not ended.stdout
