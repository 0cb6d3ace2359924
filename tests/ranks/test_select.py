"""Selection over ranks equals `ops.grow.select` of all scores in one process."""

from __future__ import annotations

import pytest
import torch
from fake_ranks import in_threads
from hypothesis import given
from hypothesis import strategies as st
from threaded import run_on_ranks

from dynsparse.ops.grow import select
from dynsparse.ranks import ALONE, chunk_of, gather_sorted, select_over_ranks

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@st.composite
def problems(draw):
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    found = []
    for _ in range(draw(st.integers(1, 3))):
        n, dtype = draw(st.integers(1, 60)), draw(st.sampled_from(DTYPES))
        kind = draw(st.sampled_from(["ties", "any", "one", "signs"]))
        if kind == "ties":
            scores = torch.randint(-3, 4, (n,), generator=g)
        elif kind == "any":
            scores = torch.randn(n, generator=g) * 10.0 ** draw(st.integers(-4, 4))
        elif kind == "one":
            scores = torch.full((n,), 0.5)
        else:
            scores = torch.tensor([0.0, -0.0, torch.inf, -torch.inf]).repeat(n)[:n]
        found.append((scores.to(dtype), draw(st.integers(0, n))))
    return found


@given(problems(), st.integers(1, 5), st.booleans(), st.integers(0, 2**31))
def test_selection_equals_one_process(found, size, largest, seed):
    g = torch.Generator().manual_seed(seed)
    owners = [torch.randint(size, scores.shape, generator=g) for scores, _ in found]

    def work(ranks):
        mine = [(owner == ranks.rank).nonzero().flatten() for owner in owners]
        scores = [s[m] for (s, _), m in zip(found, mine, strict=True)]
        chosen = select_over_ranks(ranks, scores, mine, [k for _, k in found], largest=largest)
        own = [m[c] for m, c in zip(mine, chosen, strict=True)]
        return gather_sorted(ranks, own, [len(s) for s, _ in found])

    expected = [select(s.double(), k, largest=largest) for s, k in found]
    for got in run_on_ranks(size, work):
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_single_rank_selects_locally():
    scores = torch.tensor([3.0, 1.0, 3.0, 2.0])
    (chosen,) = select_over_ranks(ALONE, [scores], [torch.arange(4)], [1])
    assert chosen.tolist() == [True, False, False, False]


def test_no_scores():
    def work(ranks):
        empty = torch.zeros(0)
        chosen = select_over_ranks(ranks, [empty], [empty.long()], [0])
        return [len(c) for c in chosen], select_over_ranks(ranks, [], [], [])

    assert run_on_ranks(3, work) == [([0], [])] * 3


def test_selecting_too_many_raises_on_all_ranks():
    def work(ranks):
        return select_over_ranks(ranks, [torch.ones(2)], [torch.arange(2)], [7])

    errors = in_threads(3, work)
    assert {str(e) for e in errors} == {"cannot select 7 of 6 scores"}


def test_number_of_collectives_is_independent_of_layers():
    def work(layers):
        def select_(ranks):
            scores = [torch.rand(50) for _ in range(layers)]
            places = [torch.arange(50) + 50 * ranks.rank for _ in range(layers)]
            select_over_ranks(ranks, scores, places, [20] * layers)
            return ranks.calls

        return run_on_ranks(2, select_)[0]

    assert work(1) == work(9) == 4  # the width, and three rounds


@pytest.mark.parametrize(("count", "size"), [(10, 3), (2, 4), (0, 2), (8, 4), (5, 5)])
def test_chunk_of_equals_tensor_chunk(count, size):
    things = torch.arange(count)
    parts = run_on_ranks(size, lambda ranks: things[slice(*chunk_of(ranks, count))].tolist())
    chunks = [part.tolist() for part in things.chunk(size)] if count else []
    assert parts == chunks + [[]] * (size - len(chunks))


@pytest.mark.parametrize("kind", ["any", "ties", "small", "falling"])
@pytest.mark.parametrize("share", [0.001, 0.3, 0.999])
@pytest.mark.parametrize("largest", [True, False])
def test_many_scores_and_their_traffic(kind, share, largest, generator):
    """Selected positions are sent as a bit mask if they are dense, else as numbers."""
    n = 50_001
    scores = {
        "any": torch.randn(n, generator=generator),
        "ties": torch.randint(-3, 4, (n,), generator=generator).float(),
        "small": torch.randn(n, generator=generator) * 1e-40,
        "falling": torch.linspace(1, -1, n),
    }[kind]
    k = int(share * n)

    def work(ranks):
        first, last = chunk_of(ranks, n)
        (mask,) = select_over_ranks(ranks, [scores[first:last]], [first], [k], largest=largest)
        before = ranks.sent
        (all_,) = gather_sorted(ranks, [mask.nonzero().flatten() + first], [n])
        return all_, ranks.sent - before

    expected = select(scores, k, largest=largest)
    assert torch.equal(scores.sort(stable=True, descending=largest)[1][:k].sort()[0], expected)
    for got, sent in run_on_ranks(3, work):
        assert torch.equal(got, expected)
        # Of this rank, to two others, or what was said of them.
        assert sent <= 2 * (min(4 * k, n // 3 // 8 + 1) + 24)
