"""Checkpoints that version 0.1.0 wrote half way are resumed to what it gave in one go.

`figures.json` holds the figures of the uninterrupted trainings by the old program.
"""

import json
from pathlib import Path

import pytest
from rich.console import Console

from dynsparse.apps import lm
from dynsparse.apps.pictures import mnist, transformer

QUIET = Console(quiet=True)
FOLDER = Path(__file__).parent / "old_checkpoints"
FIGURES = json.loads((FOLDER / "figures.json").read_text())


def test_every_file_has_its_figures():
    assert {file.stem for file in FOLDER.glob("*.ckpt")} == FIGURES.keys()


@pytest.mark.parametrize("name", FIGURES)
def test_an_old_checkpoint_is_resumed(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("the cat sat on the mat, the dog sat on the log.\n" * 40)
    app = {"mnist": mnist, "mnist-transformer": transformer, "lm": lm}[name.rpartition("-")[0]]
    got = app.run(app.Options(restore=FOLDER / f"{name}.ckpt"), QUIET)
    expected = FIGURES[name]
    if "layers" in expected:
        got["layers"] = [layer["weights"] for layer in got["layers"]]
    for key, value in expected.items():
        # float64: other instruction sets differ in the last digits
        assert got[key] == (pytest.approx(value, rel=1e-9) if isinstance(value, float) else value)
