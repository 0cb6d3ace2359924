"""collective_errors, check_consistent and digest: all ranks raise the same error."""

from __future__ import annotations

import pytest
import torch
from fake_ranks import in_threads
from threaded import common_error, run_on_ranks

from dynsparse._core import native
from dynsparse.ranks import (
    ALONE,
    check_consistent,
    collective_errors,
    digest,
    format_ranks,
    gather_texts,
)


def failing(bad, error):
    def work(ranks):
        with collective_errors(ranks):
            if ranks.rank in bad:
                raise error(ranks.rank) if callable(error) else error

    return work


@pytest.mark.parametrize(("op", "expected"), [("max", [2, -1]), ("sum", [3, -6])])
def test_numbers_share_the_collective_of_errors(op, expected):
    def work(ranks):
        numbers = [0, 0]
        with collective_errors(ranks, numbers, op):
            numbers[:] = [ranks.rank, -ranks.rank - 1]
        return numbers, ranks.calls

    assert run_on_ranks(3, work) == [(expected, 1)] * 3


def test_64_bit_numbers_are_exact():
    """Numbers of a block that failed on some rank are not used."""
    ends = [2**63 - 1, -(2**63)]

    def work(ranks, failing=False):
        numbers = [0, 0]
        with collective_errors(ranks, numbers):
            if failing and ranks.rank == 1:
                raise ValueError("x holds NaN")
            numbers[:] = ends
        return numbers

    assert run_on_ranks(2, work) == [ends, ends]
    assert work(ALONE) == ends
    assert common_error(2, lambda ranks: work(ranks, True)) == (ValueError, "rank 1: x holds NaN")


def test_error_on_one_rank_is_raised_on_all():
    assert common_error(3, failing([1], ValueError("x holds NaN"))) == (
        ValueError,
        "rank 1: x holds NaN",
    )


def test_error_on_all_ranks_is_reported_once():
    assert common_error(3, failing([0, 1, 2], TypeError("no"))) == (TypeError, "no")


def test_different_errors_are_joined():
    found = common_error(4, failing([0, 2, 3], lambda r: ValueError(f"bad {r % 2}")))
    assert found == (ValueError, "ranks 0 and 2: bad 0; rank 3: bad 1")


def test_other_error_types_are_named_on_one_line():
    found = common_error(2, failing([1], KeyError("a\n b")))
    assert found == (RuntimeError, "rank 1: KeyError: 'a\\n b'")
    assert common_error(2, failing([1], ValueError("a\n b"))) == (ValueError, "rank 1: a b")


def test_keyboard_interrupt_keeps_its_type_on_its_rank():
    errors = in_threads(2, failing([1], KeyboardInterrupt()), 10)
    assert [type(e) for e in errors] == [RuntimeError, KeyboardInterrupt]
    assert str(errors[0]) == "rank 1: KeyboardInterrupt"


def test_error_keeps_its_cause_on_its_rank():
    errors = in_threads(2, failing([1], ValueError("no")), 10)
    assert [type(e.__cause__) for e in errors] == [type(None), ValueError]


def test_no_error():
    assert run_on_ranks(3, failing([], None)) == [None] * 3


def test_single_rank_raises_the_original_error():
    error = KeyError("a")
    with pytest.raises(KeyError) as found, collective_errors(ALONE):
        raise error
    assert found.value is error


@pytest.mark.parametrize("dtype", [torch.int32, torch.float64, torch.uint8])
@pytest.mark.parametrize("count", [1024, 4099, 300_001])
def test_digests_of_large_tensors_differ(dtype, count):
    """Also if only the highest bits of several words differ, or if two words are swapped."""
    g = torch.Generator().manual_seed(0)
    whole = torch.randint(1, 100, (count,), generator=g).to(dtype)
    seen = {digest(whole.clone())}
    raw = whole.view(torch.uint8)
    for at in [0, 1, len(raw) // 2, len(raw) - 1]:
        other = raw.clone()
        other[at] ^= 128
        seen.add(digest(other.view(dtype)))
    several = raw.clone()
    several[7 : 7 + 8 * 16 : 8] ^= 128
    seen.add(digest(several.view(dtype)))
    turned = whole.flip(0)
    seen.add(digest(turned))
    assert len(seen) == 7
    assert digest(whole) == digest(whole) != digest(whole, whole)


@pytest.mark.parametrize("count", [4096, 4097, 300_001])
def test_digests_equal_those_without_kernels(count, monkeypatch):
    """Also of bytes at unaligned addresses."""
    whole = torch.randint(256, (count + 3,), generator=torch.Generator().manual_seed(0))
    raw = whole.to(torch.uint8)[3:]
    compiled = digest(raw)
    monkeypatch.setattr(native, "load", lambda: None)
    assert digest(raw) == compiled


def test_disagreement_names_values_and_ranks():
    def work(ranks):
        seed = 1 if ranks.rank == 2 else 0
        check_consistent(ranks, {"the schedule": "every 5", "the seed": f"{seed}"}, "give one seed")

    assert common_error(4, work) == (
        ValueError,
        "ranks disagree on the seed: ranks 0, 1 and 3: 0, rank 2: 1; give one seed",
    )


def test_disagreement_on_digests_names_ranks_only():
    def work(ranks):
        pattern = torch.arange(5) + (ranks.rank == 0)
        found = {"layer 'a'": 7, "layer 'b'": digest(pattern), "layer 'c'": ranks.rank}
        check_consistent(ranks, found, "begin alike", shown=False)

    assert common_error(3, work) == (
        ValueError,
        "ranks disagree on layer 'b' (and 1 more): rank 0 differs from ranks 1 and 2; begin alike",
    )


def test_equal_values_pass():
    run_on_ranks(3, lambda ranks: check_consistent(ranks, {"a": "x", "b": -(2**63)}, "no"))
    run_on_ranks(3, lambda ranks: check_consistent(ranks, {}, "no"))
    check_consistent(ALONE, {"a": "x"}, "no")


def test_gather_texts_of_any_length():
    texts = ["", "a", "ü" * 500, "x\ny"]
    assert run_on_ranks(4, lambda ranks: gather_texts(ranks, texts[ranks.rank])) == [texts] * 4


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"),
        ([0, 2], "ranks 0 and 2"),
        (range(20), "ranks 0, 1, 2, 3, 4, 5, 6 and 13 more"),
    ],
)
def test_format_ranks(ranks, text):
    assert format_ranks([*ranks]) == text


def test_digests_of_different_tensors_differ():
    found = [
        digest(torch.arange(3)),
        digest(torch.arange(4)),
        digest(torch.arange(3, dtype=torch.int32)),
        digest("a"),
        digest("a", "b"),
        digest("ab"),
    ]
    assert len(set(found)) == len(found)
    assert digest(torch.arange(6)[::2]) == digest(torch.tensor([0, 2, 4]))
