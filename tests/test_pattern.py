import copy
import pickle
from collections import Counter

import numpy as np
import pytest
import scipy.sparse
import torch
from hypothesis import given
from hypothesis import strategies as st

from dynsparse.pattern import Rewiring, SparsePattern, sample_without_replacement


@st.composite
def patterns(draw):
    b = draw(st.sampled_from([1, 2, 3, 4, 8, 64]))
    most = 12 if b < 64 else 3
    grid = draw(st.tuples(st.integers(1, most), st.integers(1, most)))
    nnz = draw(st.integers(0, grid[0] * grid[1]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    return SparsePattern.random(
        (grid[0] * b, grid[1] * b), nnz=nnz, block_size=b, generator=generator
    )


@st.composite
def patterns_in_any_slots(draw):
    pattern = draw(patterns())
    order = torch.randperm(pattern.nnz, generator=torch.Generator().manual_seed(0))
    return SparsePattern._from_slots(pattern.flat[order], pattern)


def values_for(pattern, dtype=torch.float64):
    # No zeros among the values, so that a dense round trip can tell a present zero from a hole.
    return torch.arange(1, 1 + np.prod(pattern.values_shape, dtype=int), dtype=dtype).view(
        pattern.values_shape
    )


def test_rows_and_cols_come_out_row_major_as_int32():
    pattern = SparsePattern([2, 0, 1, 0], [1, 3, 0, 1], shape=(3, 4))
    assert pattern.rows.tolist() == [0, 0, 1, 2]
    assert pattern.cols.tolist() == [1, 3, 0, 1]
    assert pattern.rows.dtype == pattern.cols.dtype == torch.int32
    assert (pattern.shape, pattern.block_size, pattern.nnz) == ((3, 4), 1, 4)
    assert pattern.density == 4 / 12
    assert pattern.flat.tolist() == [1, 3, 4, 9]


def test_coordinates_are_block_coordinates():
    pattern = SparsePattern([0, 1], [1, 0], shape=(4, 6), block_size=2)
    expected = torch.zeros(4, 6, dtype=torch.bool)
    expected[0:2, 2:4] = True
    expected[2:4, 0:2] = True
    assert torch.equal(pattern.to_mask(), expected)
    assert pattern.values_shape == (2, 2, 2)


def test_index_by_hand():
    # x . x
    # . . .
    # x x .
    index = SparsePattern([0, 0, 2, 2], [0, 2, 0, 1], shape=(3, 3)).index
    assert index.row_ptr.tolist() == [0, 2, 2, 4]
    assert index.cols.tolist() == [0, 2, 0, 1]
    assert index.col_ptr.tolist() == [0, 2, 3, 4]
    assert index.csc_rows.tolist() == [0, 2, 2, 0]
    assert index.csc_perm.tolist() == [0, 2, 3, 1]
    assert all(tensor.dtype == torch.int32 for tensor in index)


@given(patterns())
def test_index_agrees_with_scipy(pattern):
    slots = torch.arange(pattern.nnz, dtype=torch.float64) + 1
    grid = scipy.sparse.csr_array(
        (slots.numpy(), (pattern.rows.numpy(), pattern.cols.numpy())), shape=pattern.grid
    )
    csc = grid.tocsc()
    assert pattern.index.row_ptr.tolist() == grid.indptr.tolist()
    assert pattern.index.col_ptr.tolist() == csc.indptr.tolist()
    assert pattern.index.csc_rows.tolist() == csc.indices.tolist()
    assert (pattern.index.csc_perm + 1).tolist() == csc.data.tolist()


@given(patterns())
def test_mask_round_trip(pattern):
    mask = pattern.to_mask()
    assert mask.sum() == pattern.nnz * pattern.block_size**2
    assert SparsePattern.from_mask(mask, pattern.block_size) == pattern


@given(
    st.one_of(patterns(), patterns_in_any_slots()),
    st.sampled_from([None, "csr", "csc", "bsr", "coo"]),
)
def test_scipy_round_trip(pattern, form):
    values = values_for(pattern)
    matrix = pattern.to_scipy(values, form)
    assert form is None or matrix.format == form
    np.testing.assert_array_equal(matrix.toarray(), pattern.to_dense(values).numpy())
    again = SparsePattern.from_scipy(matrix, pattern.block_size)
    assert again == pattern
    assert torch.equal(pattern.values_of(matrix), values)


@given(st.one_of(patterns(), patterns_in_any_slots()))
def test_dense_round_trip(pattern):
    values = values_for(pattern)
    dense = pattern.to_dense(values)
    assert torch.equal(pattern.values_of(dense), values)
    assert torch.equal(dense != 0, pattern.to_mask())


def test_scipy_coordinates_out_of_range_raise():
    matrix = scipy.sparse.coo_array(([1.0], ([1], [2])), shape=(2, 3))
    for wrong in (-1, 4):
        matrix.col[0] = wrong
        with pytest.raises(ValueError, match=rf"cols must lie in \[0, 3\), got {wrong}"):
            SparsePattern.from_scipy(matrix)


def test_masks_of_any_strides_and_byte_order():
    mask = np.eye(4)
    expected = SparsePattern.from_mask(torch.from_numpy(mask).flip(0))
    assert SparsePattern.from_mask(mask[::-1]) == expected
    assert SparsePattern.from_mask(mask[::-1].astype(">f4")) == expected


def test_explicit_zeros_of_a_scipy_matrix_are_present():
    matrix = scipy.sparse.csr_array((np.array([0.0, 2.0]), ([0, 1], [1, 0])), shape=(2, 2))
    assert SparsePattern.from_scipy(matrix).nnz == 2


def test_dense_layout_is_differentiable():
    pattern = SparsePattern.random((6, 4), 0.5, block_size=2)
    values = torch.randn(pattern.values_shape, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(pattern.to_dense, values)


@given(st.integers(1, 40), st.integers(1, 40), st.floats(0, 1))
def test_random_has_an_exact_count_without_duplicates(height, width, density):
    pattern = SparsePattern.random((height, width), density)
    assert pattern.nnz == round(density * height * width)
    assert len(set(zip(pattern.rows.tolist(), pattern.cols.tolist(), strict=True))) == pattern.nnz


def test_random_is_reproducible_and_uniform():
    def draw(seed):
        return SparsePattern.random((8, 8), 0.25, generator=torch.Generator().manual_seed(seed))

    assert draw(3) == draw(3)
    assert draw(3) != draw(4)
    counts = sum(draw(seed).to_mask().long() for seed in range(2000))
    # Each position is present 500 times in the mean, with a standard deviation of 19.4.
    assert int(counts.min()) > 400
    assert int(counts.max()) < 600


def test_random_does_not_allocate_the_possible_positions():
    # 10^12 positions: a list of them, or one bit for each, would not fit.
    pattern = SparsePattern.random((10**6, 10**6), nnz=1000)
    assert pattern.nnz == 1000


@given(st.integers(0, 300), st.data())
def test_sampling_without_replacement(population, data):
    count = data.draw(st.integers(0, population))
    drawn = sample_without_replacement(population, count).tolist()
    assert drawn == sorted(set(drawn))
    assert len(drawn) == count
    assert all(0 <= value < population for value in drawn)


@given(st.integers(1, 12), st.integers(1, 12), st.data())
def test_balanced_rows(height, width, data):
    nnz = data.draw(st.integers(0, height * width))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 9)))
    pattern = SparsePattern.random((height, width), nnz=nnz, per_row=True, generator=generator)
    each = torch.bincount(pattern.rows.long(), minlength=height)
    assert pattern.nnz == len(pattern.flat.unique()) == nnz
    assert set(each.tolist()) <= {nnz // height, -(-nnz // height)}


def test_balanced_rows_are_uniform():
    """Each pair of four columns is equally likely, and so is each row with one block more."""
    generator = torch.Generator().manual_seed(0)
    pairs, longer = Counter(), Counter()
    for _ in range(3000):
        pattern = SparsePattern.random((2, 4), nnz=5, per_row=True, generator=generator)
        for row in pattern.to_mask():
            columns = tuple(row.nonzero().flatten().tolist())
            pairs[columns] += len(columns) == 2
        longer[int(pattern.rows.long().bincount().argmax())] += 1
    assert len(pairs - Counter()) == 6
    assert all(abs(count - 500) < 100 for count in (pairs - Counter()).values())
    assert abs(longer[0] - 1500) < 150


def test_equality_copies_and_pickles():
    pattern = SparsePattern.random((8, 8), 0.5, block_size=2)
    assert pattern == pickle.loads(pickle.dumps(pattern)) == copy.deepcopy(pattern)
    assert pattern != SparsePattern.full((8, 8), block_size=2)
    assert pattern != "pattern"
    assert "block_size=2" in repr(pattern)


def test_empty_and_full():
    empty = SparsePattern([], [], shape=(4, 4))
    assert (empty.nnz, empty.density) == (0, 0)
    assert empty.contains(torch.tensor([0, 5])).tolist() == [False, False]
    assert empty.index.row_ptr.tolist() == [0] * 5
    assert SparsePattern.full((4, 4)).density == 1


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: SparsePattern([0], [0, 1], shape=(2, 2)), ValueError, "differ in length: 1 and 2"),
        (lambda: SparsePattern([2], [0], shape=(2, 2)), ValueError, r"rows must lie in \[0, 2\)"),
        (lambda: SparsePattern([0], [-1], shape=(2, 2)), ValueError, "cols must lie.* got -1"),
        (lambda: SparsePattern([0, 0], [1, 1], shape=(2, 2)), ValueError, r"\(row 0, col 1\)"),
        (lambda: SparsePattern([0.5], [0], shape=(2, 2)), TypeError, "rows must be integers"),
        (lambda: SparsePattern([[0]], [0], shape=(2, 2)), ValueError, "one-dimensional"),
        (lambda: SparsePattern([0], [0], shape=(2,)), ValueError, "shape must be"),
        (lambda: SparsePattern([0], [0], shape=(0, 2)), ValueError, "out_features must be"),
        (lambda: SparsePattern([0], [0], shape=(2.0, 2)), TypeError, "out_features must be an int"),
        (lambda: SparsePattern([0], [0], shape=(6, 4), block_size=4), ValueError, "does not div"),
        (lambda: SparsePattern([0], [0], shape=(4, 4), block_size=0), ValueError, "at least 1"),
        (lambda: SparsePattern.random((4, 4), 1.5), ValueError, r"density must be .* got 1.5"),
        (lambda: SparsePattern.random((4, 4), float("nan")), ValueError, "density must be"),
        (lambda: SparsePattern.random((4, 4), nnz=17), ValueError, "more than the 16 blocks"),
        (lambda: SparsePattern.random((4, 4)), ValueError, "either density or nnz"),
        (lambda: SparsePattern.random((4, 4), 0.5, nnz=3), ValueError, "either density or nnz"),
        (lambda: SparsePattern.from_mask(torch.ones(3)), ValueError, r"mask must be \[out, in\]"),
        (lambda: SparsePattern.from_scipy(np.eye(2)), TypeError, "SciPy sparse matrix"),
        (
            lambda: SparsePattern.from_scipy(
                scipy.sparse.bsr_array(np.ones((4, 4)), blocksize=(2, 4))
            ),
            ValueError,
            "only square blocks",
        ),
        (
            lambda: SparsePattern.from_flat(torch.tensor([1, 0]), shape=(2, 2)),
            ValueError,
            "sorted and distinct",
        ),
        (lambda: SparsePattern.from_flat(torch.tensor([4]), shape=(2, 2)), ValueError, "must lie"),
        (lambda: SparsePattern.from_flat(torch.tensor([0.0]), shape=(2, 2)), TypeError, "int64"),
        (lambda: SparsePattern.full((2, 2)).to_dense(torch.ones(3)), ValueError, "values must"),
        (lambda: SparsePattern.full((2, 2)).to_scipy(torch.ones(2, 2)), ValueError, "values must"),
        (lambda: SparsePattern.full((2, 2)).values_of(torch.ones(2, 3)), ValueError, "matrix must"),
        (lambda: sample_without_replacement(3, 4), ValueError, "cannot draw 4"),
    ],
)
def test_wrong_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()


