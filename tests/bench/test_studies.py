"""Scripts that nothing else runs: the studies of learning, and those that fit costs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
VARIANTS = {
    "learning/run.py": [
        "rigl, 16 batches", "rigl, window 16, protected, second moment", "rigl, correlation",
        "rigl, initial step, regrow, attention only", "set, erk", "static", "masked rigl",
    ],
    "learning/blocks/run.py": [
        "plain", "heads, balanced, matched", "random, captured", "wide, matching", "places both",
        "carried, interleaved",
    ],
}  # fmt: skip
SIZES = {
    "learning/run.py": ["--hidden-size", "16"],
    "learning/blocks/run.py": ["--hidden-size", "64", "--block", "16"],
}


def run(script, *arguments):
    subprocess.run([sys.executable, str(FOLDER / script), *map(str, arguments)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("script", VARIANTS)
def test_every_variant_trains(script, tmp_path):
    text, output = tmp_path / "text.txt", tmp_path / "rows.jsonl"
    text.write_text("the cat sat on the mat, the dog sat on the log.\n" * 200)
    more = ["--steps", 40, *SIZES[script], "--variants", *VARIANTS[script]]
    run(script, "--data", text, "--seeds", 0, "--output", output, *more)
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["variant"] for row in rows] == VARIANTS[script]
    assert all(row.get("final", row.get("test")) < 4 for row in rows)


@pytest.mark.slow
def test_overhead_of_a_trace():
    run("trace_overhead.py", "--pairs", 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "layer"), [("conv_choice.py", "WRN-22-2 3x3 late"), ("kernel_choice.py", "64x64")]
)
def test_costs_are_measured_fitted_and_checked(script, layer, tmp_path):
    small = ["--layers", layer, "--densities", "0.1", "0.5", "--batches", 1, "--seconds", "0.001"]
    for action in ("measure", "fit", "check"):
        run(script, action, tmp_path / "times.jsonl", *small)
