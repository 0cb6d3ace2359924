"""The same computation on the kernels of one instruction set, or on none."""

import pytest
import torch

from dynsparse._core import native

ISAS = native.describe()["available"]

needs_kernels = pytest.mark.skipif(native.load() is None, reason="compiled kernels are not used")


def with_library(isa, function, threads=1):
    """What `function` returns on the kernels of one instruction set, or without any."""
    library = None if isa is None else native.load_isa(isa)
    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "load", lambda: library)
        torch.set_num_threads(threads)
        try:
            return function()
        finally:
            torch.set_num_threads(before)
