"""Runs Triton kernels without a GPU, on CPU tensors in Triton's interpreter."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
pytest.register_assert_rewrite("cases")
WITHOUT_TRITON = "needs Triton (x86-64 Linux): make test-gpu-kernels"


@pytest.fixture
def interpreter():
    """Interpret kernels, and fill their results with NaN first."""
    pytest.importorskip("triton", reason=WITHOUT_TRITON)
    import interpreted

    before = torch.utils.deterministic.fill_uninitialized_memory
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    try:
        with interpreted.kernels():
            yield
    finally:
        torch.use_deterministic_algorithms(deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = before
