"""Small files that would exhaust memory or the stack raise a one-line error."""

import bz2
import gzip
import json
import lzma
import struct
import time
import tracemalloc

import numpy as np
import pytest

from dynsparse._core.files.limits import VARIABLE
from dynsparse.data import read_idx
from dynsparse.data.text import (
    CharTokenizer,
    GPT2Tokenizer,
    open_tokens,
    read_text,
    tokenizer_from_state,
    write_tokens,
)

MIB = 1 << 20


def refused(read, match: str, most: int = 48 * MIB) -> str:
    """Return the message of the ValueError of `read`, which may take at most `most` bytes."""
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=match) as error:
            read()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < most
    message = str(error.value)
    assert len(message) < 1000
    assert "\n" not in message
    return message


PACK = {"gz": gzip.compress, "xz": lzma.compress, "bz2": bz2.compress}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", PACK)
def test_text_with_extreme_compression(tmp_path, monkeypatch, kind):
    file = tmp_path / "text"
    content = b"a\n" * (6 * MIB)
    file.write_bytes(PACK[kind](content))
    assert file.stat().st_size < MIB
    monkeypatch.setenv(VARIABLE, str(MIB))
    expected = "expected it to unpack to at most 1,048,576 bytes"
    # xz keeps the last 8 MiB, whatever it has given out.
    message = refused(lambda: read_text(file), expected, 16 * MIB)
    assert VARIABLE in message
    assert str(file) in message
    monkeypatch.setenv(VARIABLE, str(len(content)))
    assert read_text(file) == content.decode()


def test_default_limit_is_256_mib(tmp_path):
    file = tmp_path / "text"
    file.write_bytes(gzip.compress(bytes(257 * MIB), 1))
    with pytest.raises(ValueError, match="at most 268,435,456 bytes, got more"):
        read_text(file)


@pytest.mark.parametrize("kind", PACK)
def test_many_short_streams_take_linear_time(tmp_path, kind):
    one = PACK[kind](b"hello ")
    file = tmp_path / "text"
    times = []
    for count in (2_000, 32_000):
        file.write_bytes(one * count)
        begin = time.process_time()
        assert read_text(file) == "hello " * count
        times.append(time.process_time() - begin)
    assert times[1] < 100 * times[0] + 1  # 16 times the streams; the square would be 256


def test_idx_header_larger_than_the_file(tmp_path, monkeypatch):
    header = struct.pack(">HBB3I", 0, 8, 3, 60_000, 28, 28)
    file = tmp_path / "images.gz"
    file.write_bytes(gzip.compress(header + bytes(60_000 * 28 * 28)))
    assert read_idx(file, 3).shape == (60_000, 28, 28)
    monkeypatch.setenv(VARIABLE, str(8 * MIB))
    refused(lambda: read_idx(file, 3), "expected it to unpack to at most 8,388,608 bytes")


def tokens_with(head: object, ids: bytes = b"\0\0") -> bytes:
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    return b"dynsparse\0token\n" + struct.pack("<II", 1, len(text)) + text + ids


VOCABULARY = {"kind": "byte", "size": 256, "identity": "byte"}
HEAD = {"dtype": "uint16", "count": 1, "vocabulary": VOCABULARY, "source": "s"}


def test_header_longer_than_the_file_allocates_nothing(tmp_path):
    file = tmp_path / "tokens"
    file.write_bytes(b"dynsparse\0token\n" + struct.pack("<II", 1, 0xFFFFFFFF) + b"{}")
    refused(lambda: open_tokens(file), "truncated within its head")
    file.write_bytes(tokens_with(b"[" * 200_000))
    refused(lambda: open_tokens(file), "nested at most 100 deep")


@pytest.mark.parametrize(
    "changes",
    [
        {"count": None}, {"count": -1}, {"count": 0}, {"count": True}, {"count": 1.0},
        {"count": 10**4200}, {"source": 3}, {"dtype": ["uint16"]}, {"vocabulary": []},
        {"vocabulary": {**VOCABULARY, "size": [1]}}, {"vocabulary": {**VOCABULARY, "size": 0}},
        {"vocabulary": {**VOCABULARY, "size": 2**40}}, {"vocabulary": {**VOCABULARY, "size": True}},
        {"vocabulary": {**VOCABULARY, "identity": 3}}, {"vocabulary": {**VOCABULARY, "kind": []}},
        {"vocabulary": {**VOCABULARY, "kind": "word"}},
        {"vocabulary": {**VOCABULARY, "characters": "\ud800"}},
        {"vocabulary": {**VOCABULARY, "characters": 5}}, {"vocabulary": {"kind": "byte"}},
    ],
)  # fmt: skip
def test_header_with_wrong_types(tmp_path, changes):
    file = tmp_path / "tokens"
    file.write_bytes(tokens_with(HEAD))
    assert open_tokens(file).ids.tolist() == [0]
    file.write_bytes(tokens_with({**HEAD, **changes}))
    refused(lambda: open_tokens(file), "the head of the token file is damaged")


def test_vocabulary_larger_than_its_characters(tmp_path):
    tokens = CharTokenizer("abc")
    state = {**tokens.state(), "identity": tokens.identity, "size": 3}
    assert tokenizer_from_state(state).size == 3
    refused(lambda: tokenizer_from_state({**state, "size": 4}), "of 3 char tokens, got the size 4")
    refused(lambda: tokenizer_from_state(["char"]), r"expected a vocabulary, got \['char'\]")
    refused(lambda: tokenizer_from_state({"kind": "x" * 10**6}), "among char, byte, bpe, got 'xxx")


def test_long_tokens_are_shortened_in_errors():
    pytest.importorskip("tokenizers")
    refused(lambda: GPT2Tokenizer([("x" * 10**6, "y")]), "merge 1: expected two tokens")


def test_token_files_are_synced(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr("os.fsync", synced.append)
    write_tokens(tmp_path / "a", np.array([1], np.uint16), CharTokenizer("ab"), "a")
    assert len(synced) == 2  # the file and its folder
