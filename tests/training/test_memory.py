"""How far the resident memory rises: a fact of the machine's allocator, so on Linux only."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dynsparse import native

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "memory.py"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.skipif(native.load() is None, reason="plain torch needs more room")
def test_a_large_layer_trains_and_changes_its_pattern_in_300_megabytes(tmp_path):
    result = tmp_path / "memory.json"
    command = [sys.executable, str(BENCHMARK), "--size", "16384", "--density", "0.01"]
    subprocess.run([*command, "--batch", "256", "--json", str(result)], check=True)
    figures = json.loads(result.read_text())
    assert figures["updates"] == 2
    assert figures["nnz"] == round(0.01 * 16384**2)
    assert figures["peak"] <= 300e6
    assert figures["peak"] > 4 * 4 * figures["nnz"]  # values, gradient and Adam's two moments
