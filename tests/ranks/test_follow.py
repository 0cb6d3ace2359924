"""Tensors whose slots lie on several ranks follow a rewiring as whole ones do."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from threaded import over

from dynsparse.pattern import Rewiring, SparsePattern
from dynsparse.ranks import ALONE, follow_over_ranks


def rewirings(grid, nnz, moved, generator, block_size=1):
    """One that drops and grows `moved` blocks anywhere."""
    shape = (grid[0] * block_size, grid[1] * block_size)
    before = SparsePattern.random(shape, nnz=nnz, block_size=block_size, generator=generator)
    free = (~before.contains(torch.arange(before.total))).nonzero().flatten()
    drop = torch.randperm(nnz, generator=generator)[:moved]
    grow = free[torch.randperm(len(free), generator=generator)[:moved]]
    return Rewiring.make(before, drop, grow, row_major=True)


def follow(ranks, rewiring, wholes, fills):
    """The joined tensors after every rank has moved its part of copies of `wholes`."""
    share = -(-rewiring.before.nnz // ranks.size)
    own = [t.clone()[ranks.rank * share : (ranks.rank + 1) * share] for t in wholes]
    memory = [t.data_ptr() for t in own]
    before = [t.clone() for t in own]
    write = follow_over_ranks(ranks, rewiring.source, own, fills)()
    assert all(torch.equal(a, b) for a, b in zip(own, before, strict=True))
    write()
    assert memory == [t.data_ptr() for t in own]
    return own


@given(
    size=st.integers(1, 5),
    grid=st.tuples(st.integers(1, 7), st.integers(1, 7)),
    share=st.floats(0, 1),
    moved=st.floats(0, 1),
    block_size=st.sampled_from([1, 4]),
    seed=st.integers(0, 99),
)
def test_follows_as_one_process_does(size, grid, share, moved, block_size, seed):
    g = torch.Generator().manual_seed(seed)
    total = grid[0] * grid[1]
    nnz = round(share * total)
    count = round(moved * min(nnz, total - nnz))
    rewiring = rewirings(grid, nnz, count, g, block_size)
    shape = rewiring.before.values_shape
    wholes = [
        torch.randn(shape, dtype=torch.float64, generator=g),
        torch.randn(shape, generator=g).bfloat16(),
        torch.randint(0, 99, (nnz,), generator=g),
    ]
    start = torch.randn((count, *shape[1:]), dtype=torch.float64, generator=g)
    fills = [start, 0.5, 0.0]
    expected = [rewiring.apply(t, f) for t, f in zip(wholes, fills, strict=True)]
    parts = over(size, lambda ranks: follow(ranks, rewiring, wholes, fills))
    for joined, one in zip(zip(*parts, strict=True), expected, strict=True):
        assert torch.equal(torch.cat(joined), one)


def test_survivors_of_one_rank_go_to_another():
    """By hand: all that is grown comes first, so that every survivor moves two slots up."""
    before = SparsePattern.from_flat(torch.tensor([2, 3, 4, 5, 6]), shape=(1, 7))
    drop, grow = torch.tensor([3, 4]), torch.tensor([0, 1])
    rewiring = Rewiring.make(before, drop, grow, row_major=True)
    assert rewiring.source.tolist() == [-1, -1, 0, 1, 2]
    parts = over(2, lambda ranks: follow(ranks, rewiring, [torch.arange(5.0)], [9.0])[0])
    assert [part.tolist() for part in parts] == [[9, 9, 0], [1, 2]]


def test_only_what_crosses_a_border_is_sent():
    g = torch.Generator().manual_seed(0)
    rewiring = rewirings((64, 64), 400, 40, g)
    wholes = [torch.randn(400, generator=g) for _ in range(3)]

    def sent(ranks):
        follow(ranks, rewiring, wholes, [0.0] * 3)
        return ranks.sent, ranks.calls

    share, source = 200, rewiring.source
    crossing = [
        int((source[:share] >= share).sum()),
        int(((source[share:] >= 0) & (source[share:] < share)).sum()),
    ]
    found = over(2, sent)
    assert [calls for _, calls in found] == [1, 1]
    assert [out for out, _ in found] == [crossing[1] * 12, crossing[0] * 12]


def test_a_part_of_another_length_is_refused():
    rewiring = rewirings((4, 4), 6, 2, torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match="expected the 6 slots of rank 0"):
        follow_over_ranks(ALONE, rewiring.source, [torch.zeros(5)], [0.0])
    follow_over_ranks(ALONE, rewiring.source, [], [])()()


@given(
    size=st.integers(1, 5),
    dropped=st.integers(0, 9),
    grown=st.integers(0, 9),
    seed=st.integers(0, 99),
)
def test_slots_may_become_more_or_fewer(size, dropped, grown, seed):
    g = torch.Generator().manual_seed(seed)
    before = SparsePattern.random((4, 6), nnz=9, generator=g)
    free = (~before.contains(torch.arange(before.total))).nonzero().flatten()
    drop = torch.randperm(9, generator=g)[:dropped]
    rewiring = Rewiring.make(
        before, drop, free[torch.randperm(15, generator=g)[:grown]], row_major=True
    )
    whole = torch.randn((9, 2), generator=g)
    expected = rewiring.apply(whole, 7.0)

    def work(ranks):
        share = -(-9 // ranks.size)
        own = whole[ranks.rank * share : (ranks.rank + 1) * share].clone()
        return follow_over_ranks(ranks, rewiring.source, [own], [7.0], before=9)()()[0]

    parts = over(size, work)
    assert torch.equal(torch.cat(parts), expected)
    assert [len(part) for part in parts] == [
        len(one) for one in [*expected.chunk(size), *[expected[:0]] * size][:size]
    ]
