"""GPT-2's byte pair encoding: merges by hand, a slow oracle, and the real files where they are."""

import functools
import hashlib
import http.server
import json
import re
import threading
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynsparse.data import bpe
from dynsparse.data.bpe import END_OF_TEXT, GPT2Tokenizer, load_gpt2, read_merges
from dynsparse.data.tokenizer import make_tokenizer, tokenizer_from_state
from dynsparse.data.word_split import word_pattern

REAL = Path(__file__).resolve().parents[3] / "shared" / "data"
needs_files = pytest.mark.skipif(
    not (REAL / "gpt2-bpe").is_dir(), reason="GPT-2's files are not there"
)

# lo, low, er, " t", " th", "ab", "abab"
MERGES = [
    (b"l", b"o"), (b"lo", b"w"), (b"e", b"r"), (b" ", b"t"), (b" t", b"h"), (b"a", b"b"),
    (b"ab", b"ab"),
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


def test_bytes_that_no_merge_joins_stay_alone_and_come_back(small):
    text = "naïve 日本 \x00\x1c🙂"
    ids = small.encode(text)
    assert small.decode(ids) == text
    assert small.decode(ids[:-1]).endswith("\ufffd")
    assert small.token(small.size - 1) == END_OF_TEXT.encode()
    assert small.decode(np.array([small.size - 1])) == END_OF_TEXT
    assert small.size - 1 not in small.encode(END_OF_TEXT)


def test_a_smaller_vocabulary_uses_the_first_merges():
    cut = GPT2Tokenizer(MERGES, 256 + 2 + 1)
    assert cut.encode("lower").tolist() == [FIRST + 1, byte_id("e"), byte_id("r")]
    assert cut.encode("lower").max() < cut.size
    assert cut.identity != GPT2Tokenizer(MERGES).identity
    assert cut.identity == GPT2Tokenizer(MERGES[:2]).identity
    for size in (256, 256 + len(MERGES) + 2):
        with pytest.raises(ValueError, match=f"between 257 and 264, got {size}"):
            GPT2Tokenizer(MERGES, size)


def slow_words(text: str) -> list[str]:
    """GPT-2's pattern, alternative by alternative, with a predicate for each class."""

    def is_space(c: str) -> bool:
        return c.isspace() and c not in "\x1c\x1d\x1e\x1f"

    def letter(c: str) -> bool:
        return unicodedata.category(c)[0] == "L"

    def number(c: str) -> bool:
        return unicodedata.category(c)[0] == "N"

    def other(c: str) -> bool:
        return not (is_space(c) or letter(c) or number(c))

    words, at = [], 0
    while at < len(text):
        end = at
        for ending in ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d"):
            if text.startswith(ending, at):
                end = at + len(ending)
                break
        if end == at:
            for kind in (letter, number, other):
                begin = at + (text[at] == " ")
                end = begin
                while end < len(text) and kind(text[end]):
                    end += 1
                if end > begin:
                    break
                end = at
        if end == at:  # white space, without the last of it where a word follows
            while end < len(text) and is_space(text[end]):
                end += 1
            if end < len(text) and end - at > 1:
                end -= 1
        words.append(text[at:end])
        at = end
    return words


SIGNS = "ab'stl rev d9²½,.!\n\t\r\x1c\x85\xa0\u2003日á\u0301ªⅧ🙂_"


@given(st.text(SIGNS) | st.text())
def test_words_are_cut_as_the_pattern_says(text):
    words = word_pattern().findall(text)
    assert "".join(words) == text
    assert words == slow_words(text)


def slow_encode(word: bytes) -> list[bytes]:
    parts = [bytes([byte]) for byte in word]
    for pair in MERGES:
        at = 0
        while at < len(parts) - 1:
            if (parts[at], parts[at + 1]) == pair:
                parts[at : at + 2] = [pair[0] + pair[1]]
            at += 1
    return parts


@given(st.text("abelorwth ", max_size=60))
def test_merging_equals_applying_each_merge_in_turn(small, text):
    expected = [
        part for word in word_pattern().findall(text) for part in slow_encode(word.encode())
    ]
    assert [small.token(i) for i in small.encode(text)] == expected


@given(st.text())
def test_every_text_comes_back(small, text):
    text = text.encode(errors="ignore").decode()
    assert small.decode(small.encode(text)) == text


def test_a_very_long_word_takes_no_square_of_its_length(small):
    assert len(small.encode("ab" * 50_000)) == 25_000


def test_files_are_read_and_checked(tmp_path, small):
    (tmp_path / "vocab.bpe").write_text(TEXT)
    assert read_merges(tmp_path / "vocab.bpe") == MERGES
    assert load_gpt2(tmp_path).identity == small.identity
    ids = {bpe._symbols(small.token(i)): i for i in range(small.size)}
    (tmp_path / "encoder.json").write_text(json.dumps(ids))
    assert load_gpt2(tmp_path, 260).size == 260
    for wrong, message in (
        (dict(ids, low=FIRST), "got the token 'low': the two files belong"),
        ({k: v for k, v in ids.items() if k != "low"}, "got 263 tokens"),
        ([1, 2], "expected a JSON object"),
    ):
        (tmp_path / "encoder.json").write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match=re.escape(message)):
            load_gpt2(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "expected GPT-2's merges, got none"),
        (
            b"#version\nl o\nlow\n",
            "line 3: expected two tokens with a space between them, got 'low'",
        ),
        (b"l o x\n", "line 1: expected two tokens"),
        ("l 日\n".encode(), "line 1: expected two tokens"),
        (b"\xff\xfe", "in UTF-8, got a binary file"),
    ],
)
def test_damaged_files_get_one_line(tmp_path, content, message):
    (tmp_path / "vocab.bpe").write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        load_gpt2(tmp_path)
    assert "\n" not in str(error.value)


