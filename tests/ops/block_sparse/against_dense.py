"""Random patterns, and comparison of values and gradients with dense float64 matrices."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from dynsparse import SparsePattern

KINDS = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])


@st.composite
def patterns(draw, square: bool = False) -> SparsePattern:
    block = draw(st.sampled_from([1, 2, 4, 5, 16]))
    height = draw(st.integers(1, 5))
    width = height if square else draw(st.integers(1, 5))
    flat = draw(st.sets(st.integers(0, height * width - 1)))
    rows, cols = [i // width for i in sorted(flat)], [i % width for i in sorted(flat)]
    return SparsePattern(rows, cols, shape=(height * block, width * block), block_size=block)


def same(found, wanted, inputs, oracles, dtype) -> None:
    """Compare values and gradients."""
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
    assert found.dtype == dtype
    assert found.shape == wanted.shape
    scale = 1 + wanted.abs().max().item() if wanted.numel() else 1
    torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance * scale)
    up = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    got = torch.autograd.grad(found, inputs, up.to(dtype), allow_unused=True)
    right = torch.autograd.grad(wanted, oracles, up.to(dtype).double(), allow_unused=True)
    for one, other in zip(got, right, strict=True):
        other = torch.zeros_like(one, dtype=torch.float64) if other is None else other
        scale = 1 + other.abs().max().item() if other.numel() else 1
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance * scale)
