"""GPT-2's byte pair encoding, with hand-made merges."""

import functools
import hashlib
import http.server
import re
import sys
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynsparse.data import text as text_module
from dynsparse.data.text import (
    END_OF_TEXT,
    GPT2Tokenizer,
    load_gpt2,
    make_tokenizer,
    read_merges,
    tokenizer_from_state,
)

pytest.importorskip("tokenizers")

# lo, low, er, " t", " th", "ab", "abab"
MERGES = [
    ("l", "o"), ("lo", "w"), ("e", "r"), ("Ġ", "t"), ("Ġt", "h"), ("a", "b"), ("ab", "ab"),
]  # fmt: skip
FIRST = 256
TEXT = "#version: 0.2\nl o\nlo w\ne r\nĠ t\nĠt h\na b\nab ab\n"


@pytest.fixture(scope="module")
def small():
    return GPT2Tokenizer(MERGES)


def byte_id(symbol: str) -> int:
    """Ids of printable ASCII: "!" is 0, as in GPT-2's encoder.json."""
    return ord(symbol) - 0x21


def test_merges_by_hand(small):
    assert small.size == 256 + 7 + 1
    assert small.encode("lower").tolist() == [FIRST + 1, FIRST + 2]
    assert small.encode("low").tolist() == [FIRST + 1]
    assert small.encode("slo the").tolist() == [byte_id("s"), FIRST, FIRST + 4, byte_id("e")]
    assert small.encode("ababab").tolist() == [FIRST + 6, FIRST + 5]
    assert small.encode("").tolist() == []
    # The space is the byte 0x20, whose symbol is U+0120: after 94 + 12 + 82 printable ones and
    # the 32 control bytes that come before it.
    assert small.encode(" ").tolist() == [188 + 32]
    assert small.encode("lower").dtype == np.uint16


def test_unmerged_bytes_round_trip(small):
    text = "naïve 日本 \x00\x1c🙂"
    ids = small.encode(text)
    assert small.decode(ids) == text
    assert small.decode(ids[:-1]).endswith("\ufffd")
    assert small.decode(np.array([small.size - 1])) == END_OF_TEXT
    assert small.size - 1 not in small.encode(END_OF_TEXT)


def test_smaller_vocabulary_uses_the_first_merges():
    cut = GPT2Tokenizer(MERGES, 256 + 2 + 1)
    assert cut.encode("lower").tolist() == [FIRST + 1, byte_id("e"), byte_id("r")]
    assert cut.encode("lower").max() < cut.size
    assert cut.identity != GPT2Tokenizer(MERGES).identity
    assert cut.identity == GPT2Tokenizer(MERGES[:2]).identity
    for size in (256, 256 + len(MERGES) + 2):
        with pytest.raises(ValueError, match=f"between 257 and 264, got {size}"):
            GPT2Tokenizer(MERGES, size)


@given(st.text())
def test_round_trip(small, text):
    text = text.encode(errors="ignore").decode()
    assert small.decode(small.encode(text)) == text


def test_a_very_long_word(small):
    assert len(small.encode("ab" * 50_000)) == 25_000


def test_files_are_read_and_checked(tmp_path, small):
    (tmp_path / "vocab.bpe").write_text(TEXT)
    assert read_merges(tmp_path / "vocab.bpe") == MERGES
    assert load_gpt2(tmp_path).identity == small.identity
    assert load_gpt2(tmp_path, 260).size == 260


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "expected GPT-2's merges, got none"),
        (
            b"#version\nl o\nlow\n",
            "line 3: expected two tokens with a space between them, got 'low'",
        ),
        (b"l o x\n", "line 1: expected two tokens"),
        ("l 日\n".encode(), "merge 1: expected two tokens made before it, got 'l' and '日'"),
        (b"\xff\xfe", "in UTF-8, got a binary file"),
    ],
)
def test_damaged_files_raise_one_line(tmp_path, content, message):
    (tmp_path / "vocab.bpe").write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        load_gpt2(tmp_path)
    assert "\n" not in str(error.value)


def test_merge_of_unknown_tokens_raises():
    with pytest.raises(ValueError, match="merge 2: expected two tokens made before it"):
        GPT2Tokenizer([("a", "b"), ("low", "er")])


def test_folder_without_the_file_raises(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"--bpe-dir: expected a folder with vocab\.bpe"):
        load_gpt2(tmp_path)


def test_files_identify_the_vocabulary(tmp_path, small):
    (tmp_path / "vocab.bpe").write_text(TEXT)
    made = make_tokenizer("bpe", "", tmp_path)
    again = tokenizer_from_state({**made.state(), "identity": made.identity}, tmp_path)
    assert again.encode("lower").tolist() == small.encode("lower").tolist()
    with pytest.raises(ValueError, match="name the folder of the right ones"):
        tokenizer_from_state({"kind": "bpe", "size": 260, "identity": small.identity}, tmp_path)


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def test_file_is_downloaded_once(tmp_path, monkeypatch, small):
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "vocab.bpe").write_text(TEXT)
    handler = functools.partial(_Quiet, directory=str(tmp_path / "served"))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("DYNSPARSE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(text_module, "GPT2_URLS", (f"http://127.0.0.1:{server.server_port}/",))
    try:
        with pytest.raises(ValueError, match="expected the checksum sha256:1ce1664773c5"):
            load_gpt2()
        digest = hashlib.sha256(TEXT.encode()).hexdigest()
        monkeypatch.setattr(text_module, "GPT2_CHECKSUM", f"sha256:{digest}")
        assert load_gpt2().identity == small.identity
    finally:
        server.shutdown()
        server.server_close()
    assert load_gpt2(size=260).size == 260  # no server is needed any more


@given(st.text("ab \n\t'sl!\x1c\u2003é", max_size=60))
def test_text_in_parts_has_the_same_tokens(small, text):
    whole = small.encode(text).tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_module, "_PIECE", 1)
        assert small.encode(text).tolist() == whole


def test_lone_surrogate_raises(small):
    with pytest.raises(UnicodeEncodeError):
        small.encode("ab \ud800")


def test_two_merges_may_give_the_same_token():
    made = GPT2Tokenizer([("a", "b"), ("b", "c"), ("ab", "c"), ("a", "bc")])
    assert made.encode("abc").tolist() == [FIRST + 2]
    assert made.decode(np.array([FIRST + 2])) == "abc"
    assert made.size == 256 + 4 + 1


def test_missing_package_names_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ModuleNotFoundError, match="or use --tokens byte"):
        GPT2Tokenizer(MERGES)