# Rewiring ---------------------------------------------------------------------------------------


def test_rewiring_by_hand():
    # slots 0..3 at flat positions 1, 3, 4, 9 of a 3 x 4 matrix; drop slots 1 and 3, grow 0 and 8
    before = SparsePattern([0, 0, 1, 2], [1, 3, 0, 1], shape=(3, 4))
    rewiring = Rewiring.make(before, drop=torch.tensor([3, 1]), grow=torch.tensor([8, 0]))
    # 1 and 4 keep slots 0 and 2; 0 and 8 take the others, in order.
    assert rewiring.keeps_slots
    assert rewiring.after.flat.tolist() == [1, 0, 4, 8]
    assert rewiring.after.rows.tolist() == [0, 0, 1, 2]
    assert rewiring.after.cols.tolist() == [1, 0, 0, 0]
    assert rewiring.after.sorted_flat.tolist() == [0, 1, 4, 8]
    assert rewiring.after.slots.tolist() == [1, 0, 2, 3]
    assert rewiring.source.tolist() == [0, -1, 2, -1]
    assert rewiring.grown.tolist() == rewiring.dropped.tolist() == [1, 3]
    assert rewiring.apply(torch.tensor([10.0, 11, 12, 13])).tolist() == [10, 0, 12, 0]
    assert rewiring.apply(torch.tensor([1, 2, 3, 4]), fill=7).tolist() == [1, 7, 3, 7]
    filled = rewiring.apply(torch.tensor([10.0, 11, 12, 13]), torch.tensor([5.0, 6.0]))
    assert filled.tolist() == [10, 5, 12, 6]
    # The next one: slot 2 leaves, 9 joins; and one that leaves fewer blocks, in row-major order.
    again = Rewiring.make(rewiring.after, torch.tensor([2]), torch.tensor([9]))
    assert again.after.flat.tolist() == [1, 0, 9, 8]
    assert again.source.tolist() == [0, 1, -1, 3]
    fewer = Rewiring.make(again.after, torch.tensor([1]), torch.tensor([], dtype=torch.int64))
    assert not fewer.keeps_slots
    assert fewer.after.flat.tolist() == [1, 8, 9]
    assert fewer.source.tolist() == [0, 3, 2]


