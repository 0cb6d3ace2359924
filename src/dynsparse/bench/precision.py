"""Products of float32 that torch may compute in less: `set_float32_matmul_precision("medium")`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

# Between the relative errors of products of float32, below 1e-6, and of bfloat16, above 1e-3.
_BETWEEN = 3e-5


@contextmanager
def medium_precision() -> Iterator[None]:
    """What `torch.set_float32_matmul_precision("medium")` sets for CPUs, and back again.

    oneDNN computes the products then, and may round what it multiplies to bfloat16. From torch 2.9
    on the setting has a place of its own, and is as it was afterwards; by the function it would not
    be, and would be refused to those who use both.
    """
    matmul = getattr(torch.backends.mkldnn, "matmul", None)
    if matmul is not None and hasattr(matmul, "fp32_precision"):
        before, matmul.fp32_precision = matmul.fp32_precision, "bf16"
        try:
            yield
        finally:
            matmul.fp32_precision = before
        return
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)


def products_at_medium() -> str:
    """In what type this processor multiplies then: "bfloat16" or "float32"."""
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(2, 256, 256, generator=generator)
    with medium_precision():
        return multiplied_in(x @ w, x, w)


def multiplied_in(product: Tensor, x: Tensor, w: Tensor) -> str:
    """In what type x @ w, both float32, was computed, by its error: "bfloat16" or "float32"."""
    exact = x.double() @ w.double()
    return "bfloat16" if (product - exact).norm() > _BETWEEN * exact.norm() else "float32"
