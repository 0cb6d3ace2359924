"""Runs Triton kernels without a GPU, on CPU tensors in Triton's interpreter."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
pytest.register_assert_rewrite("cases")
WITHOUT_TRITON = "needs Triton (x86-64 Linux): make test-gpu-kernels"


@pytest.fixture
def interpreter(poisoned):
    """Interpret kernels, and fill their results with NaN first."""
    pytest.importorskip("triton", reason=WITHOUT_TRITON)
    import interpreted

    with interpreted.kernels():
        yield
