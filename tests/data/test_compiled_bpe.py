"""Long texts through tiktoken: the ids of our own encoder, or our own encoder."""

import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynsparse.data import bpe
from dynsparse.data.bpe import GPT2Tokenizer

MERGES = [
    (b"l", b"o"), (b"lo", b"w"), (b"e", b"r"), (b" ", b"t"), (b" t", b"h"), (b"a", b"b"),
    (b"ab", b"ab"), (b"\xc3", b"\xaf"),
]  # fmt: skip
# "abc" was learned from a pair that "bc", learned earlier, never leaves; tiktoken would join it.
UNREACHED = [(b"b", b"c"), (b"a", b"b"), (b"ab", b"c")]
TWICE = [(b"a", b"b"), (b"b", b"c"), (b"ab", b"c"), (b"a", b"bc")]
SIGNS = "abelorwth 'st9²ï,.!\n\t\x1c\x85\xa0\u2003日á\u0301Ⅷ🙂"


@pytest.fixture(scope="module")
def compiled():
    pytest.importorskip("tiktoken")
    made = GPT2Tokenizer(MERGES)
    assert made._compiled is not None
    return made


@given(st.text(SIGNS) | st.text())
def test_the_ids_are_the_same(compiled, text):
    text = text.encode(errors="ignore").decode()
    with pytest.MonkeyPatch.context() as patch:
        own = compiled.encode(text)
        patch.setattr(bpe, "_LONG", 0)
        found = compiled.encode(text)
    assert found.dtype == own.dtype
    assert found.tolist() == own.tolist()


@pytest.mark.parametrize("run", [" ", "ab", "\n", "^"])
def test_long_runs(compiled, monkeypatch, run):
    text = run * 100_000 + "x"
    own = compiled.encode(text)
    monkeypatch.setattr(bpe, "_LONG", 0)
    assert np.array_equal(compiled.encode(text), own)


def test_a_lone_surrogate_is_refused_either_way(compiled, monkeypatch):
    for least in (1 << 20, 0):
        monkeypatch.setattr(bpe, "_LONG", least)
        with pytest.raises(UnicodeEncodeError):
            compiled.encode("ab \ud800")


@pytest.mark.parametrize("merges", [UNREACHED, TWICE])
def test_merges_that_tiktoken_would_read_otherwise_are_left_to_our_own(monkeypatch, merges):
    monkeypatch.setattr(bpe, "_LONG", 0)
    made = GPT2Tokenizer(merges)
    assert made._compiled is None
    assert [made.token(i) for i in made.encode("abc")] == (
        [b"a", b"bc"] if merges is UNREACHED else [b"abc"]
    )


def test_without_tiktoken_our_own_encodes(monkeypatch):
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    monkeypatch.setattr(bpe, "_LONG", 0)
    made = GPT2Tokenizer(MERGES)
    assert made._compiled is None
    assert made.decode(made.encode("lower the")) == "lower the"