def test_a_merge_of_unknown_tokens_is_refused():
    with pytest.raises(ValueError, match="merge 2: expected two tokens made before it"):
        GPT2Tokenizer([(b"a", b"b"), (b"low", b"er")])


def test_a_folder_without_the_file_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"--bpe-dir: expected a folder with vocab\.bpe"):
        load_gpt2(tmp_path)


def test_the_file_is_downloaded_once_and_checked(tmp_path, monkeypatch, small):
    monkeypatch.setenv("DYNSPARSE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(bpe, "CHECKSUM", f"sha256:{hashlib.sha256(TEXT.encode()).hexdigest()}")
    monkeypatch.setattr(bpe, "URLS", ("http://127.0.0.1:9/",))
    with pytest.raises(OSError, match=r"cannot download vocab\.bpe") as error:
        make_tokenizer("bpe", "")
    assert "\n" not in str(error.value)
    (tmp_path / "cache" / "gpt2").mkdir(parents=True, exist_ok=True)
    (tmp_path / "cache" / "gpt2" / "vocab.bpe").write_text(TEXT)
    made = make_tokenizer("bpe", "")
    assert made.identity == small.identity
    again = tokenizer_from_state({**made.state(), "identity": made.identity})
    assert again.encode("lower").tolist() == small.encode("lower").tolist()
    with pytest.raises(ValueError, match="name the folder of the right ones"):
        tokenizer_from_state({"kind": "bpe", "size": 260, "identity": small.identity})


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


def test_a_server_gives_the_file_once(tmp_path, monkeypatch, small):
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "vocab.bpe").write_text(TEXT)
    handler = functools.partial(_Quiet, directory=str(tmp_path / "served"))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("DYNSPARSE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(bpe, "URLS", (f"http://127.0.0.1:{server.server_port}/",))
    try:
        with pytest.raises(ValueError, match="expected the checksum sha256:1ce1664773c5"):
            load_gpt2()
        digest = hashlib.sha256(TEXT.encode()).hexdigest()
        monkeypatch.setattr(bpe, "CHECKSUM", f"sha256:{digest}")
        assert load_gpt2().identity == small.identity
    finally:
        server.shutdown()
        server.server_close()
    assert load_gpt2(size=260).size == 260  # no server is needed any more


@needs_files
def test_the_checksum_is_that_of_the_real_file():
    content = (REAL / "gpt2-bpe" / "vocab.bpe").read_bytes()
    assert f"sha256:{hashlib.sha256(content).hexdigest()}" == bpe.CHECKSUM


@needs_files
def test_the_real_vocabulary():
    real = load_gpt2(REAL / "gpt2-bpe")
    assert real.size == 50257
    # ids that GPT-2's own files give: token by token in encoder.json
    ids = json.loads((REAL / "gpt2-bpe" / "encoder.json").read_text())
    for text, tokens in {
        "Hello world": ["Hello", "Ġworld"],
        "The quick brown fox": ["The", "Ġquick", "Ġbrown", "Ġfox"],
        "it's 2019\n\nok": ["it", "'s", "Ġ2019", "Ċ", "Ċ", "ok"],
    }.items():
        assert real.encode(text).tolist() == [ids[token] for token in tokens]
    assert real.encode("Hello world").tolist() == [15496, 995]
    assert real.decode(np.array([50256])) == END_OF_TEXT


@needs_files
def test_tinyshakespeare_has_as_many_tokens_as_others_count():
    text = (REAL / "tinyshakespeare" / "input.txt").read_text()
    real = load_gpt2(REAL / "gpt2-bpe")
    ids = real.encode(text)
    assert len(ids) == 338_025  # 301,966 + 36,059 of nanoGPT's preparation
    assert real.decode(ids) == text


@needs_files
def test_tiktoken_gives_the_real_tokens(monkeypatch):
    pytest.importorskip("tiktoken")
    text = (REAL / "tinyshakespeare" / "input.txt").read_text()[:300_000]
    text += "naïve \x1c\x85日本 🙂 it's 2019²  \n\n\tok" + " " * 5000
    real = load_gpt2(REAL / "gpt2-bpe")
    own = real.encode(text)
    monkeypatch.setattr(bpe, "_LONG", 1)
    assert real._compiled is not None
    assert np.array_equal(real.encode(text), own)
