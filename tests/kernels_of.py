"""Run a computation with the kernels of a given instruction set, or without kernels."""

import pytest
import torch

from dynsparse._core import native

ISAS = native.describe()["available"]

needs_kernels = pytest.mark.skipif(native.load() is None, reason="compiled kernels are not used")


def with_library(isa, function, threads=1):
    """Return `function()` with the kernels of one instruction set, or without kernels if None."""
    before = torch.get_num_threads()
    with native.use_isa(isa or "none"):
        torch.set_num_threads(threads)
        try:
            return function()
        finally:
            torch.set_num_threads(before)
