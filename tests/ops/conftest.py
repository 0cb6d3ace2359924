"""Puts this folder on the import path; restores what tests change in the whole process."""

import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dynsparse.ops.linear import cost_table

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _same_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def poisoned():
    """Fill new tensors with NaN, so that unwritten elements show."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class _LargestTensor(TorchDispatchMode):
    elements = bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
                self.bytes = max(self.bytes, tensor.nbytes)
        return results


@pytest.fixture
def largest_tensor():
    """Find, in a `with` block, the most `elements` and `bytes` of a tensor that is returned."""
    return _LargestTensor()


@pytest.fixture
def restore_cost_table(monkeypatch):
    """Start without an active cost table, and restore that afterwards."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    cost_table._active = None
    yield
    cost_table._active = None
