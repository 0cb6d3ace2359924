"""docs/gpu.md tells no figures that nobody measured, and the commands of the benchmark."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from page_tables import cells_of

from dynsparse.ops.linear.cuda.dense import KEPT_LINES, PANEL_BYTES

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "gpu.md").read_text()
MEASURED = json.loads((ROOT / "benchmarks" / "results" / "gpu-h100.json").read_text())["sections"]


def rows(section: str) -> dict[str, dict]:
    return {row["what"]: row for row in MEASURED[section]}


def test_layers_are_as_fast_as_was_measured():
    steps = {what.partition(", eager")[0]: row for what, row in rows("steps").items()}
    for b, *ratios in cells_of("gpu.md", "| blocks | times faster than masked dense "):
        wanted = []
        for dtype in ("bfloat16", "autocast"):
            row = steps.get(f"step, blocks of {b}, {dtype}")
            wanted += [f"{row[k]:.2f}" if row else "" for k in ("over_masked", "over_dense")]
        assert ratios == wanted


def test_models_are_as_fast_as_was_measured():
    found, model = cells_of("gpu.md", "| model | blocks | density "), ""
    measured = {what: row for what, row in rows("model").items() if "dense" not in what}
    assert len(found) == len(measured)
    for name, b, density, *ratios in found:
        model = name.partition(" (")[0] or model
        row = measured[f"a compiled step of {model}, blocks of {b}, density {density}"]
        assert ratios == [f"{row['over_dense']:.2f}", f"{row['of_dense']:.2f}"]
    losses = [f"{rows('training')[f'500 steps, {how}']['last_loss']:.2f}"
              for how in ("RigL", "masked", "dense")]  # fmt: skip
    told = " ".join(PAGE.split())
    assert "{} with RigL, {} with the mask that RigL began with, {} dense".format(*losses) in told


def test_readme_tells_what_was_measured():
    steps = rows("steps")
    ratios = [steps[f"step, blocks of {b}, bfloat16, eager: blocks, blocks"]["over_masked"]
              for b in (64, 128)]  # fmt: skip
    told = " ".join((ROOT / "README.md").read_text().split())
    assert "is {:.1f} and {:.1f} times as fast as a masked one".format(*ratios) in told


def test_numbers_of_the_page_are_those_of_the_code():
    for number in (f"{KEPT_LINES:,} lines", f"{PANEL_BYTES >> 20} MiB"):
        assert number in " ".join(PAGE.split())


def test_the_commands_and_sections_of_the_page_are_those_of_the_benchmark():
    pytest.importorskip("triton", reason="needs Triton (x86-64 Linux): make test-gpu-kernels")
    script = ROOT / "benchmarks" / "gpu.py"
    lines = re.findall(r"python3 benchmarks/gpu\.py([^#\n]*)", PAGE)
    names = subprocess.run(
        [sys.executable, "-c", f"import runpy; print(*runpy.run_path({str(script)!r})"
         "['all_sections'](), sep='\\n')"],
        capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    told = re.findall(r"^\| (`[^|]*) \|", PAGE.partition("| section |")[2].partition("#")[0], re.M)
    listed = [name for cell in told for name in re.findall(r"`([^`]*)`", cell)]
    assert set(listed) <= set(names)
    assert {name.split()[0] for name in names} == {name.split()[0] for name in listed}
    help_ = subprocess.run(
        [sys.executable, str(script), "--help"], capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert len(lines) == 6
    for line in lines:
        words = line.split()
        for i, word in enumerate(words):
            value = i > 0 and words[i - 1] in ("--out", "--limit", "--tokens")
            assert value or (word in help_ if word.startswith("--") else word in names)
