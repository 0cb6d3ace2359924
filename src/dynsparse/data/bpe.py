"""GPT-2's byte pair encoding.

Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.2,
after Sennrich et al. 2016, "Neural Machine Translation of Rare Words with Subword Units". The file
vocab.bpe holds the merges in the order in which they were learned; token ids follow from it: first
the 256 bytes, then one token per merge, then <|endoftext|>.
"""

from __future__ import annotations

import hashlib
import heapq
from array import array
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dynsparse.data.compiled_bpe import compiled
from dynsparse.data.download import fetch
from dynsparse.data.vocabulary import id_type
from dynsparse.data.word_split import word_pattern
from dynsparse.files.cache import cache_folder
from dynsparse.files.json_text import parse_json
from dynsparse.files.limits import LimitError
from dynsparse.files.shorten import shortened

__all__ = ["END_OF_TEXT", "GPT2Tokenizer", "load_gpt2", "read_merges"]

END_OF_TEXT = "<|endoftext|>"
MERGES_FILE = "vocab.bpe"
IDS_FILE = "encoder.json"
URLS = (
    "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/",
    "https://openaipublic.blob.core.windows.net/gpt-2/models/124M/",
)
CHECKSUM = "sha256:1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"

_MOST_WORDS = 1 << 18
# Characters of a text from which on it pays to see whether tiktoken may encode it.
_LONG = 4 << 20
_GONE = -1


