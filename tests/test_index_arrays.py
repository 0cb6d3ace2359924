"""The compiled index arrays against plain torch and SciPy: the same to the last entry."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernels_of import ISAS, with_library

from dynsparse.pattern import Rewiring, SparsePattern
from dynsparse.pattern.index_arrays import by_columns, merge, move_entries, move_entries_

pytestmark = pytest.mark.skipif(not ISAS, reason="no compiled kernels")


def assert_same(function):
    plain = with_library(None, function)
    for isa in ISAS:
        for threads in (1, 2):
            found = with_library(isa, function, threads)
            assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True)), (isa, threads)


def draw_update(pattern, dropped, grown, generator):
    """`dropped` slots and `grown` positions that are free once these have left, both in order."""
    drop = torch.randperm(pattern.nnz, generator=generator)[:dropped].sort().values
    stays = torch.ones(pattern.nnz, dtype=torch.bool)
    stays[drop] = False
    free = torch.ones(pattern.total, dtype=torch.bool)
    free[pattern.flat[stays]] = False
    free = free.nonzero().flatten()
    return drop, free[torch.randperm(len(free), generator=generator)[:grown]].sort().values


@given(st.integers(1, 40), st.integers(1, 40), st.data())
def test_merge_of_small_patterns(height, width, data):
    total = height * width
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    pattern = SparsePattern.random(
        (height, width), nnz=data.draw(st.integers(0, total)), generator=g
    )
    dropped = data.draw(st.integers(0, pattern.nnz))
    grown = data.draw(st.integers(0, total - pattern.nnz + dropped))
    drop, grow = draw_update(pattern, dropped, grown, g)
    assert_same(lambda: merge(pattern.row_ptr, pattern.cols, width, drop, grow))
    assert_same(lambda: by_columns(pattern.row_ptr, pattern.cols, width))


@pytest.mark.parametrize("shape", [(400, 500), (3, 90_000), (90_000, 3)])
def test_merge_on_several_threads(shape, generator):
    pattern = SparsePattern.random(shape, 0.4, generator=generator)
    drop, grow = draw_update(pattern, pattern.nnz // 3, pattern.nnz // 3, generator)
    assert_same(lambda: merge(pattern.row_ptr, pattern.cols, shape[1], drop, grow))
    assert_same(lambda: by_columns(pattern.row_ptr, pattern.cols, shape[1]))
    taken = pattern.flat[pattern.nnz // 2 : pattern.nnz // 2 + 1]

    def refuse():
        with pytest.raises(ValueError, match="already in the pattern"):
            merge(pattern.row_ptr, pattern.cols, shape[1], drop[:0], taken)
        return ()

    assert_same(refuse)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("tail", [(), (3, 3)])
@pytest.mark.parametrize("where", ["anywhere", "left", "right", "far"])
def test_tensors_follow_in_place(dtype, tail, where, generator):
    pattern = SparsePattern.random((400, 250), 0.4, generator=generator)
    drop, grow = draw_update(pattern, 9000, 9000, generator)
    if where == "left":  # every survivor moves to the left, or every one to the right
        drop, grow = draw_update(pattern, 0, 9000, generator)
        grow = grow[grow > pattern.flat[9000]]
        drop = torch.arange(len(grow))
    elif where == "right":
        drop, grow = draw_update(pattern, 0, 9000, generator)
        grow = grow[grow < pattern.flat[-9000]]
        drop = torch.arange(pattern.nnz - len(grow), pattern.nnz)
    elif where == "far":  # farther than the compiled kernels keep values for
        _, grow = draw_update(pattern, 0, 30_000, generator)
        grow, drop = grow[:18_000], torch.arange(pattern.nnz - 18_000, pattern.nnz)
    rewiring = Rewiring.make(pattern, drop, grow, row_major=True)
    tensors = [torch.randint(-9, 9, (pattern.nnz, *tail), generator=generator).to(dtype)] * 3
    expected = [rewiring.apply(tensor) for tensor in tensors]

    def follow():
        following = [tensor.clone() for tensor in tensors]
        move_entries_(following, rewiring.source)
        return following

    assert_same(follow)
    assert_same(lambda: [move_entries(tensor, rewiring.source) for tensor in tensors])
    assert all(torch.equal(a, b) for a, b in zip(follow(), expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("reach", [2, 12, 5000])
def test_tensors_follow_in_any_order(dtype, reach, generator):
    """Sources near to ascending, and far from it."""
    count = 5000
    near = torch.arange(count) + torch.randint(-reach, reach + 1, (count,), generator=generator)
    source = near.clamp_(0, count - 1).int()
    source[torch.rand(count, generator=generator) < 0.2] = -1
    tensor = torch.randint(1, 99, (count,), generator=generator).to(dtype)
    expected = tensor[source.clamp(min=0)].masked_fill(source < 0, 0)
    assert_same(lambda: [move_entries(tensor, source)])
    assert torch.equal(move_entries(tensor, source), expected)


@given(st.integers(0, 60), st.data())
def test_small_tensors_follow_in_place(nnz, data):
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    pattern = SparsePattern.random((8, 12), nnz=nnz, generator=g)
    count = data.draw(st.integers(0, min(nnz, 96 - nnz)))
    keeps = data.draw(st.booleans())
    rewiring = Rewiring.make(pattern, *draw_update(pattern, count, count, g), row_major=not keeps)
    tensor = torch.randn(nnz, generator=g)
    fill = torch.randn(count, generator=g)
    for value in (0.0, 2.5, fill):
        moved = tensor.clone()
        rewiring.apply_(moved, fill=value)
        assert torch.equal(moved, rewiring.apply(tensor, value))
    wide = torch.randn(nnz, 2, generator=g)
    strided = wide[:, 1]  # not contiguous
    expected = rewiring.apply(strided)
    rewiring.apply_(strided)
    assert torch.equal(wide[:, 1], expected)


def test_autograd_notices_that_a_tensor_has_followed():
    pattern = SparsePattern([0, 0], [0, 1], shape=(1, 3))
    rewiring = Rewiring.make(pattern, torch.tensor([0]), torch.tensor([2]))
    weight = torch.ones(2, requires_grad=True)
    loss = (weight * weight).sum()
    with torch.no_grad():
        rewiring.apply_(weight)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_in_place_needs_as_many_blocks_as_before():
    pattern = SparsePattern([0, 0], [0, 1], shape=(1, 4))
    more = Rewiring.make(pattern, torch.tensor([], dtype=torch.int64), torch.tensor([3]))
    with pytest.raises(ValueError, match="2 blocks become 3"):
        more.apply_(torch.ones(2))
    with pytest.raises(ValueError, match="expected a tensor with 2 leading entries"):
        Rewiring.make(pattern, torch.tensor([0]), torch.tensor([3])).apply_(torch.ones(3))
