"""Growth over ranks equals `topk_outside` in one process with all samples.

Integer data gives exact sums and many ties: the positions must be equal bit for bit.
"""

from __future__ import annotations

from contextlib import contextmanager
from itertools import chain

import pytest
import torch
from fake_ranks import CountingRanks, force_exchange, in_threads
from hypothesis import given
from hypothesis import strategies as st
from threaded import run_on_ranks

import dynsparse as ds
from dynsparse._core import native
from dynsparse.ops.conv.patches import patches_of
from dynsparse.ops.grow import search, topk_outside
from dynsparse.pattern import SparsePattern
from dynsparse.ranks import (
    GrowRequest,
    comm_volume,
    grow,
    topk_over_ranks,
)


@st.composite
def layers(draw, size):
    """Draw per layer (pattern, number of blocks to grow, pairs of each rank)."""
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    integers = draw(st.booleans())
    found = []
    for _ in range(draw(st.integers(1, 3))):
        b = draw(st.sampled_from([1, 1, 2, 4]))
        height, width = draw(st.integers(1, 9)), draw(st.integers(1, 9))
        density = draw(st.floats(0, 1))
        pattern = SparsePattern.random(
            (height * b, width * b), density=density, block_size=b, generator=g
        )
        count = draw(st.integers(0, pattern.total - pattern.nnz))
        dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
        pairs = []
        for rank in range(size):
            # Some ranks have no pairs, some pairs no samples.
            passes = draw(st.integers(0 if rank else 1, 2))
            pairs.append([])
            for _ in range(passes):
                n = draw(st.integers(0, 4))
                shapes = ((n, width * b), (n, height * b))
                if integers:
                    pair = [torch.randint(-3, 4, s, generator=g).to(dtype) for s in shapes]
                else:
                    pair = [torch.randn(s, generator=g, dtype=torch.float64) for s in shapes]
                pairs[rank].append(tuple(pair))
        found.append((pattern, count, pairs))
    return found


def grow_requests(found, rank):
    return [
        GrowRequest(f"layer{i}", pairs[rank], pattern, count)
        for i, (pattern, count, pairs) in enumerate(found)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["gradients", "samples", None])
@given(data=st.data())
def test_grown_positions_equal_one_process(exchange, data):
    size = data.draw(st.integers(1, 5))
    pooling = data.draw(st.sampled_from(["sum", "avg", "max", "none"]))
    found = data.draw(layers(size))

    def work(ranks):
        asked = grow_requests(found, ranks.rank)
        return topk_over_ranks(ranks, asked, pooling=pooling)

    expected = [
        topk_outside([*chain(*pairs)], pattern, count, pooling=pooling)
        for pattern, count, pairs in found
    ]
    chunks = small_chunks(data.draw(st.sampled_from([1 << 9, 1 << 12, 8 << 20])))
    with chunks, force_exchange(exchange):
        grown = run_on_ranks(size, work)
    for got in grown:
        for positions, one in zip(got, expected, strict=True):
            assert torch.equal(positions, one.flat.sort().values)