def _byte_symbols() -> list[str]:
    """The character that stands for each byte in the files.

    Printable characters of Latin-1 stand for themselves, the others get those from U+0100 on.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    symbols = {byte: chr(byte) for byte in plain}
    symbols |= {byte: chr(0x100 + place) for place, byte in enumerate(others)}
    return [symbols[byte] for byte in range(256)]


# Ids of single bytes go by their symbols: the printable ones come first.
_SYMBOLS = _byte_symbols()
_BYTES_BY_ID = sorted(range(256), key=lambda byte: _SYMBOLS[byte])


class GPT2Tokenizer:
    """Text to GPT-2's tokens and back.

    Args:
        merges: pairs of byte strings, in the order in which they were learned.
        size: how many tokens the vocabulary has; all when left out, at least 257. A smaller one
            uses the first merges alone, so every text still has its tokens, only more of them.
            <|endoftext|> is the last id of any size. In a text those characters are ordinary ones.

    Raises:
        ValueError: a merge of what is not yet a token, or a size out of range.
    """

    kind = "bpe"

    def __init__(self, merges: list[tuple[bytes, bytes]], size: int | None = None) -> None:
        largest = 256 + len(merges) + 1
        self.size = largest if size is None else size
        if not 257 <= self.size <= largest:
            raise ValueError(
                f"expected a vocabulary size between 257 and {largest}, got {self.size}"
            )
        merges = merges[: self.size - 257]
        self._tokens = [bytes([byte]) for byte in _BYTES_BY_ID]
        ids = {token: i for i, token in enumerate(self._tokens)}
        self._merged: dict[tuple[int, int], int] = {}
        for rank, (left, right) in enumerate(merges):
            if left not in ids or right not in ids:
                raise ValueError(
                    f"merge {rank + 1}: expected two tokens made before it, got "
                    f"{shortened(left)} and {shortened(right)}"
                )
            self._merged[ids[left], ids[right]] = len(self._tokens)
            # Two merges may make one token; the ids of the first hold in the pairs that follow.
            ids.setdefault(left + right, len(self._tokens))
            self._tokens.append(left + right)
        self._tokens.append(END_OF_TEXT.encode())
        self._byte_ids = [0] * 256
        for place, byte in enumerate(_BYTES_BY_ID):
            self._byte_ids[byte] = place
        self._words: dict[str, array[int]] = {}
        content = "\n".join(f"{left.hex()} {right.hex()}" for left, right in merges)
        self._identity = f"bpe:{hashlib.sha256(content.encode()).hexdigest()}"

    @property
    def identity(self) -> str:
        return self._identity

    def token(self, index: int) -> bytes:
        """The bytes of one id."""
        return self._tokens[index]

    def encode(self, text: str) -> np.ndarray:
        """See `Tokenizer.encode`. Long texts go through the package tiktoken, where it is there."""
        if len(text) >= _LONG and self._compiled is not None:
            text.encode()  # raises for a lone surrogate
            return self._compiled(text).astype(id_type(self.size))
        ids = array("i")
        words = self._words
        for match in word_pattern().finditer(text):
            word = match.group()
            found = words.get(word)
            if found is None:
                found = self._encode_word(word.encode())
                if len(words) < _MOST_WORDS:
                    words[word] = found
            ids.extend(found)
        return np.array(ids, id_type(self.size))

    @cached_property
    def _compiled(self) -> Callable[[str], np.ndarray] | None:
        return compiled(self._tokens[:-1], lambda token: len(self._encode_word(token)) == 1)

    def _encode_word(self, word: bytes) -> array[int]:
        """Merge the pair that was learned first, and again, until none is left.

        The candidates wait in a heap, so a word of n bytes takes O(n log n) steps.
        """
        ids = [self._byte_ids[byte] for byte in word]
        after = list(range(1, len(ids) + 1))
        before = list(range(-1, len(ids) - 1))
        heap: list[tuple[int, int, int, int]] = []

        def offer(left: int, right: int) -> None:
            if left >= 0 and right < len(ids):
                first, second = ids[left], ids[right]
                merged = self._merged.get((first, second))
                if merged is not None:
                    heapq.heappush(heap, (merged, left, first, second))

        for left in range(len(ids) - 1):
            offer(left, left + 1)
        while heap:
            merged, left, first, second = heapq.heappop(heap)
            right = after[left]
            if right >= len(ids) or (ids[left], ids[right]) != (first, second):
                continue  # one of the two has been merged since
            ids[left], ids[right] = merged, _GONE
            after[left] = after[right]
            if after[left] < len(ids):
                before[after[left]] = left
            offer(before[left], left)
            offer(left, after[left])
        return array("i", [i for i in ids if i != _GONE])

    def decode(self, ids: np.ndarray) -> str:
        return b"".join(self._tokens[i] for i in np.asarray(ids)).decode(errors="replace")

    def state(self) -> dict[str, Any]:
        return {"kind": self.kind, "size": self.size}


def load_gpt2(folder: Path | None = None, size: int | None = None) -> GPT2Tokenizer:
    """GPT-2's tokenizer from `folder`, or downloaded once into the user's cache folder.

    If the folder has an encoder.json, too, it must agree with the merges.

    Raises:
        ValueError: damaged files, a size out of range, a download with another checksum.
        OSError: no vocab.bpe in the folder, no connection.
    """
    if folder is None:
        path = fetch(URLS, MERGES_FILE, CHECKSUM, cache_folder() / "gpt2")
        return GPT2Tokenizer(read_merges(path), size)
    path = folder / MERGES_FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"--bpe-dir: expected a folder with {MERGES_FILE}, got {folder} without one: put "
            "GPT-2's file there, or leave --bpe-dir out to download it"
        )
    merges = read_merges(path)
    if (folder / IDS_FILE).is_file():
        _check_ids(folder / IDS_FILE, GPT2Tokenizer(merges))
    return GPT2Tokenizer(merges, size)


def read_merges(path: Path) -> list[tuple[bytes, bytes]]:
    """The pairs of a file such as vocab.bpe: a line each, apart from a heading "#version".

    Raises:
        ValueError: a line that is not two tokens, in one line with its number.
        OSError: a file that cannot be read.
    """
    byte_of = {symbol: byte for byte, symbol in enumerate(_SYMBOLS)}
    merges = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError:
        raise ValueError(f"{path}: expected GPT-2's merges in UTF-8, got a binary file") from None
    for number, line in enumerate(lines, start=1):
        if not line or (number == 1 and line.startswith("#version")):
            continue
        pair = line.split(" ")
        if len(pair) != 2 or not all(pair) or any(s not in byte_of for s in "".join(pair)):
            raise ValueError(
                f"{path}, line {number}: expected two tokens with a space between them, got "
                f"{line[:40]!r}"
            )
        left, right = (bytes(byte_of[symbol] for symbol in token) for token in pair)
        merges.append((left, right))
    if not merges:
        raise ValueError(f"{path}: expected GPT-2's merges, got none")
    return merges


def _check_ids(path: Path, tokenizer: GPT2Tokenizer) -> None:
    try:
        ids = parse_json(path.read_bytes())
        count = len(ids)
        wrong = [
            symbols
            for symbols, i in ids.items()
            if not 0 <= i < tokenizer.size or _symbols(tokenizer.token(i)) != symbols
            if symbols != END_OF_TEXT or i != tokenizer.size - 1
        ]
    except LimitError as error:
        raise ValueError(f"{path}: {error}") from None
    except (ValueError, AttributeError, TypeError):
        raise ValueError(f"{path}: expected a JSON object of tokens and ids") from None
    if wrong or count != tokenizer.size:
        what = f"the token {shortened(wrong[0])}" if wrong else f"{count} tokens"
        raise ValueError(
            f"{path}: expected the {tokenizer.size} ids that {MERGES_FILE} gives, got {what}: the "
            "two files belong to different vocabularies"
        )


def _symbols(token: bytes) -> str:
    return "".join(_SYMBOLS[byte] for byte in token)
