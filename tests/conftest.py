"""Shared by every test: few examples, no deadlines, since machines that run tests are busy."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from dynsparse.ops.linear import LayerIndex
from dynsparse.pattern import SparsePattern

settings.register_profile("dynsparse", deadline=None, max_examples=30, derandomize=True)
settings.load_profile("dynsparse")


def _operators_of_torchvision():
    """Their names, where torchvision is built for a torch with CUDA and this one has none.

    The package index has no other torchvision. Its operators do not load then, and without their
    names neither does it, nor does transformers. No test calls them.
    """
    found = find_spec("torchvision")
    if found is None or found.origin is None:
        return None
    try:
        for file in Path(found.origin).parent.glob("_C*.so"):
            torch.ops.load_library(file)
    except OSError:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return library
    return None


_torchvision = _operators_of_torchvision()


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
