"""topk_outside equals selection from the dense gradient."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels_of import ISAS, with_library

from dynsparse import SparsePattern
from dynsparse.ops.grow import POOLINGS, on_device, search, select, topk_outside
from dynsparse.ops.grow.naive import topk_outside_naive
from dynsparse.ops.grow.scores import Scorer
from dynsparse.ops.grow.search import guess_thresholds

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@st.composite
def problems(draw):
    """Draw (pairs, pattern, k, pooling, whether sums are exact)."""
    b = draw(st.sampled_from([1, 1, 2, 3, 4, 5, 16, 64, 128]))
    most = {64: 4, 128: 3}.get(b, 20)
    height = draw(st.integers(1, most))
    width = draw(st.integers(1, 70 if b < 16 else most))
    g = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    nnz = draw(st.integers(0, height * width))
    pattern = SparsePattern.random((height * b, width * b), nnz=nnz, block_size=b, generator=g)
    exact = draw(st.booleans())
    dtype = draw(st.sampled_from(FLOATS if exact else FLOATS[1:2]))

    def numbers(*size):
        # Small integers: exact in every type and order of summation, and full of ties.
        return torch.randint(-2, 3, size, generator=g) if exact else torch.randn(size, generator=g)

    pairs = [
        (numbers(batch, width * b).to(dtype), numbers(batch, height * b).to(dtype))
        for batch in draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
    ]
    k = draw(st.integers(0, pattern.total - nnz))
    return pairs, pattern, k, draw(st.sampled_from(POOLINGS)), exact


@settings(deadline=None, max_examples=100)
@given(problems(), st.sampled_from([1, 256, 1000, 8 << 20]), st.sampled_from([0, 3, 10**9]))
def test_equals_the_dense_gradient(problem, chunk_bytes, sample_from):
    pairs, pattern, k, pooling, exact = problem
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "CHUNK_BYTES", chunk_bytes)
        patch.setattr(search, "_SAMPLE_FROM", sample_from)
        patch.setattr(on_device, "PANEL_BYTES", chunk_bytes)

        def grow():
            return topk_outside(pairs, pattern, k, pooling=pooling)

        plain = with_library(None, grow)
        for isa in ISAS:
            found = with_library(isa, grow)
            assert torch.equal(found.flat, plain.flat), isa
            assert torch.equal(found.scores, plain.scores), isa
        if not exact:
            return
        flat, scores = topk_outside_naive(pairs, pattern, k, pooling=pooling)
        assert plain.flat.tolist() == flat.tolist()
        assert plain.scores.tolist() == scores.tolist()
        if not k:
            return
        dtype = torch.float64 if pairs[0][0].dtype == torch.float64 else torch.float32
        assert plain.scores.dtype == dtype
        order = flat.sort().indices
        for placed in (pattern, SparsePattern._from_device(pattern.flat, pattern)):
            found = on_device.topk_on_device([pairs], [placed], k, pooling, dtype)
            assert torch.equal(found[0][0], flat[order])
            assert torch.equal(found[1][0], scores[order])
            assert found[1].dtype is dtype


def test_by_hand():
    # dY^T X = [[1, -4, 2], [3, 0, -5]]; (0, 0) and (1, 2) are taken.
    x = torch.eye(3)
    dy = torch.tensor([[1.0, 3.0], [-4.0, 0.0], [2.0, -5.0]])
    pattern = SparsePattern([0, 1], [0, 2], shape=(2, 3))
    best = topk_outside([(x, dy)], pattern, 3)
    assert best.flat.tolist() == [1, 3, 2]
    assert best.scores.tolist() == [4, 3, 2]


def test_gradients_are_summed_before_magnitudes():
    x, dy = torch.ones(1, 2), torch.tensor([[3.0, 1.0]])
    pattern = SparsePattern([], [], shape=(2, 2))
    best = topk_outside([(x, dy), (x, -dy), (x[:, :1] * torch.tensor([0.0, 1.0]), dy)], pattern, 4)
    assert best.flat.tolist() == [1, 3, 0, 2]
    assert best.scores.tolist() == [3, 1, 0, 0]


@pytest.mark.parametrize(
    ("pooling", "best"), [("sum", 1), ("SUM", 1), ("none", 1), ("avg", 1), ("max", 0)]
)
def test_pooling_of_blocks(pooling, best):
    # Two 2x2 blocks: magnitudes [5, 0, 0, 0] and [2, 2, 2, -2]: the maximum and the sum disagree.
    grad = torch.tensor([[5.0, 0.0, 2.0, 2.0], [0.0, 0.0, 2.0, -2.0]])
    pattern = SparsePattern([], [], shape=(2, 4), block_size=2)
    found = topk_outside([(grad, torch.eye(2))], pattern, 1, pooling=pooling)
    assert found.flat.tolist() == [best]
    assert found.scores.tolist() == [{"max": 5, "avg": 2}.get(pooling, 8)]


def test_ties_are_broken_by_position():
    pattern = SparsePattern([0], [1], shape=(3, 3))
    pairs = [(torch.ones(2, 3), torch.ones(2, 3))]
    assert topk_outside(pairs, pattern, 4).flat.tolist() == [0, 2, 3, 4]


def test_16_bit_activations_are_summed_in_float32():
    # 4096 ones and a 1 more: bfloat16 has no 4097, and float16 sums stall at 2048.
    pattern = SparsePattern([], [], shape=(1, 2))
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.ones(4097, 2, dtype=dtype)
        x[0, 0] = 0
        best = topk_outside([(x, torch.ones(4097, 1, dtype=dtype))], pattern, 1)
        assert (best.flat.tolist(), best.scores.tolist()) == ([1], [4097])


def test_strided_activations():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(6, 9, generator=g, dtype=torch.float64).t()
    dy = torch.randn(9, 10, generator=g, dtype=torch.float64)[:, ::2]
    pattern = SparsePattern.random((5, 6), density=0.3, generator=g)
    found = topk_outside([(x, dy)], pattern, 7)
    assert found.flat.tolist() == topk_outside_naive([(x, dy)], pattern, 7)[0].tolist()


def test_zero_positions_require_no_pairs():
    full = SparsePattern.full((3, 3))
    assert len(topk_outside([], full, 0).flat) == 0


@given(
    st.lists(st.integers(0, 5), max_size=30),
    st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16]),
    st.data(),
)
def test_select(numbers, dtype, data):
    k = data.draw(st.integers(0, len(numbers)))
    scores = torch.tensor(numbers, dtype=dtype)
    best = sorted(range(len(numbers)), key=lambda i: (-numbers[i], i))[:k]
    assert select(scores, k).tolist() == sorted(best)
    worst = sorted(range(len(numbers)), key=lambda i: (numbers[i], i))[:k]
    assert select(scores, k, largest=False).tolist() == sorted(worst)


def test_select_too_many():
    with pytest.raises(ValueError, match="cannot select 6 of 5"):
        select(torch.ones(5), 6)


def test_unsorted_candidates_are_ordered_by_position(generator):
    x, dy = torch.randn(4, 30, generator=generator), torch.randn(4, 20, generator=generator)
    pattern = SparsePattern.random((20, 30), density=0.2, generator=generator)
    best = topk_outside([(x, dy)], pattern, 50)
    same = topk_outside([(x, dy)], pattern, 50, sort=False)
    order = best.flat.sort().indices
    assert torch.equal(same.flat, best.flat[order])
    assert torch.equal(same.scores, best.scores[order])


X, DY = torch.ones(4, 3), torch.ones(4, 2)


@pytest.mark.parametrize(
    ("pairs", "k", "options", "error", "message"),
    [
        ([(X, DY)], 6, {}, ValueError, "only 5 of 6 are free"),
        ([(X, DY)], -1, {}, ValueError, "k must not be negative, got -1"),
        ([(X, DY)], 1.5, {}, TypeError, r"k must be an integer, got 1\.5"),
        ([], 1, {}, ValueError, "at least one pair"),
        ([(DY, X)], 1, {}, ValueError, r"expected x \[batch, 3\] and dY \[batch, 2\]"),
        ([(X[None], DY[None])], 1, {}, ValueError, r"got \[1, 4, 3\] and \[1, 4, 2\]"),
        ([(X, DY[:3])], 1, {}, ValueError, r"got \[4, 3\] and \[3, 2\]"),
        ([(X.long(), DY)], 1, {}, TypeError, "x must be of a floating point type"),
        ([(X, DY * float("nan"))], 1, {}, ValueError, "dY holds NaN or infinity"),
        ([(X / 0, DY)], 1, {}, ValueError, "x holds NaN or infinity"),
        ([(X, DY)], 1, {"pooling": "mean-ish"}, ValueError, "pooling must be one of"),
        ([(X, DY)], 1, {"pooling": None}, ValueError, "pooling must be one of"),
    ],
)
def test_bad_input(pairs, k, options, error, message):
    pattern = SparsePattern([0], [0], shape=(2, 3))
    with pytest.raises(error, match=message):
        topk_outside(pairs, pattern, k, **options)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("guess", [None, 1e9])
@pytest.mark.parametrize("b", [1, 4])
def test_threshold_guess(b, guess, monkeypatch, generator):
    """It gives enough candidates and few more; a second pass corrects a guess far too high."""
    n = 1200
    x = torch.randn(30, n, generator=generator, dtype=torch.float64)
    # Outputs of very different scale, some of them dead.
    dy = torch.randn(30, n, generator=generator, dtype=torch.float64)
    dy *= torch.rand(n, generator=generator).pow(3) * (torch.rand(n, generator=generator) > 0.2)
    pattern = SparsePattern.random((n, n), density=0.1, block_size=b, generator=generator)
    k = pattern.total // 30
    dense = topk_outside_naive([(x, dy)], pattern, pattern.total - pattern.nnz)[1]
    scorer = Scorer([(x, dy)], b, "sum", torch.float64, 8)
    low, high = guess_thresholds(scorer.score_submatrix, pattern, k)
    # The fewer rows are sampled, the more room their differences need.
    assert k <= int((dense > low).sum()) < (2 if b == 1 else 3) * k
    assert k >= int((dense > high).sum())
    # What is present is not free: a sample of the whole knows it exactly.
    small = SparsePattern.random((100, 120), nnz=1500, generator=generator)
    scores = torch.rand(100, 120, generator=generator)
    low, high = guess_thresholds(lambda rows, cols: scores[rows][:, cols], small, 700)
    free = scores.view(-1).index_fill(0, small.flat, -1)
    assert 700 <= int((free > low).sum()) <= 705
    assert 695 <= int((free > high).sum()) <= 700

    if guess is not None:
        monkeypatch.setattr(search, "guess_thresholds", lambda *_: (guess, torch.inf))
    monkeypatch.setattr(search, "CHUNK_BYTES", 8 * n * b)
    found = topk_outside([(x, dy)], pattern, k)
    assert torch.equal(found.flat, topk_outside_naive([(x, dy)], pattern, k)[0])


def test_overflow_raises():
    big = torch.tensor([[3e38]])
    with pytest.raises(ValueError, match="overflow"):
        topk_outside([(big, big), (big, -big)], SparsePattern([], [], shape=(1, 1)), 1)


def test_memory_is_one_chunk_of_the_gradient(monkeypatch, generator):
    n, sizes = 512, []
    real = Scorer.score_rows

    def spy(*arguments):
        scores = real(*arguments)
        sizes.append(scores.numel() * scores.itemsize)
        return scores

    monkeypatch.setattr(Scorer, "score_rows", spy)
    monkeypatch.setattr(search, "CHUNK_BYTES", 16 * n * 4)
    pattern = SparsePattern.random((n, n), density=0.05, generator=generator)
    x, dy = torch.randn(8, n, generator=generator), torch.randn(8, n, generator=generator)
    topk_outside([(x, dy)], pattern, 1000)
    assert sizes == [16 * n * 4] * (n // 16)  # one pass, chunk by chunk
