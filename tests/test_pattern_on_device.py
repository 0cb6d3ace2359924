"""Patterns on a device equal those on the CPU, without host waits."""

import copy
import pickle

import pytest
import torch
from device_patterns import rewire
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from dynsparse.pattern import Rewiring, SparsePattern, on_device
from dynsparse.pattern.stack import PatternStack

CPU = torch.device("cpu")


def pattern_on_device(pattern):
    """Return the pattern as if an update on a device had created it."""
    return SparsePattern._from_device(pattern.sorted_flat, pattern, pattern.slots)


def update(pattern, dropped, grown, seed=0):
    generator = torch.Generator().manual_seed(seed)
    drop = torch.randperm(pattern.nnz, generator=generator)[:dropped]
    free = torch.ones(pattern.total, dtype=torch.bool)
    free[pattern.flat] = False
    free = free.nonzero().flatten()
    return drop, free[torch.randperm(len(free), generator=generator)[:grown]]


shapes = st.tuples(st.integers(1, 9), st.integers(1, 9))


@given(shapes, st.floats(0, 1), st.sampled_from([1, 2, 16]))
def test_the_index(shape, density, b):
    pattern = SparsePattern.random(tuple(n * b for n in shape), density, block_size=b)
    for there in (pattern_on_device(pattern), pattern):
        index = there._index_on(CPU)
        assert all(tensor.dtype is torch.int32 for tensor in index)
        for own, other in zip(pattern.index[:3], index[:3], strict=True):
            assert torch.equal(own, other)
        order = on_device.sort_by_columns(*index[:2], pattern.grid[1])
        for own, other in zip(pattern.index[3:5], order, strict=True):
            assert torch.equal(own, other)
            assert other.dtype is torch.int32
        assert torch.equal(there._flat_on(CPU), pattern.flat)


# Shape, density, numbers of dropped and of grown blocks.
updates = (shapes, st.floats(0, 1), st.integers(0, 9), st.integers(0, 9))


@given(*updates, st.integers(0, 99), st.booleans())
def test_an_update(shape, density, dropped, grown, seed, row_major):
    pattern = SparsePattern.random(shape, density)
    drop, grow = update(pattern, min(dropped, pattern.nnz), grown, seed)
    check_update(pattern, drop, grow, row_major)


@given(*updates, st.integers(1, 4), st.booleans(), st.booleans(), st.data())
def test_an_update_of_several_layers(
    shape, density, dropped, grown, layers, row_major, explicit, data
):
    patterns = [SparsePattern.random(shape, density) for _ in range(layers)]
    if explicit:
        patterns = [reverse_slots(pattern) for pattern in patterns]
    drops, grows = zip(
        *(
            update(p, min(dropped, p.nnz), min(grown, p.total - p.nnz), seed)
            for seed, p in enumerate(patterns)
        ),
        strict=True,
    )
    invalid = None
    if len(drops[0]) == len(grows[0]):
        invalid = torch.tensor(data.draw(st.lists(st.booleans(), min_size=layers, max_size=layers)))
    stack = PatternStack.of(patterns, CPU)
    without = stack.remove(torch.stack(drops)).unbind()
    made, after = stack.rewire(
        patterns, torch.stack(drops), torch.stack(grows), invalid, row_major=row_major
    )
    together = after.index
    for i, (pattern, drop, grow) in enumerate(zip(patterns, drops, grows, strict=True)):
        assert set(without[i].flat.tolist()) == {*pattern.flat.tolist()} - {
            *pattern.flat[drop].tolist()
        }
        wanted = Rewiring.make(pattern, drop, grow, row_major=row_major)
        if invalid is not None and invalid[i]:
            assert made[i].after == pattern
            assert torch.equal(made[i].source[made[i].source >= 0], made[i].source)
        else:
            assert made[i].after._has_slots_of(wanted.after)
            assert torch.equal(made[i].source, wanted.source)
        for one, other in zip(made[i].after.index[:3], together[:3], strict=True):
            assert torch.equal(one, other[i])
        if made[i]._can_write_grown(torch.zeros(pattern.nnz)):
            values = torch.randn(pattern.nnz, 2, 2)
            filled = values.clone()
            made[i]._write_grown(filled, 3.0)
            assert torch.equal(filled, made[i].apply(values, 3.0))


