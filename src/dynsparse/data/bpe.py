"""GPT-2's byte pair encoding, by the package tokenizers.

Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.2,
after Sennrich et al. 2016, "Neural Machine Translation of Rare Words with Subword Units". The file
vocab.bpe holds the merges in the order in which they were learned; token ids follow from it: first
the 256 bytes, then one token per merge, then <|endoftext|>.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dynsparse.data.download import fetch
from dynsparse.data.vocabulary import id_type
from dynsparse.files.cache import cache_folder
from dynsparse.files.shorten import shortened

END_OF_TEXT = "<|endoftext|>"
MERGES_FILE = "vocab.bpe"
URLS = (
    "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/",
    "https://openaipublic.blob.core.windows.net/gpt-2/models/124M/",
)
CHECKSUM = "sha256:1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"

# Characters that are encoded at a time. No token goes over a space or a line's end behind something
# that is no white space, so texts are cut there.
_PIECE = 1 << 20
_CUT = re.compile(r"(?<=\S)[ \n]")


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
_BYTE_OF = {symbol: byte for byte, symbol in enumerate(_SYMBOLS)}
_BYTES_BY_ID = sorted(range(256), key=lambda byte: _SYMBOLS[byte])


class GPT2Tokenizer:
    """Text to GPT-2's tokens and back.

    Args:
        merges: pairs of tokens by the symbols of their bytes, as `read_merges` gives them.
        size: how many tokens the vocabulary has; all when left out, at least 257. A smaller one
            uses the first merges alone, so every text still has its tokens, only more of them.
            <|endoftext|> is the last id of any size. In a text those characters are ordinary ones.

    Raises:
        ModuleNotFoundError: the package tokenizers is not installed.
        ValueError: a merge of what is not yet a token, or a size out of range.
    """

    kind = "bpe"

    def __init__(self, merges: list[tuple[str, str]], size: int | None = None) -> None:
        try:
            from tokenizers import Tokenizer, models, pre_tokenizers
        except ImportError:
            raise ModuleNotFoundError(
                "GPT-2's tokens need the package tokenizers: pip install 'dynsparse[bpe]', or use "
                "--tokens byte or char"
            ) from None
        largest = 256 + len(merges) + 1
        self.size = largest if size is None else size
        if not 257 <= self.size <= largest:
            raise ValueError(
                f"expected a vocabulary size between 257 and {largest}, got {self.size}"
            )
        merges = merges[: self.size - 257]
        symbols = [_SYMBOLS[byte] for byte in _BYTES_BY_ID]
        ids = {symbol: i for i, symbol in enumerate(symbols)}
        for rank, (left, right) in enumerate(merges):
            if left not in ids or right not in ids:
                raise ValueError(
                    f"merge {rank + 1}: expected two tokens made before it, got "
                    f"{shortened(left)} and {shortened(right)}"
                )
            # Two merges may make one token; the first has its id.
            ids.setdefault(left + right, len(symbols))
            symbols.append(left + right)
        self._tokens = [bytes(_BYTE_OF[one] for one in token) for token in symbols]
        self._tokens.append(END_OF_TEXT.encode())
        self._encoder = Tokenizer(models.BPE(vocab=ids, merges=merges))
        self._encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        content = "\n".join(f"{left} {right}" for left, right in merges)
        self._identity = f"bpe:{hashlib.sha256(content.encode()).hexdigest()}"

    @property
    def identity(self) -> str:
        return self._identity

    def token(self, index: int) -> bytes:
        """The bytes of one id."""
        return self._tokens[index]

    def encode(self, text: str) -> np.ndarray:
        """See `Tokenizer.encode`.

        Raises:
            UnicodeEncodeError: half of a surrogate pair alone.
        """
        text.encode()
        ids = array("i")
        for piece in _pieces(text):
            ids.extend(self._encoder.encode(piece).ids)
        return np.array(ids, id_type(self.size))

    def decode(self, ids: np.ndarray) -> str:
        return b"".join(self._tokens[i] for i in np.asarray(ids)).decode(errors="replace")

    def state(self) -> dict[str, Any]:
        return {"kind": self.kind, "size": self.size}


def _pieces(text: str) -> Iterator[str]:
    begin = 0
    while begin < len(text):
        found = _CUT.search(text, begin + _PIECE)
        end = len(text) if found is None else found.start()
        yield text[begin:end]
        begin = end


def load_gpt2(folder: Path | None = None, size: int | None = None) -> GPT2Tokenizer:
    """GPT-2's tokenizer from `folder`, or downloaded once into the user's cache folder.

    Raises:
        ModuleNotFoundError: the package tokenizers is not installed.
        ValueError: a damaged file, a size out of range, a download with another checksum.
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
    return GPT2Tokenizer(read_merges(path), size)


def read_merges(path: Path) -> list[tuple[str, str]]:
    """The pairs of a file such as vocab.bpe: a line each, apart from a heading "#version".

    Raises:
        ValueError: a line that is not two tokens, in one line with its number.
        OSError: a file that cannot be read.
    """
    merges = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError:
        raise ValueError(f"{path}: expected GPT-2's merges in UTF-8, got a binary file") from None
    for number, line in enumerate(lines, start=1):
        if not line or (number == 1 and line.startswith("#version")):
            continue
        pair = line.split(" ")
        if len(pair) != 2 or not all(pair) or any(s not in _BYTE_OF for s in "".join(pair)):
            raise ValueError(
                f"{path}, line {number}: expected two tokens with a space between them, got "
                f"{line[:40]!r}"
            )
        merges.append((pair[0], pair[1]))
    if not merges:
        raise ValueError(f"{path}: expected GPT-2's merges, got none")
    return merges
