"""Shared by every test: few examples, no deadlines, since machines that run tests are busy.

`make test` leaves out what is marked `slow`, and draws a third of the examples; `make test-all`
runs the rest.
"""

import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from dynsparse.ops.linear import LayerIndex
from dynsparse.pattern import SparsePattern

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "docs" / "tools"))
import torchvision_names

# What was measured or downloaded on this machine before is not for tests.
_cache = tempfile.TemporaryDirectory(prefix="dynsparse-cache-", ignore_cleanup_errors=True)
os.environ["DYNSPARSE_CACHE_DIR"] = _cache.name

settings.register_profile("dynsparse", deadline=None, max_examples=30, derandomize=True)
settings.register_profile("quick", settings.get_profile("dynsparse"), max_examples=10)
settings.load_profile("dynsparse")

# Many processes, kills, sanitizers, installations: slow, but for what is marked `quick`.
_SLOW_FOLDERS = {"distributed", "faults", "fuzz", "packaging", "sanitize", "soak"}


def pytest_report_header():
    if torchvision_names.library is None:
        return "torchvision: as installed"
    return (
        "torchvision: built for another torch; it and what imports it load because the tests "
        "declare the names of its operators"
    )


def pytest_addoption(parser):
    parser.addoption("--no-skips", action="store_true", help="a test that is skipped is a failure")


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    seen = Counter()
    for item in items:
        folder = item.path.relative_to(here).parts[0]
        if folder in _SLOW_FOLDERS and item.get_closest_marker("quick") is None:
            item.add_marker("slow")
        sampled = item.get_closest_marker("sampled")
        if sampled and item.get_closest_marker("slow") is None:
            test = item.path, item.originalname
            if seen[test] % sampled.args[0]:
                item.add_marker("slow")
            seen[test] += 1


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if session.config.getoption("--no-skips") and reporter and reporter.stats.get("skipped"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(autouse=True)
def _same_seed():
    torch.manual_seed(0)


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


@pytest.fixture
def off_cpu(monkeypatch):
    """Make layers on the CPU compute and update as if they were on a GPU."""
    made = LayerIndex.__init__
    index_on = SparsePattern._index_on

    def elsewhere(self, *args, **options):
        made(self, *args, **options)
        self.on_cpu = False

    def of_its_own(self, device):
        if self._is_on(device):
            return index_on(self, device)
        held = self.row_ptr, self.sorted_cols, self.slots
        return self._make_csr_index(*(tensor.to(device, copy=True) for tensor in held))

    monkeypatch.setattr(LayerIndex, "__init__", elsewhere)
    monkeypatch.setattr(SparsePattern, "_index_on", of_its_own)


@pytest.fixture
def without_cuda(monkeypatch):
    """Allow fake CUDA tensors on machines without CUDA."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
