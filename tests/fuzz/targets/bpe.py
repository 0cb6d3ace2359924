"""GPT-2's files: the merges, and beside them the ids."""

from __future__ import annotations

import json

from dynsparse.data.bpe import GPT2Tokenizer, load_gpt2
from targets.common import folder, refused_as

_END = b"|ids|"
_MERGES = "#version: 0.2\nl o\nlo w\ne r\nĠ t\nĠt h\n".encode()
_PAIRS = [(b"l", b"o"), (b"lo", b"w"), (b"e", b"r"), (b" ", b"t"), (b" t", b"h")]
_TEXT = "the lower slow Häsin 日本 \x00 ' s't"


def _ids() -> bytes:
    made = GPT2Tokenizer(_PAIRS)
    # The symbols of the files, from merging one token with the next and reading the message.
    from dynsparse.data import bpe

    return json.dumps({bpe._symbols(made.token(i)): i for i in range(made.size)}).encode()


SEEDS = [_MERGES, b"a b\nab ab\nabab c\n", _MERGES + _END + _ids(), _MERGES + _END + b'{"!": 0}']


def run(data: bytes) -> None:
    merges, end, ids = data.partition(_END)
    place = folder() / "bpe"
    place.mkdir(exist_ok=True)
    (place / "vocab.bpe").write_bytes(merges)
    (place / "encoder.json").unlink(missing_ok=True)
    if end:
        (place / "encoder.json").write_bytes(ids)
    with refused_as(ValueError):
        tokenizer = load_gpt2(place)
        assert tokenizer.decode(tokenizer.encode(_TEXT)) == _TEXT
        small = load_gpt2(place, 257)
        assert small.decode(small.encode(_TEXT)) == _TEXT
