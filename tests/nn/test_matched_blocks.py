"""`matched` patterns: the features that a layer writes are those that the next one reads."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dynsparse as ds
from dynsparse.nn import SparseMultiheadAttention, SparseTransformerLayer
from dynsparse.nn.attention import PROJECTIONS
from dynsparse.nn.init import align_columns, align_rows, even_pattern


def groups(blocks, count):
    return torch.bincount(blocks.long(), minlength=count)


@given(
    st.integers(1, 9), st.integers(1, 9), st.sampled_from([1, 2, 4]),
    st.floats(0.01, 1), st.integers(0, 5),
)  # fmt: skip
def test_even_pattern_is_balanced(height, width, b, density, seed):
    shape = (height * b, width * b)
    draw = torch.Generator().manual_seed(seed)
    pattern = even_pattern(shape, density, b, draw)
    assert pattern.nnz == max(1, round(density * height * width))
    assert (pattern.shape, pattern.block_size) == (shape, b)
    for own, count in ((pattern.rows, height), (pattern.cols, width)):
        numbers = groups(own, count)
        assert numbers.max() - numbers.min() <= 1


def test_align_rows_and_columns_by_hand():
    writer = ds.SparsePattern([3, 3, 0], [0, 1, 0], shape=(8, 4), block_size=2)
    reader = ds.SparsePattern([0, 1, 1], [1, 1, 2], shape=(4, 8), block_size=2)
    read = align_columns(reader, writer)  # the fullest column, 1, becomes 3; column 2 becomes 0
    assert read.rows.tolist() == [0, 1, 1]
    assert read.cols.tolist() == [3, 0, 3]
    other = ds.SparsePattern([1, 2, 2], [0, 0, 1], shape=(8, 4), block_size=2)
    assert align_rows(other, writer).rows.tolist() == [0, 3, 3]


@pytest.mark.parametrize("interleaved", [False, True])
def test_reader_matches_writer(interleaved):
    layer = SparseTransformerLayer(
        32, 2, 128, density=0.1, block_size=8, matched=True, interleaved=interleaved
    )
    attention = layer.attention
    for writer, reader in ((attention.v_proj, attention.out_proj), (layer.linear1, layer.linear2)):
        written, read = {*writer.pattern.rows.tolist()}, {*reader.pattern.cols.tolist()}
        assert written <= read or read <= written
        assert reader.density == pytest.approx(writer.density)
    of_queries, of_keys, of_values = (
        {*attention.get_submodule(name).pattern.rows.tolist()} for name in PROJECTIONS[:3]
    )
    assert of_queries == of_keys
    assert interleaved or of_values == of_queries


def test_generator_determines_matched_patterns():
    def made(matched):
        draw = torch.Generator().manual_seed(1)
        options = {"density": 0.5, "block_size": 4, "generator": draw, "bias": False}
        return SparseMultiheadAttention(8, 2, kdim=4, vdim=12, matched=matched, **options)

    one, other, plain = made(True), made(True), made(False)
    for name, layer in one.named_children():
        assert layer.pattern == other.get_submodule(name).pattern
        assert torch.equal(layer.values, other.get_submodule(name).values)
        assert layer.values.shape == plain.get_submodule(name).values.shape
        assert layer.bias is None
    q, k, v = torch.randn(3, 2, 8), torch.randn(5, 2, 4), torch.randn(5, 2, 12)
    assert one(q, k, v)[0].shape == (3, 2, 8)


def test_bad_input():
    with pytest.raises(ValueError, match="block"):
        SparseTransformerLayer(10, 2, 16, block_size=4, matched=True)
    with pytest.raises(TypeError, match="matched"):
        SparseMultiheadAttention(8, 2, matched="all")
