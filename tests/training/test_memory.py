"""Peak resident memory of trainings; depends on the allocator, so on Linux only."""

import ctypes
import json
import subprocess
import sys
from pathlib import Path

import pytest

import dynsparse as ds
from dynsparse._core import native
from dynsparse.training import memory

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


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_benchmark_reports_the_parts_of_memory(tmp_path):
    result = tmp_path / "memory.json"
    command = [sys.executable, str(BENCHMARK), "--size", "1024", "--density", "0.1", "--steps", "2"]
    subprocess.run([*command, "--json", str(result)], check=True)
    figures = json.loads(result.read_text())
    parts, weights = figures["parts"], round(0.1 * 1024**2)
    assert parts["values and bias"] == parts["gradient"] == 4 * (weights + 1024)
    assert 8 * (weights + 1024) <= parts["optimizer"] <= 8 * (weights + 1024) + 64  # two steps
    assert parts["x, dY, gradient of x"] == 3 * 4 * 256 * 1024
    # Columns, slots, and both by columns; pointers to rows and columns.
    assert 4 * 4 * weights <= parts["pattern and index"] <= 4 * (4 * weights + 3 * 1025)
    if native.load() is not None:
        assert 11 * weights <= parts["panels"] <= 18 * weights
        assert parts["scratch of the kernels"] > 0
    assert figures["machine"]["threads"] >= 1
    assert max(figures["peaks"].values()) == figures["peak"] >= sum(parts.values())


FREED = """
import re, sys
from pathlib import Path
import torch
import dynsparse as ds

def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) // 1024

if sys.argv[1] == "keep":
    assert ds.training.keep_memory() is True
before = resident()
tensors = [torch.ones(megabytes << 18) for megabytes in (12, 50, 3, 12)]
grown = resident() - before
del tensors
print(grown, resident() - before)
"""


def is_glibc() -> bool:
    return sys.platform == "linux" and hasattr(ctypes.CDLL(None), "gnu_get_libc_version")


@pytest.mark.slow
@pytest.mark.skipif(not is_glibc(), reason="of glibc")
@pytest.mark.parametrize("how", ["keep", "as it comes"])
def test_keep_freed_memory(how):
    command = [sys.executable, "-c", FREED, how]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    grown, left = map(int, done.stdout.split())
    assert grown >= 75  # megabytes, all of them touched
    assert left >= 75 if how == "keep" else left <= 40


def test_other_c_libraries_are_not_changed(monkeypatch):
    monkeypatch.setattr(memory, "_glibc_function", lambda name: None)
    assert ds.training.keep_memory() is False
