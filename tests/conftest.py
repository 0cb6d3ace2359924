"""Shared by every test: few examples, no deadlines, since machines that run tests are busy."""

import os
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from dynsparse.ops.linear import LayerIndex
from dynsparse.pattern import SparsePattern

sys.path.insert(0, str(Path(__file__).parent))
import torchvision_names  # noqa: F401

# Each test makes what it tests; those of the cache have one of their own.
os.environ["DYNSPARSE_CACHE_SIZE"] = "0"

settings.register_profile("dynsparse", deadline=None, max_examples=30, derandomize=True)
settings.load_profile("dynsparse")


@pytest.fixture(autouse=True)
def _same_seed():
    torch.manual_seed(0)


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


@pytest.fixture
def off_cpu(monkeypatch):
    """Layers of tensors on the CPU compute and change as if they were on a GPU."""
    made = LayerIndex.__init__
    index_on = SparsePattern._index_on

    def elsewhere(self, *args):
        made(self, *args)
        self.on_cpu = False

    def of_its_own(self, device):
        if self._is_on(device):
            return index_on(self, device)
        return self._thin(*(t.to(device, copy=True) for t in (self.row_ptr, self.cols)))

    monkeypatch.setattr(LayerIndex, "__init__", elsewhere)
    monkeypatch.setattr(SparsePattern, "_index_on", of_its_own)


@pytest.fixture
def without_cuda(monkeypatch):
    """Tensors without memory may be said to be on a GPU where torch knows none."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