def reverse_slots(pattern):
    order = torch.arange(pattern.nnz).flip(0)
    return SparsePattern._from_slot_coordinates(
        pattern.rows[order], pattern.cols[order], shape=pattern.shape, block_size=pattern.block_size
    )


def test_repeated_updates():
    pattern = SparsePattern.random((8, 8), 0.4)
    for seed in range(5):
        drop, grow = update(pattern, 6, 6, seed)
        check_update(pattern, drop, grow, row_major=True)
        pattern = check_update(pattern, drop, grow, row_major=False)
    assert not pattern._is_row_major


def check_update(pattern, drop, grow, row_major):
    """Compare an update with the CPU; return the pattern afterwards."""
    wanted = Rewiring.make(pattern, drop, grow, row_major=row_major)
    for before in (pattern, pattern_on_device(pattern)):
        made = rewire(before, drop, grow, row_major=row_major)
        assert made.after.nnz == wanted.after.nnz
        assert made.after._has_slots_of(wanted.after)
        assert torch.equal(made.source, wanted.source)
        for after in (wanted.after, made.after):
            assert torch.equal(Rewiring.between(before, after).source, wanted.source)
        assert torch.equal(made.grown, wanted.grown)
        assert torch.equal(made.dropped, wanted.dropped)
        for tensor in (torch.randn(pattern.nnz), torch.randn(pattern.nnz, 2, 2)):
            for fill in (0.0, 1.5, torch.tensor(2.0), torch.randn(len(grow), *tensor.shape[1:])):
                assert torch.equal(made.apply(tensor, fill), wanted.apply(tensor, fill))
    return wanted.after


def test_position_dropped_and_grown_keeps_its_slot():
    pattern = SparsePattern([0, 1, 1], [1, 0, 2], shape=(2, 3))  # flat 1, 3, 5
    made = rewire(pattern, torch.tensor([0, 2]), torch.tensor([5, 4]))
    assert made.after.flat.tolist() == [4, 3, 5]
    assert made.source.tolist() == [-1, 1, 2]
    made = rewire(pattern, torch.tensor([0, 2]), torch.tensor([5, 4]), row_major=True)
    assert made.after.flat.tolist() == [3, 4, 5]
    assert made.source.tolist() == [1, -1, 2]


def test_copied_to_the_cpu_on_demand():
    pattern = SparsePattern.random((8, 12), 0.3)
    there = pattern_on_device(pattern)
    assert (there.nnz, there.density, there.values_shape) == (
        pattern.nnz,
        pattern.density,
        pattern.values_shape,
    )
    assert not {"rows", "cols"} & set(vars(there))
    assert there == pattern
    assert there.rows.dtype is torch.int32
    assert copy.deepcopy(there) is there
    for other in (
        pickle.loads(pickle.dumps(pattern_on_device(pattern))),
        copy.copy(pattern_on_device(pattern)),
    ):
        assert other == pattern
    made = rewire(there, *update(pattern, 3, 3))
    for other in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made)):
        assert torch.equal(other.source, made.source)
    with pytest.raises(AttributeError, match="nothing"):
        made.nothing  # noqa: B018


def test_no_host_waits():
    pattern = SparsePattern.random((64, 32), 0.3, block_size=2)
    sizes = [*(len(tensor) for tensor in pattern.index[:3]), 0, 0, pattern.nnz]
    with FakeTensorMode():
        held = torch.empty(pattern.nnz, dtype=torch.int64, device="cuda")
        before = SparsePattern._from_device(held, pattern)
        cuda = held.device
        drop, grow = (torch.empty(5, dtype=torch.int64, device="cuda") for _ in range(2))
        made = rewire(before, drop, grow)
        assert made.keeps_size
        assert made.after._flat_on(cuda).device == cuda
        assert Rewiring.between(before, made.after)._source_on(cuda).shape == (before.nnz,)
        index = made.after._index_on(cuda)
        assert [len(tensor) for tensor in index] == sizes
        assert on_device.sort_by_columns(*index[:2], pattern.grid[1]).device == cuda
        assert all(tensor.device == cuda for tensor in index)
        state = torch.empty(pattern.nnz, 2, 2, device="cuda")
        assert made.apply(state, 0.5).device == cuda
        fill = torch.empty(5, 2, 2, device="cuda")
        assert on_device.move(state, made._source_on(cuda), fill).device == cuda
