"""Token files, raw or with any header of valid length."""

from __future__ import annotations

import json
import struct

import numpy as np

from dynsparse.data.text import (
    MAGIC,
    ByteTokenizer,
    CharTokenizer,
    is_token_file,
    open_tokens,
    tokenizer_from_state,
    write_tokens,
)
from targets.common import folder, refused_as

_WAYS = 2
_END = b"|ids|"


def _seeds() -> list[bytes]:
    found = []
    file = folder() / "seed"
    for tokenizer in (ByteTokenizer(), CharTokenizer("ab日 ")):
        write_tokens(file, tokenizer.encode("ab b"), tokenizer, "a.txt")
        content = file.read_bytes()
        length = struct.unpack_from("<I", content, 20)[0]
        head, ids = content[24 : 24 + length].rstrip(), content[24 + length :]
        found += [b"\0" + content, b"\1" + head + _END + ids]
    head = json.loads(head)
    state = {"kind": "bpe", "size": 257, "identity": "bpe:"}
    text = json.dumps({**head, "vocabulary": state, "dtype": "int32"}).encode()
    return [*found, b"\1" + text + _END + bytes(16)]


SEEDS = _seeds()


def run(data: bytes) -> None:
    way, content = data[0] % _WAYS if data else 0, data[1:]
    if way:
        head, _, ids = content.partition(_END)
        content = MAGIC + struct.pack("<II", 1, len(head)) + head + ids
    place = folder()
    file = place / "tokens"
    file.write_bytes(content)
    (place / "vocab.bpe").write_text("a b\nab c\n")
    is_token_file(file)
    with refused_as(ValueError):
        opened = open_tokens(file)
        assert opened.ids.nbytes <= len(content)
        assert opened.source is not None
        tokenizer = tokenizer_from_state(opened.vocabulary, place)
        opened.check_vocabulary(tokenizer.identity)
        tokenizer.decode(np.asarray(opened.ids[:50]))
