"""Texts, byte and character tokenizers, and token files."""

import bz2
import gzip
import json
import lzma
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynsparse.data.text import (
    ByteTokenizer,
    CharTokenizer,
    UnknownToken,
    is_token_file,
    make_tokenizer,
    open_tokens,
    read_stdlib,
    read_text,
    tokenizer_from_state,
    write_tokens,
)

TEXT = "Ein Hase, zwei Häsinnen.\r\nDrei?\n"


@pytest.mark.parametrize("pack", [bytes, gzip.compress, lzma.compress, bz2.compress])
def test_texts_are_read_unchanged(tmp_path, pack):
    (tmp_path / "text").write_bytes(pack(b"\xef\xbb\xbf" + TEXT.encode()))
    assert read_text(tmp_path / "text") == TEXT


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "expected text, got an empty file"),
        (b" \n\t", "expected text, got white space alone"),
        (b"ab\xffc", "expected text in UTF-8, got the byte 0xff at position 2"),
        (b"ab\0c", "got a binary file (a zero byte at position 2)"),
        (gzip.compress(b"abcdef", mtime=0)[:-4], "damaged stream"),
        (lzma.compress(b"abcdef")[:-4], "damaged stream"),
        (bz2.compress(b"abcdef")[:-4], "damaged stream"),
    ],
)
def test_invalid_texts_raise_one_line(tmp_path, content, message):
    (tmp_path / "text").write_bytes(content)
    with pytest.raises(ValueError, match=r"text: ") as error:
        read_text(tmp_path / "text")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_file_raises(tmp_path):
    with pytest.raises(OSError, match="No such file"):
        read_text(tmp_path / "text")


@pytest.mark.slow
def test_standard_library_text_is_deterministic():
    text = read_text("stdlib")
    assert text == read_stdlib()
    assert 3 << 20 < len(text.encode()) <= (4 << 20) + 1000
    assert "def " in text
    assert len(read_stdlib(100_000).encode()) <= 101_000
    assert text.startswith(read_stdlib(100_000))


def test_bytes():
    tokens = ByteTokenizer()
    assert tokens.encode("aä").tolist() == [97, 0xC3, 0xA4]
    assert tokens.decode(np.array([97, 0xC3, 0xA4, 0xC3])) == "aä\ufffd"
    assert tokens.encode("a").dtype == np.uint16


def test_character_ids_follow_code_points():
    tokens = CharTokenizer("banana z")
    assert tokens.characters == " abnz"
    assert tokens.encode("nab z").tolist() == [3, 1, 2, 0, 4]
    assert tokens.decode(np.array([3, 1, 2])) == "nab"


@pytest.mark.parametrize(("text", "sign"), [("ban9na", "'9' (U+0039) at position 3"),
                                            ("🙂", "'🙂' (U+1F642) at position 0"),
                                            ("b\ud800", "(U+D800) at position 1")])  # fmt: skip
def test_unknown_character_is_named_with_its_position(text, sign):
    with pytest.raises(UnknownToken) as error:
        CharTokenizer("banana").encode(text)
    assert sign in str(error.value)
    assert "not among the 3 of the vocabulary" in str(error.value)


@given(st.text(min_size=1))
def test_tokenizers_round_trip(text):
    text = text.encode(errors="ignore").decode() or "a"
    for kind in ("byte", "char"):
        tokens = make_tokenizer(kind, text)
        ids = tokens.encode(text)
        assert ids.max() < tokens.size
        assert tokens.decode(ids) == text
        again = tokenizer_from_state({**tokens.state(), "identity": tokens.identity})
        assert again.decode(ids) == text


def test_vocabularies_are_distinguished():
    assert CharTokenizer("ab").identity == CharTokenizer("baab").identity
    assert CharTokenizer("ab").identity != CharTokenizer("abc").identity
    with pytest.raises(ValueError, match="expected tokens among char, byte, bpe, got 'word'"):
        make_tokenizer("word", "a")
    with pytest.raises(ValueError, match="at least one character"):
        CharTokenizer("")


@pytest.fixture
def written(tmp_path):
    tokens = CharTokenizer(TEXT)
    path = tmp_path / "a.tokens"
    write_tokens(path, tokens.encode(TEXT), tokens, "a.txt")
    return path


def test_token_files_are_memory_mapped(written):
    opened = open_tokens(written)
    assert isinstance(opened.ids, np.memmap)
    assert not opened.ids.flags.writeable
    assert opened.ids.offset % 64 == 0
    assert opened.source == "a.txt"
    tokens = tokenizer_from_state(opened.vocabulary)
    assert tokens.decode(opened.ids) == TEXT
    assert opened.vocabulary["size"] == tokens.size
    opened.check_vocabulary(tokens.identity)
    assert is_token_file(written)
    assert not is_token_file(written.parent)
    assert [file.name for file in written.parent.iterdir()] == ["a.tokens"]


def test_tokens_of_another_vocabulary_raise(written):
    other = CharTokenizer("abc")
    with pytest.raises(ValueError, match="expected tokens of the vocabulary char") as error:
        open_tokens(written).check_vocabulary(other.identity)
    assert "encode the text again" in str(error.value)


def head_of(content: bytes) -> tuple[dict, int]:
    length = struct.unpack_from("<I", content, 20)[0]
    return json.loads(content[24 : 24 + length]), 24 + length


def test_damaged_token_files_raise_one_line(written, tmp_path):
    content = written.read_bytes()
    head, end = head_of(content)

    def with_head(changes: dict) -> bytes:
        text = json.dumps({**head, **changes}).encode()
        return content[:20] + struct.pack("<I", len(text)) + text + content[end:]

    damaged = {
        "expected a token file made by": b"something else",
        "truncated within its head": content[:40],
        "is truncated: expected": content[:-1],
        "is damaged: expected": content + b"\0",
        "expected token file version 1, got 7": content[:16] + b"\x07\0\0\0" + content[20:],
        "the head of the token file is damaged": content[:24] + b"x" * (end - 24) + content[end:],
        "expected ids below 18, got 255": content[:-2] + b"\xff\0",
    }
    assert head["vocabulary"]["size"] == 18
    for message, wrong in damaged.items():
        file = tmp_path / "wrong"
        file.write_bytes(wrong)
        with pytest.raises(ValueError, match=message) as error:
            open_tokens(file)
        assert str(file) in str(error.value)
        assert "\n" not in str(error.value)
    (tmp_path / "wrong").write_bytes(with_head({"dtype": "float32"}))
    with pytest.raises(ValueError, match="the head of the token file is damaged"):
        open_tokens(tmp_path / "wrong")


def test_failed_write_leaves_no_file(tmp_path):
    with pytest.raises(ValueError, match="at least one token"):
        write_tokens(tmp_path / "a", np.array([], np.uint16), ByteTokenizer(), "a")
    with pytest.raises(OSError, match="there is no folder"):
        write_tokens(tmp_path / "b" / "a", np.array([1], np.uint16), ByteTokenizer(), "a")
    assert list(tmp_path.iterdir()) == []