def test_rewiring_in_row_major_order_by_hand():
    before = SparsePattern([0, 0, 1, 2], [1, 3, 0, 1], shape=(3, 4))
    drop, grow = torch.tensor([3, 1]), torch.tensor([8, 0])
    rewiring = Rewiring.make(before, drop, grow, row_major=True)
    assert not rewiring.keeps_slots
    assert rewiring.after.flat.tolist() == [0, 1, 4, 8]
    assert rewiring.source.tolist() == [-1, 0, 2, -1]
    assert rewiring.grown.tolist() == [0, 3]
    assert rewiring.dropped.tolist() == [1, 3]
    assert rewiring.apply(torch.tensor([10.0, 11, 12, 13])).tolist() == [0, 10, 12, 0]
    # From other slots: where they come from is found.
    stays = Rewiring.make(before, drop, grow)
    back = Rewiring.make(stays.after, torch.tensor([0]), torch.tensor([3]), row_major=True)
    assert back.after.flat.tolist() == [0, 3, 4, 8]
    assert back.source.tolist() == [1, -1, 2, 3]


@given(patterns(), st.data())
def test_rewiring_equals_a_dense_update(pattern, data):
    free = (~pattern.contains(torch.arange(pattern.total))).nonzero().flatten()
    count = data.draw(st.integers(0, min(len(free), pattern.nnz)))
    drop = torch.randperm(pattern.nnz)[:count]
    grow = free[torch.randperm(len(free))[:count]]
    rewiring = Rewiring.make(pattern, drop, grow)
    values = values_for(pattern)
    expected = pattern.to_dense(values)
    gone = SparsePattern.from_flat(
        pattern.flat[drop].sort().values, shape=pattern.shape, block_size=pattern.block_size
    )
    expected[gone.to_mask()] = 0
    assert torch.equal(rewiring.after.to_dense(rewiring.apply(values)), expected)
    assert rewiring.after.contains(grow).all()
    assert rewiring.after.nnz == pattern.nnz
    again = Rewiring.between(pattern, rewiring.after)
    assert torch.equal(again.source, rewiring.source)
    assert torch.equal(rewiring.dropped, drop.sort().values)


