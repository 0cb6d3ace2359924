"""Accumulation in cells: where many samples and dense patterns make forward regroup its entries.

The kernel chooses for itself; the sizes here are those for which it does (csrc/element_cells.cpp).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dynsparse.ops import native
from dynsparse.ops.linear import cpu
from dynsparse.pattern import PatternIndex, SparsePattern

pytestmark = pytest.mark.skipif(native.load() is None, reason="the compiled kernels are not built")


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Fresh tensors are full of NaN: an output element that is not written shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def check(pattern: SparsePattern, x: Tensor, dy: Tensor, generator: torch.Generator) -> Tensor:
    values = torch.randn(pattern.nnz, generator=generator)
    bias = torch.randn(pattern.shape[0], generator=generator)
    weight = torch.zeros(pattern.shape, dtype=torch.float64)
    weight[pattern.rows.long(), pattern.cols.long()] = values.double()

    def close(got: Tensor | None, expected: Tensor, terms: int) -> None:
        assert got is not None
        tolerance = 2e-6 * (terms + 4) ** 0.5
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=tolerance)

    product = x.double() @ weight.t()
    y = cpu.forward(x, values, pattern.index, bias)
    close(y, product + bias, pattern.shape[1])
    close(cpu.forward(x, values, pattern.index, None), product, pattern.shape[1])
    dx, _ = cpu.backward(dy, x, values, pattern.index, True, False)
    close(dx, dy.double() @ weight, pattern.shape[0])
    return y


@given(
    out=st.integers(1, 300),
    features=st.integers(1, 500),
    density=st.sampled_from([0.25, 0.5, 0.9, 1.0]),
    more=st.integers(0, 140),
    transposed=st.booleans(),
    thread_count=st.integers(1, 3),
    seed=st.integers(0, 2**31),
)
@settings(deadline=None, max_examples=40)
def test_any_shape(
    out: int,
    features: int,
    density: float,
    more: int,
    transposed: bool,
    thread_count: int,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    torch.set_num_threads(thread_count)
    pattern = SparsePattern.random((out, features), density, generator=generator)
    batch = 256 + more
    x = torch.randn(batch, features, generator=generator)
    dy = torch.randn(batch, out, generator=generator)
    if transposed:
        x, dy = x.t().contiguous().t(), dy.t().contiguous().t()
    check(pattern, x, dy, generator)


def test_more_rows_than_one_group() -> None:
    generator = torch.Generator().manual_seed(1)
    pattern = SparsePattern.random((4500, 70), 0.3, generator=generator)
    x, dy = torch.randn(300, 70, generator=generator), torch.randn(300, 4500, generator=generator)
    for thread_count in (1, 2):
        torch.set_num_threads(thread_count)
        check(pattern, x, dy, generator)


def test_rows_and_tiles_without_entries() -> None:
    # Full rows beside empty ones, and a stretch of columns that nothing points to.
    generator = torch.Generator().manual_seed(2)
    mask = torch.zeros(40, 400, dtype=torch.bool)
    mask[::3, :150] = True
    mask[1, 290:] = True
    pattern = SparsePattern.from_mask(mask)
    x, dy = torch.randn(700, 400, generator=generator), torch.randn(700, 40, generator=generator)
    y = check(pattern, x, dy, generator)
    assert y[:, 2].unique().numel() == 1  # the bias alone


def test_number_of_threads_does_not_matter() -> None:
    generator = torch.Generator().manual_seed(3)
    pattern = SparsePattern.random((333, 257), 0.4, generator=generator)
    values = torch.randn(pattern.nnz, generator=generator)
    x, dy = torch.randn(400, 257, generator=generator), torch.randn(400, 333, generator=generator)
    results = []
    for thread_count in (1, 2, 5):
        torch.set_num_threads(thread_count)
        y = cpu.forward(x, values, pattern.index, None)
        dx, _ = cpu.backward(dy, x, values, pattern.index, True, False)
        assert dx is not None
        results.append((y, dx))
    for y, dx in results[1:]:
        assert torch.equal(y, results[0][0])
        assert torch.equal(dx, results[0][1])


def test_an_index_in_any_order() -> None:
    generator = torch.Generator().manual_seed(4)
    pattern = SparsePattern.random((60, 300), 0.5, generator=generator)
    values = torch.randn(pattern.nnz, generator=generator)
    x = torch.randn(300, 300, generator=generator)
    index = pattern.index
    shuffled = torch.cat(
        [
            start + torch.randperm(int(end - start), generator=generator)
            for start, end in zip(index.row_ptr[:-1].long(), index.row_ptr[1:].long(), strict=True)
        ]
    )
    other = PatternIndex(
        index.row_ptr, index.cols[shuffled], index.col_ptr, index.csc_rows, index.csc_perm
    )
    y = cpu.forward(x, values[shuffled], other, None)
    torch.testing.assert_close(y, cpu.forward(x, values, index, None), rtol=1e-4, atol=1e-4)
