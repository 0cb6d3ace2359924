"""The compiled scan for growth candidates against a plain selection."""

from __future__ import annotations

import ctypes

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dynsparse.ops import native
from dynsparse.pattern import SparsePattern

ISAS = [isa for isa in native.supported_isas() if isa in native.describe()["available"]]
pytestmark = pytest.mark.skipif(not ISAS, reason="the compiled kernels are not built")


def scan(
    library: ctypes.CDLL,
    chunk: Tensor,
    first_row: int,
    pattern: SparsePattern,
    threshold: float,
    capacity: int,
) -> tuple[int, Tensor, Tensor]:
    scores = torch.full((capacity,), torch.nan)
    positions = torch.full((capacity,), -1)
    count = library.dynsparse_grow_scan(
        chunk.data_ptr(),
        *chunk.shape,
        first_row,
        pattern.index.row_ptr.data_ptr(),
        pattern.index.cols.data_ptr(),
        threshold,
        scores.data_ptr(),
        positions.data_ptr(),
        capacity,
    )
    return count, scores[: max(count, 0)], positions[: max(count, 0)]


@given(
    isa=st.sampled_from(ISAS or ["none"]),
    rows=st.integers(1, 20),
    columns=st.integers(1, 100),
    density=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    threshold=st.sampled_from([0.0, 0.5, 1.5, 10.0]),
    seed=st.integers(0, 2**31),
    data=st.data(),
)
@settings(deadline=None, max_examples=100)
def test_scan_finds_what_lies_above_the_threshold(
    isa: str,
    rows: int,
    columns: int,
    density: float,
    threshold: float,
    seed: int,
    data: st.DataObject,
) -> None:
    library = native.load_isa(isa)
    generator = torch.Generator().manual_seed(seed)
    pattern = SparsePattern.random((rows, columns), density, generator=generator)
    first = data.draw(st.integers(0, rows - 1))
    last = data.draw(st.integers(first + 1, rows))
    gradient = torch.randn(rows, columns, generator=generator)
    outside = (gradient.abs() > threshold) & ~pattern.to_mask()
    outside[:first], outside[last:] = False, False
    expected = outside.flatten().nonzero().flatten()
    chunk = gradient[first:last].contiguous()

    count, scores, positions = scan(library, chunk, first, pattern, threshold, len(expected))
    assert count == len(expected)
    assert torch.equal(positions, expected)
    assert torch.equal(scores, gradient.abs().flatten()[expected])
    if len(expected):
        assert scan(library, chunk, first, pattern, threshold, len(expected) - 1)[0] == -1


@pytest.mark.parametrize("isa", ISAS)
def test_nan_is_never_a_candidate(isa: str) -> None:
    pattern = SparsePattern([0], [0], shape=(1, 70))
    chunk = torch.full((1, 70), torch.nan)
    chunk[0, 40] = -torch.inf
    count, scores, positions = scan(native.load_isa(isa), chunk, 0, pattern, 1.0, 70)
    assert count == 1
    assert positions.tolist() == [40]
    assert scores.tolist() == [torch.inf]
