"""benchmarks/loss_against_time.py: masked and sparse trainings are equal; figures are drawn."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "loss_against_time.py"


@pytest.mark.slow
def test_masked_and_sparse_learn_the_same(tmp_path):
    pytest.importorskip("matplotlib")
    text, found, plot = (tmp_path / name for name in ("text.txt", "found.json", "loss.png"))
    text.write_text("to be or not to be, that is the question. " * 200)
    small = ["--width", "32", "--heads", "2", "--layers", "1", "--steps", "30", "--interval", "5",
             "--rate", "0.01"]  # fmt: skip
    run = [sys.executable, str(SCRIPT), *small, "--data", str(text), "--json", str(found)]
    subprocess.run(run, check=True)
    losses = json.loads(found.read_text())["losses"]
    sparse, masked, dense = (
        [loss for *_, loss in losses[k]] for k in ("sparse", "masked", "dense")
    )
    assert sparse == pytest.approx(masked, abs=2e-3)
    assert all(curve[-1] < curve[0] - 0.5 for curve in (sparse, masked, dense))
    assert dense != pytest.approx(sparse, abs=1e-2)
    draw = [sys.executable, str(SCRIPT), "--from", str(found), "--output", str(plot)]
    subprocess.run(draw, check=True)
    assert plot.read_bytes().startswith(b"\x89PNG")
