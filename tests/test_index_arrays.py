"""Compiled index arrays equal those of plain torch and SciPy."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernels_of import ISAS, with_library

from dynsparse.pattern import Rewiring, SparsePattern
from dynsparse.pattern.index_arrays import (
    SortedEntries,
    membership_mask,
    merge,
    move_entries,
    sort_by_columns,
)
from dynsparse.pattern.packed import pack, unpack

pytestmark = pytest.mark.skipif(not ISAS, reason="no compiled kernels")


def assert_same(function):
    plain = with_library(None, function)
    for isa in ISAS:
        for threads in (1, 2):
            found = with_library(isa, function, threads)
            assert all(torch.equal(a, b) for a, b in zip(found, plain, strict=True)), (isa, threads)


def draw_update(pattern, dropped, grown, generator):
    """Draw sorted `dropped` slots and sorted `grown` positions that are free after the drop."""
    drop = torch.randperm(pattern.nnz, generator=generator)[:dropped].sort().values
    stays = torch.ones(pattern.nnz, dtype=torch.bool)
    stays[drop] = False
    free = torch.ones(pattern.total, dtype=torch.bool)
    free[pattern.flat[stays]] = False
    free = free.nonzero().flatten()
    return drop, free[torch.randperm(len(free), generator=generator)[:grown]].sort().values


def check_merge(pattern, drop, grow, generator):
    """Check `merge` with slots in row-major and any other order, with and without new slots."""
    nnz, height = pattern.nnz, pattern.grid[0]
    cols, none = pattern.sorted_cols, torch.zeros(0, dtype=torch.int32)
    stays = ~membership_mask(drop, nnz)
    flat, order = torch.cat([pattern.flat[stays], grow]).sort()
    for slots in (none, torch.randperm(nnz, generator=generator).int()):
        numbers = slots if len(slots) else torch.arange(nnz, dtype=torch.int32)
        leaves = membership_mask(numbers[drop].long(), nnz)
        for new in (None, torch.randperm(nnz + len(grow), generator=generator)[: len(grow)]):
            entries = SortedEntries(pattern.row_ptr, cols, slots)
            expected = torch.full((len(grow),), -1) if new is None else new
            expected = torch.cat([numbers[stays], expected.int()])[order]
            assert_same(lambda e=entries, o=leaves, n=new: merge(e, pattern.grid[1], o, grow, n))
            merged = merge(entries, pattern.grid[1], leaves, grow, new)
            rows = torch.arange(height).repeat_interleave(merged.row_ptr.diff())
            assert torch.equal(rows * pattern.grid[1] + merged.cols, flat)
            assert torch.equal(merged.slots, expected)
            shuffled = grow[torch.randperm(len(grow), generator=generator)]
            again = merge(entries, pattern.grid[1], leaves, shuffled, new)
            assert all(torch.equal(a, b) for a, b in zip(merged, again, strict=True))


def check_by_columns(pattern, generator):
    slots = torch.randperm(pattern.nnz, generator=generator).int()
    entries = SortedEntries(pattern.row_ptr, pattern.sorted_cols, slots)
    assert_same(lambda: sort_by_columns(entries, pattern.grid[1]))
    assert_same(lambda: sort_by_columns(entries._replace(slots=slots[:0]), pattern.grid[1]))
    col_ptr, rows, order = sort_by_columns(entries, pattern.grid[1])
    cols = torch.arange(pattern.grid[1]).repeat_interleave(col_ptr.diff())
    flat = torch.empty(pattern.nnz, dtype=torch.int64)
    flat[slots.long()] = pattern.sorted_flat
    assert torch.equal(flat[order.long()], rows * pattern.grid[1] + cols)


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
    check_merge(pattern, drop, grow, g)
    check_by_columns(pattern, g)


@pytest.mark.parametrize("shape", [(400, 500), (3, 90_000), (90_000, 3)])
def test_merge_on_several_threads(shape, generator):
    pattern = SparsePattern.random(shape, 0.4, generator=generator)
    drop, grow = draw_update(pattern, pattern.nnz // 3, pattern.nnz // 3, generator)
    check_merge(pattern, drop, grow, generator)
    check_by_columns(pattern, generator)
    taken = pattern.flat[pattern.nnz // 2 : pattern.nnz // 2 + 1]

    entries = SortedEntries(pattern.row_ptr, pattern.cols, pattern.slots)

    def refuse():
        with pytest.raises(ValueError, match="already in the pattern"):
            merge(entries, shape[1], membership_mask(drop[:0], pattern.nnz), taken)
        return ()

    assert_same(refuse)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("tail", [(), (3, 3)])
@pytest.mark.parametrize("where", ["anywhere", "left", "right", "far"])
def test_move_tensors(dtype, tail, where, generator):
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
    elif where == "far":
        _, grow = draw_update(pattern, 0, 30_000, generator)
        grow, drop = grow[:18_000], torch.arange(pattern.nnz - 18_000, pattern.nnz)
    rewiring = Rewiring.make(pattern, drop, grow, row_major=True)
    tensors = [torch.randint(-9, 9, (pattern.nnz, *tail), generator=generator).to(dtype)] * 3
    expected = [rewiring.apply(tensor) for tensor in tensors]

    def moved():
        return [move_entries(tensor, rewiring.source) for tensor in tensors]

    assert_same(moved)
    assert all(torch.equal(a, b) for a, b in zip(moved(), expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("reach", [2, 12, 5000])
def test_move_tensors_in_any_order(dtype, reach, generator):
    """Sources nearly in ascending order, and in random order."""
    count = 5000
    near = torch.arange(count) + torch.randint(-reach, reach + 1, (count,), generator=generator)
    source = near.clamp_(0, count - 1).int()
    source[torch.rand(count, generator=generator) < 0.2] = -1
    tensor = torch.randint(1, 99, (count,), generator=generator).to(dtype)
    expected = tensor[source.clamp(min=0)].masked_fill(source < 0, 0)
    assert_same(lambda: [move_entries(tensor, source)])
    assert torch.equal(move_entries(tensor, source), expected)


@given(
    out=st.integers(1, 40),
    features=st.integers(1, 700),
    density=st.sampled_from([0.0, 0.002, 0.1, 0.5, 1.0]),
    seed=st.integers(0, 2**31),
)
def test_unpack(out, features, density, seed):
    generator = torch.Generator().manual_seed(seed)
    pattern = SparsePattern.random((out, features), density, generator=generator)
    form, packed = pack(pattern.sorted_flat, pattern.total)
    values = torch.zeros(pattern.nnz)

    def entries():
        unpacked = unpack({form: packed}, "", pattern.shape, values)
        return unpacked._index_on(torch.device("cpu"))

    assert_same(entries)
    assert unpack({form: packed}, "", pattern.shape, values) == pattern