@contextmanager
def small_chunks(size):
    """Lower the chunk sizes, so that small layers take several rounds like large ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grow, "_CHUNK_BYTES", size)
        patch.setattr(search, "CHUNK_BYTES", size)
        patch.setattr(search, "_SAMPLE_FROM", 0)
        patch.setattr(search, "_WORTHWHILE", 0)
        yield


@pytest.mark.parametrize("guess", [1e9, 3.0, -1.0])
@pytest.mark.parametrize("size", [1, 3])
def test_too_high_threshold_guess_is_corrected(size, guess, monkeypatch):
    """With one rank or with several."""
    pattern, pairs = large_layer(size, dtype=torch.float64)
    own = search.guess_thresholds
    monkeypatch.setattr(
        search,
        "guess_thresholds",
        lambda *a: (guess, torch.inf) if a[-1][1] == 96 else own(*a),
    )

    def work(ranks):
        asked = [GrowRequest("a", pairs[ranks.rank], pattern, 500)]
        return topk_over_ranks(ranks, asked)[0]

    expected = topk_outside([*chain(*pairs)], pattern, 500).flat.sort().values
    with small_chunks(8 << 10), force_exchange("samples"):
        for got in run_on_ranks(size, work):
            assert torch.equal(got, expected)


@pytest.mark.parametrize("high", [None, 0.5])
def test_large_layers_are_screened_by_integer_products(high, monkeypatch):
    """Same positions as in one process, also if more scores are certain than blocks grow."""
    if native.load() is None or not native.load().dynsparse_grow_screens():
        pytest.skip("these kernels have no products of small integers")
    pattern, pairs = large_layer(2, n=512)
    calls = []
    made, guess = search.screen_positions, search.guess_thresholds
    monkeypatch.setattr(search, "screen_positions", lambda *a: calls.append(made(*a)) or calls[-1])
    if high:
        monkeypatch.setattr(
            search, "guess_thresholds", lambda *a: (guess(*a)[0], high * guess(*a)[0])
        )

    def work(ranks):
        asked = [GrowRequest("a", pairs[ranks.rank], pattern, 2000)]
        return topk_over_ranks(ranks, asked)[0]

    exact = [(x.double(), dy.double()) for x, dy in chain(*pairs)]
    expected = topk_outside(exact, pattern, 2000).flat.sort().values
    with small_chunks(64 << 10), force_exchange("samples"):
        for got in run_on_ranks(2, work):
            assert torch.equal(got, expected)
    assert len(calls) == 2
    if not high:
        assert all(found is not None and 500 < len(found[2]) < 1000 for found in calls)


@pytest.mark.parametrize("exchange", [None, "samples"])
@pytest.mark.parametrize(("b", "groups"), [(1, 1), (1, 2), (2, 1)])
def test_convolutions_equal_one_process(b, groups, exchange, generator):
    """Convolutions always exchange parts of the gradient; the linear layer may send samples."""
    conv = ds.nn.SparseConv2d(
        4, 6, (3, 2), density=0.3, block_size=b, stride=(1, 2), padding=1, groups=groups,
        generator=generator,
    )  # fmt: skip
    fc, fc_pairs = large_layer(2, n=24)
    pairs = []
    for batch in (3, 2):
        x = torch.randint(-3, 4, (batch, 4, 7, 6), generator=generator).float()
        dy = torch.randint(-3, 4, (batch, 6, *conv.geometry.output_size(7, 6)), generator=generator)
        pairs.append(patches_of(x, dy.float(), conv.geometry))

    def work(ranks):
        asked = [
            GrowRequest("conv", [pairs[ranks.rank]], conv.pattern, 9),
            GrowRequest("fc", fc_pairs[ranks.rank], fc, 7),
        ]
        return topk_over_ranks(ranks, asked)

    expected = topk_outside(pairs, conv.pattern, 9).flat.sort().values
    beside = topk_outside([*chain(*fc_pairs)], fc, 7).flat.sort().values
    with force_exchange(exchange):
        results = run_on_ranks(2, work)
    for grown in results:
        assert torch.equal(grown[0], expected)
        assert torch.equal(grown[1], beside)


def large_layer(size, seed=0, n=96, samples=16, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    pattern = SparsePattern.random((n, n), density=0.1, generator=g)
    pairs = [
        [tuple(torch.randn(samples, n, generator=g).to(dtype) for _ in range(2))]
        for _ in range(size)
    ]
    return pattern, pairs


def test_cheaper_exchange_is_selected():
    pattern, pairs = large_layer(2, samples=4)
    k = 50

    def sent(exchange, pairs):
        def grow_(ranks):
            asked = [GrowRequest("a", pairs[ranks.rank], pattern, k)]
            topk_over_ranks(ranks, asked)
            return ranks.sent

        with force_exchange(exchange):
            return run_on_ranks(2, grow_)

    assert sent(None, pairs) == sent("samples", pairs) < sent("gradients", pairs)
    _, many = large_layer(2, samples=200)
    assert sent(None, many) == sent("gradients", many) < sent("samples", many)
    pieces, samples = comm_volume(2, pattern.shape, 8, torch.float32)
    assert (pieces, samples) == (96 * 96 * 4 / 2, 8 * (96 + 48) * 4 / 2)


def test_small_layers_share_collectives():
    def calls(count):
        def grow_(ranks):
            g = torch.Generator().manual_seed(ranks.rank)
            pattern = SparsePattern.random((32, 32), 0.1, generator=torch.Generator())
            pairs = [(torch.randn(64, 32, generator=g), torch.randn(64, 32, generator=g))]
            asked = [GrowRequest(str(i), pairs, pattern, 20) for i in range(count)]
            topk_over_ranks(ranks, asked)
            return ranks.calls

        with force_exchange("gradients"):
            return run_on_ranks(2, grow_)[0]

    assert calls(1) == calls(6)


def test_nan_on_one_rank_raises_on_all():
    pattern, pairs = large_layer(3)
    pairs[1][0][0][3, 5] = torch.nan

    def work(ranks):
        topk_over_ranks(ranks, [GrowRequest("fc1", pairs[ranks.rank], pattern, 7)])

    errors = in_threads(3, work)
    assert {str(e) for e in errors} == {
        "rank 1: layer 'fc1': x holds NaN or infinity, so positions cannot be ranked: the training "
        "has diverged"
    }
    assert {type(e) for e in errors} == {ValueError}


class Failing(tuple):
    """A pair that raises MemoryError after the first collective."""

    ranks = None

    def __iter__(self):
        if self.ranks.calls > 0:
            raise MemoryError("no memory left")
        return super().__iter__()

    def __getitem__(self, i):
        return [*self][i]


@pytest.mark.parametrize("exchange", ["gradients", "samples"])
def test_error_between_collectives_raises_on_all(exchange):
    pattern, pairs = large_layer(2)

    def work(ranks):
        own = pairs[ranks.rank]
        if ranks.rank == 1:
            own = [Failing(pair) for pair in own]
            own[0].ranks = ranks
        topk_over_ranks(ranks, [GrowRequest("fc1", own, pattern, 7)])

    with force_exchange(exchange):
        errors = in_threads(2, work)
    assert {str(e) for e in errors} == {"rank 1: no memory left"}
    assert {type(e) for e in errors} == {MemoryError}


def test_no_pairs_on_any_rank_raises():
    pattern, _ = large_layer(2)

    def work(ranks):
        topk_over_ranks(ranks, [GrowRequest("fc1", [], pattern, 7)])

    errors = in_threads(2, work)
    assert {str(e) for e in errors} == {
        "layer 'fc1': expected at least one pair (x, dY), got none on any rank: growth needs a "
        "backward pass"
    }


def test_overflow_raises_on_all_ranks():
    pattern, pairs = large_layer(2)
    for sign, ((x, dy),) in zip((1, -1), pairs, strict=True):
        x.fill_(1e38)
        dy.fill_(sign * 1e38)

    def work(ranks):
        asked = [GrowRequest("fc1", pairs[ranks.rank], pattern, pattern.total - pattern.nnz)]
        topk_over_ranks(ranks, asked)

    with force_exchange("gradients"):
        errors = in_threads(2, work)
    assert {type(e) for e in errors} == {ValueError}
    assert "the gradients overflow" in str(errors[0])


@pytest.mark.parametrize("exchange", ["gradients", "samples"])
def test_traffic_of_many_ranks_matches_comm_volume(exchange):
    """Counted on one of 1,024 ranks that all pass the same arguments."""
    size, n, samples = 1024, 1024, 8
    g = torch.Generator().manual_seed(0)
    pattern = SparsePattern.random((n, n), density=0.1, generator=g)
    pairs = [(torch.randn(samples, n, generator=g), torch.randn(samples, n, generator=g))]
    ranks = CountingRanks(size)
    # Every rank looks after one row; all bring the same, so each counts as the rank 0 does.
    row = int(pattern.row_ptr[1])
    k = size * (n - row)
    room = SparsePattern(pattern.rows[:row], pattern.cols[:row], shape=(n, n))
    with force_exchange(exchange):
        topk_over_ranks(ranks, [GrowRequest("a", pairs, room, k)])
    by_gradients, by_samples = comm_volume(size, (n, n), samples * size, torch.float32)
    exchanged = by_gradients if exchange == "gradients" else by_samples
    small = 2 * (size - 1) / size * (3 * 2048 * 4 + 8 + 3 * 4 + 4 * 8)
    positions = (size - 1) * n / 8  # as bits, since most of a row join
    counts = (size - 1) * 8 * (4 if exchange == "samples" else 3)
    assert ranks.sent == pytest.approx(exchanged + small + positions + counts, rel=0.01)
