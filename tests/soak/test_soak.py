"""Short version of `make soak`: the same checks with fewer steps."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

_spec = importlib.util.spec_from_file_location("soak", Path(__file__).with_name("run.py"))
soak = importlib.util.module_from_spec(_spec)
sys.modules["soak"] = soak
_spec.loader.exec_module(soak)

LIMIT = 4 << 20

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="memory and open files are read from /proc"
)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize("name", soak.ALGORITHMS)
def test_training_leaks_no_memory_or_files(name):
    watched = soak.train(name, steps=2000, updates=200)
    assert watched.steps == 2000
    assert name == "gmp" or watched.updates == 200
    assert watched.growth <= LIMIT, watched.memory
    assert watched.more_files == 0, watched.files


@pytest.mark.slow
@pytest.mark.parametrize("name", soak.BACKWARDS)
def test_backward_without_step_leaks_no_memory(name):
    watched = soak.backward_only(name, passes=3000)
    assert watched.growth <= LIMIT, watched.memory