def test_dropped_position_may_grow_again():
    before = SparsePattern([0, 0], [0, 1], shape=(1, 3))
    rewiring = Rewiring.make(before, drop=torch.tensor([0]), grow=torch.tensor([0]))
    assert rewiring.after == before
    assert rewiring.apply(torch.tensor([5.0, 6.0])).tolist() == [0, 6]


@pytest.mark.parametrize(
    ("drop", "grow", "message"),
    [
        ([2], [2], "slots to drop must lie"),
        ([-1], [2], "slots to drop must lie"),
        ([0, 0], [2, 3], "named twice"),
        ([0], [1], "already in the pattern"),
        ([0, 1], [2, 2], "named twice"),
        ([0], [9], "positions to grow must lie"),
    ],
)
def test_wrong_rewirings(drop, grow, message):
    before = SparsePattern([0, 0], [0, 1], shape=(1, 4))
    for pattern in (before, before._to_explicit_slots()):
        with pytest.raises(ValueError, match=message):
            Rewiring.make(pattern, torch.tensor(drop), torch.tensor(grow))


def test_rewiring_rejects_other_tensors_and_patterns():
    before = SparsePattern([0, 0], [0, 1], shape=(1, 4))
    rewiring = Rewiring.make(before, torch.tensor([0]), torch.tensor([3]))
    with pytest.raises(ValueError, match="2 leading entries"):
        rewiring.apply(torch.ones(3))
    with pytest.raises(ValueError, match="differ in shape"):
        Rewiring.between(before, SparsePattern.full((2, 2)))
