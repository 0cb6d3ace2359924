"""Work lists of a pattern contain every block once, and their length depends on sizes only."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from dynsparse import SparsePattern
from dynsparse.ops.linear import LayerIndex
from dynsparse.ops.linear.cuda import configurations
from dynsparse.pattern import PatternIndex


def layer_of(pattern):
    return LayerIndex(pattern.index, torch.empty(pattern.values_shape))


def listed(row_ptr, size):
    """List (row, first slot) of every chunk by a loop; an empty row has one chunk."""
    found = []
    for row, (start, end) in enumerate(itertools.pairwise(row_ptr)):
        found += [(row, slot) for slot in range(start, max(end, start + 1), size)]
    return found


@given(
    st.integers(1, 12), st.integers(1, 12), st.floats(0, 1), st.sampled_from([1, 2, 3, 4, 8, 16])
)
def test_chunks_contain_every_block_once(height, width, density, size):
    pattern = SparsePattern.random((height, width), density)
    chunks = configurations.chunks(layer_of(pattern), size)
    assert chunks.dtype == torch.int32
    assert chunks.shape == (2, pattern.nnz // size + height)
    expected = listed(pattern.row_ptr.tolist(), size)
    made = list(zip(*chunks.tolist(), strict=True))
    assert made[: len(expected)] == expected
    assert all(row == -1 for row, _ in made[len(expected) :])


def test_chunks_by_hand():
    # Rows of 3, 0 and 2 blocks: slots 0 to 2, none, and 3 to 4.
    pattern = SparsePattern([0, 0, 0, 2, 2], [0, 1, 3, 0, 2], shape=(3, 4))
    rows, starts = configurations.chunks(layer_of(pattern), 2).tolist()
    assert rows == [0, 0, 1, 2, -1]
    assert starts[:4] == [0, 2, 3, 3]


@given(st.integers(1, 12), st.integers(1, 12), st.floats(0, 1))
def test_rows_are_sorted_by_length(height, width, density):
    pattern = SparsePattern.random((height, width), density)
    p = layer_of(pattern)
    for turn, ptr in (
        (configurations.rows_by_length(p), p.row_ptr),
        (configurations.columns_by_length(p), p.col_ptr),
    ):
        lengths = ptr.diff().tolist()
        assert turn.dtype == torch.int32
        assert turn[:, 0].tolist() == sorted(range(len(lengths)), key=lambda i: -lengths[i])


def test_records_by_hand():
    # Rows of 1, 0 and 3 blocks; columns of 2, 0, 1 and 1.
    p = layer_of(SparsePattern([0, 2, 2, 2], [0, 0, 2, 3], shape=(3, 4)))
    # Row, start, end, block column and slot of the first entry; of one without entries any.
    assert configurations.rows_by_length(p)[:, :5].tolist() == [
        [2, 1, 4, 0, 1],
        [0, 0, 1, 0, 0],
        [1, 1, 1, 0, 1],
    ]
    assert configurations.columns_by_length(p)[[0, 1, 2], :5].tolist() == [
        [0, 0, 2, 0, 0],
        [2, 2, 3, 2, 2],
        [3, 3, 4, 2, 3],
    ]


def test_no_host_waits():
    """Fake tensors raise if a number is read from the device."""
    with FakeTensorMode():
        index = [torch.empty(n, dtype=torch.int32) for n in (7, 18, 11, 18, 18, 0)]
        p = LayerIndex(PatternIndex(*index), torch.empty(18, 16, 16))
        assert configurations.chunks(p, 4).shape == (2, 18 // 4 + 6)
        assert configurations.rows_by_length(p).shape == (6, 8)
        assert configurations.columns_by_length(p).shape == (10, 8)


@pytest.mark.parametrize("size", [1, 4])
def test_lists_are_built_once(size):
    p = layer_of(SparsePattern.random((6, 6), 0.4))
    assert configurations.chunks(p, size) is configurations.chunks(p, size)
    assert configurations.rows_by_length(p) is configurations.rows_by_length(p)
