"""Token files: ids prepared once and read by memory map, with the vocabulary they belong to.

Layout: 16 bytes of magic; little-endian the version (uint32) and the length of the head (uint32);
the head, JSON padded by spaces so that the ids start at a multiple of 64 bytes; the ids themselves,
little-endian. The head's entries: "dtype" ("uint16" or "int32"), "count", "vocabulary" (what
`tokenizer_from_state` reads, with "identity" and "size") and "source", a name for people.
"""

from __future__ import annotations

import json
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from dynsparse.data.vocabulary import Tokenizer, check_vocabulary, id_type
from dynsparse.files.json_text import parse_json
from dynsparse.files.limits import LimitError
from dynsparse.files.whole import write_whole

MAGIC = b"dynsparse\x00token\n"
VERSION = 1
_START = struct.Struct("<16sII")
_ALIGNMENT = 64


@dataclass(frozen=True)
class TokenFile:
    """What `open_tokens` gives: `ids` [count], mapped read-only, and the head's entries."""

    path: Path
    ids: np.ndarray
    vocabulary: dict[str, Any]
    source: str

    def check_vocabulary(self, identity: str) -> None:
        """Raise ValueError unless the ids are of the vocabulary `identity`."""
        own = self.vocabulary["identity"]
        if own != identity:
            raise ValueError(
                f"{self.path}: expected tokens of the vocabulary {_short(identity)}, got tokens of "
                f"{_short(own)}: encode the text again with that vocabulary"
            )


def vocabulary_of(tokenizer: Tokenizer) -> dict[str, Any]:
    """The head's entry for the vocabulary of `tokenizer`; checkpoints keep the same."""
    return {**tokenizer.state(), "size": tokenizer.size, "identity": tokenizer.identity}


def write_tokens(path: Path, ids: np.ndarray, tokenizer: Tokenizer, source: str) -> None:
    """Write `ids` [count] to `path`, whole or not at all.

    Raises:
        ValueError: no ids.
        OSError: the folder is missing or cannot be written.
    """
    if not len(ids):
        raise ValueError(f"{path}: expected at least one token to write, got none")
    dtype = np.dtype(id_type(tokenizer.size)).newbyteorder("<")
    head = {
        "dtype": dtype.name,
        "count": len(ids),
        "vocabulary": vocabulary_of(tokenizer),
        "source": source,
    }
    text = json.dumps(head).encode()
    text += b" " * (-(_START.size + len(text)) % _ALIGNMENT)

    def write(file: BinaryIO) -> None:
        file.write(_START.pack(MAGIC, VERSION, len(text)))
        file.write(text)
        file.write(np.ascontiguousarray(ids, dtype).data)

    write_whole(path, write)


def is_token_file(path: Path) -> bool:
    """Whether `path` is a file that begins as token files do."""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def open_tokens(path: Path) -> TokenFile:
    """Map the ids of a token file.

    Raises:
        ValueError: not a token file, another format version, truncated or damaged.
        OSError: a file that cannot be read.
    """
    with open(path, "rb") as file:
        start = file.read(_START.size)
        if start[: len(MAGIC)] != MAGIC:
            raise ValueError(f"{path}: expected a token file made by `dynsparse encode`")
        if len(start) < _START.size:
            raise ValueError(f"{path}: the token file is truncated within its head: encode again")
        _, version, length = _START.unpack(start)
        if version != VERSION:
            raise ValueError(
                f"{path}: expected token file version {VERSION}, got {version}: encode again"
            )
        size = os.fstat(file.fileno()).st_size
        if size < _START.size + length:
            raise ValueError(f"{path}: the token file is truncated within its head: encode again")
        text = file.read(length)
    try:
        dtype, count, vocabulary, source = _read_head(text)
    except LimitError as error:
        raise ValueError(f"{path}: the head of the token file: {error}") from None
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path}: the head of the token file is damaged: encode again") from None
    expected = _START.size + length + count * dtype.itemsize
    if size != expected:
        what = "truncated" if size < expected else "damaged"
        raise ValueError(
            f"{path}: the token file is {what}: expected {expected:,} bytes for {count:,} tokens, "
            f"got {size:,}: encode again"
        )
    most = vocabulary["size"]
    ids = np.memmap(path, dtype, "r", offset=_START.size + length, shape=(count,))
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= most:
        wrong = low if low < 0 else high
        raise ValueError(
            f"{path}: the token file is damaged: expected ids below {most}, got {wrong}: encode "
            "again"
        )
    return TokenFile(Path(path), ids, vocabulary, source)


def _read_head(text: bytes) -> tuple[np.dtype[Any], int, dict[str, Any], str]:
    """The type and number of the ids, their vocabulary and source; each of the right type."""
    head = parse_json(text)
    dtype = np.dtype({"uint16": "<u2", "int32": "<i4"}[head["dtype"]])
    count, vocabulary, source = head["count"], head["vocabulary"], head["source"]
    check_vocabulary(vocabulary)
    vocabulary["size"], vocabulary["identity"]
    if type(count) is not int or not 0 < count < 1 << 62 or not isinstance(source, str):
        raise ValueError
    return dtype, count, vocabulary, source


def _short(identity: str) -> str:
    kind, _, digest = identity.partition(":")
    return f"{kind} {digest[:12]}" if digest else kind
