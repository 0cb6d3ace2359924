"""Texts, plain or compressed by gzip, xz and bzip2, in one or several streams."""

from __future__ import annotations

import bz2
import gzip
import lzma

from dynsparse.data.text import make_tokenizer, read_text
from targets.common import folder, refused_as

_TEXT = "Ein Hase, zwei Häsinnen.\r\nDrei? 日本\n".encode()
_PACK = [
    bytes,
    lambda content: gzip.compress(content, 1, mtime=0),
    lambda content: lzma.compress(content, preset=0),
    bz2.compress,
]
_WAYS = 8

SEEDS = [
    *(bytes([way]) + _TEXT for way in range(_WAYS)),
    *(b"\0" + pack(_TEXT) for pack in _PACK[1:]),
    b"\0" + gzip.compress(_TEXT, mtime=0) + gzip.compress(_TEXT, mtime=0) + b"\0\0",
    b"\0" + lzma.compress(_TEXT, format=lzma.FORMAT_ALONE),
    b"\1" + lzma.compress(_TEXT),
    b"\0\xef\xbb\xbf" + _TEXT,
]


def run(data: bytes) -> None:
    way, content = data[0] % _WAYS if data else 0, data[1:]
    pack = _PACK[way % 4]
    if way < 4:
        packed = pack(content)
    else:
        middle = len(content) // 2
        packed = pack(content[:middle]) + pack(content[middle:])
    file = folder() / "text"
    file.write_bytes(packed)
    with refused_as(ValueError):
        text = read_text(file)
        for kind in ("byte", "char"):
            tokenizer = make_tokenizer(kind, text)
            assert tokenizer.decode(tokenizer.encode(text)) == text
