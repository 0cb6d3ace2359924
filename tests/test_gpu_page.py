"""docs/gpu.md tells no figures that nobody measured, and the commands of the benchmark."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from dynsparse.ops.linear.cuda.chip import TERMS
from dynsparse.ops.linear.cuda.costs import B200, H200
from dynsparse.ops.linear.cuda.dense import KEPT_LINES, PANEL_BYTES

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "gpu.md").read_text()


def test_nothing_is_called_measured():
    """Whoever puts measured rates into the table changes what the page says of them."""
    assert not any(rates.measured for rates in (H200, B200))
    assert "**Nothing on this page was measured on a GPU.**" in PAGE
    assert "no figures are measured" in (ROOT / "README.md").read_text()
    assert "nobody has measured what they gain" in (ROOT / "README.md").read_text()
    assert not re.search(r"\d x\b|\dx\b| us\b", PAGE)  # and no times or ratios are predicted


def test_numbers_of_the_page_are_those_of_the_code():
    for number in (f"{KEPT_LINES:,} lines", f"{PANEL_BYTES >> 20} MiB", f"every {TERMS:,} terms"):
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
