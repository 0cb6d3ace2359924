"""Storage formats: exact round trips, equality with SciPy, bad input."""

import numpy as np
import pytest
import scipy.sparse
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dynsparse.pattern import SparsePattern
from popsparse.formats import (
    COOMatrix,
    CSCMatrix,
    CSRMatrix,
    SparseMatrix,
)

KINDS = [COOMatrix, CSRMatrix, CSCMatrix]


@st.composite
def patterns(draw):
    block = draw(st.sampled_from([1, 2, 4]))
    height, width = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    nnz = draw(st.integers(0, height * width))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    shape = (height * block, width * block)
    pattern = SparsePattern.random(shape, nnz=nnz, block_size=block, generator=generator)
    return pattern, torch.randn(pattern.values_shape, generator=generator)


@settings(deadline=None, max_examples=60)
@given(patterns(), st.sampled_from(KINDS), st.sampled_from(KINDS))
def test_round_trip_through_any_two_formats(case, first, second):
    pattern, values = case
    matrix = first.from_pattern(pattern, values)
    dense = pattern.to_dense(values).numpy()
    assert np.array_equal(matrix.to_dense(), dense)
    other = getattr(matrix, f"to_{second.__name__[:3].lower()}")()
    assert type(other) is second
    found, found_values = other.to_pattern()
    assert found == pattern
    assert torch.equal(found_values, values)
    assert np.array_equal(other.transposed().to_dense(), dense.T)
    assert other.transposed().transposed() == other.canonical() == other


@settings(deadline=None, max_examples=30)
@given(patterns())
def test_equals_scipy(case):
    pattern, values = case
    elements = CSRMatrix.from_pattern(pattern, values).with_blocks((1, 1))
    expected = scipy.sparse.csr_array(pattern.to_mask().numpy().astype(np.float32))
    assert elements.column_indices.tolist() == expected.indices.tolist()
    assert elements.row_indices.tolist() == expected.indptr.tolist()


def test_unsorted_coo_is_sorted():
    matrix = COOMatrix([1.0, 2.0, 3.0], [2, 0, 1], [1, 1, 0], (2, 3))
    assert matrix.to_csr() == CSRMatrix([3.0, 2.0, 1.0], [1, 0, 2], [0, 1, 3], (2, 3))
    assert matrix.canonical().nz_values.tolist() == [3, 2, 1]
    assert matrix != matrix.canonical()


def test_values_keep_their_type():
    pattern = SparsePattern([0], [1], shape=(2, 2))
    for dtype in (torch.float16, torch.float32, torch.float64, torch.int32):
        values = torch.ones(1, dtype=dtype)
        assert CSCMatrix.from_pattern(pattern, values).to_pattern()[1].dtype == dtype


def test_non_square_blocks_have_no_pattern():
    matrix = COOMatrix(np.ones(8), [0], [0], (4, 4), (4, 2))
    with pytest.raises(ValueError, match=r"a pattern has square blocks.*with_blocks\(\(2, 2\)\)"):
        matrix.to_pattern()
    assert matrix.with_blocks((2, 2)).to_pattern()[0].nnz == 2


def test_bad_input():
    pattern = SparsePattern([0], [1], shape=(2, 2))
    with pytest.raises(ValueError, match=r"values must have the shape \[1\], got \[2\]"):
        COOMatrix.from_pattern(pattern, torch.ones(2))
    with pytest.raises(TypeError, match="got bfloat16: convert it"):
        COOMatrix.from_pattern(pattern, torch.ones(1, dtype=torch.bfloat16))
    with pytest.raises(TypeError, match="values must be real numbers"):
        COOMatrix.from_pattern(pattern, ["a"])
    with pytest.raises(TypeError, match="column_indices must be integers, got float64"):
        COOMatrix([1.0], [0.5], [0], (2, 2))
    with pytest.raises(ValueError, match="row_indices must be one-dimensional"):
        COOMatrix([1.0], [0], [[0]], (2, 2))
    with pytest.raises(ValueError, match="shape of rows must be an integer of at least 1, got 0"):
        COOMatrix([], [], [], (0, 2))
    with pytest.raises(ValueError, match="row_indices must begin with 0 and not decrease"):
        CSRMatrix([1.0], [0], [0, 2, 1], (2, 2))
    with pytest.raises(TypeError, match="abstract class"):
        SparseMatrix([], [], [], (2, 2))
    with pytest.raises(ValueError, match="duplicate"):
        COOMatrix([1.0, 1.0], [0, 0], [0, 0], (2, 2)).to_pattern()
