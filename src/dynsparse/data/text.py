"""Texts, tokenizers and token files."""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
import sysconfig
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from dynsparse._core.checks import shorten
from dynsparse._core.files.atomic_write import atomic_write
from dynsparse._core.files.folders import cache_folder
from dynsparse._core.files.limits import LimitError, parse_json
from dynsparse.data.download import fetch, read_unpacked

STDLIB = "stdlib"
"""The name of the text that every Python carries."""

_STDLIB_BYTES = 4 << 20
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "lib2to3", "idlelib", "__pycache__"}


def read_text(source: str | Path) -> str:
    """The text of `source`: "stdlib" or a UTF-8 file, possibly compressed with gzip, xz or bzip2.

    A byte order mark is left out; line ends stay as they are.

    Raises:
        ValueError: an empty file, one that is not UTF-8 text, a compressed one that is damaged or
            unpacks to more than `dynsparse._core.files.limits.read_limit` allows.
        OSError: a file that cannot be read.
    """
    if str(source) == STDLIB:
        return read_stdlib()
    path = Path(source)
    content = read_unpacked(path)
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: expected text in UTF-8, got the byte 0x{content[error.start]:02x} at "
            f"position {error.start}: convert the file, or name a text file"
        ) from None
    text = text.removeprefix("\ufeff")
    if "\0" in text:
        raise ValueError(
            f"{path}: expected text, got a binary file (a zero byte at position "
            f"{content.index(0)}): name a text file"
        )
    if not text.strip():
        what = "an empty file" if not text else "white space alone"
        raise ValueError(f"{path}: expected text, got {what}")
    return text


def read_stdlib(most_bytes: int = _STDLIB_BYTES) -> str:
    """Source text of the running Python's standard library, at most `most_bytes` of UTF-8.

    Whole files in the order of the SHA-256 of their names, which mixes the packages and is the same
    on every machine; the tests are left out. The text depends on the Python version alone.

    Raises:
        OSError: this Python carries no source files.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*.py"))
    chosen = (name for name in names if not _LEFT_OUT & set(name.split("/")))
    ordered = sorted(chosen, key=lambda name: hashlib.sha256(name.encode()).digest())
    parts: list[str] = []
    size = 0
    for name in ordered:
        content = (folder / name).read_bytes()
        try:
            text = content.decode()
        except UnicodeDecodeError:
            continue  # a few files show other encodings
        if "\0" in text or not text.strip():
            continue
        if size + len(content) > most_bytes:
            break
        parts.append(text)
        size += len(content)
    if not parts:
        raise OSError(
            f"{folder}: expected the standard library's source files, got none: name a text file"
        )
    return "\n".join(parts)


KINDS = ("char", "byte", "bpe")


class UnknownToken(ValueError):
    """A text has a character that is not in the vocabulary."""


class Tokenizer(Protocol):
    """A vocabulary and the way from text to its ids."""

    kind: str
    size: int
    """How many ids there are: 0 ... size - 1."""

    @property
    def identity(self) -> str:
        """A string that is equal for equal vocabularies, and only for these."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """The ids of `text`, [tokens] of `id_type(size)`."""
        ...

    def decode(self, ids: np.ndarray) -> str:
        """The text of `ids` [tokens]; bytes that are not UTF-8 become U+FFFD."""
        ...

    def state(self) -> dict[str, Any]:
        """The plain types from which `tokenizer_from_state` makes the tokenizer again."""
        ...


def id_type(size: int) -> type[np.uint16] | type[np.int32]:
    """The integers that hold the ids of a vocabulary of `size`."""
    return np.uint16 if size <= 1 << 16 else np.int32


def check_vocabulary(state: Any) -> None:
    """Raise unless `state` is what `Tokenizer.state` gives, with an "identity" and a "size" or not.

    It comes from token files and checkpoints, which may hold anything.

    Raises:
        ValueError: it is not; the message has what was expected, and what it is.
    """
    if not isinstance(state, dict):
        raise ValueError(f"expected a vocabulary, got {shorten(state)}")
    if not isinstance(state.get("kind"), str) or state["kind"] not in KINDS:
        raise ValueError(
            f"expected a vocabulary among {', '.join(KINDS)}, got {shorten(state.get('kind'))}"
        )
    size = state.get("size")
    if size is not None and (type(size) is not int or not 0 < size < 1 << 31):
        raise ValueError(f"expected the size of a vocabulary, got {shorten(size)}")
    for key in ("identity", "characters"):
        text = state.get(key, "")
        if not isinstance(text, str) or not _is_text(text):
            raise ValueError(f"expected text as the vocabulary's {key}, got {shorten(text)}")


def _is_text(text: str) -> bool:
    """Whether it has no lone surrogate, which cannot be encoded."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


END_OF_TEXT = "<|endoftext|>"
MERGES_FILE = "vocab.bpe"
GPT2_URLS = (
    "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/",
    "https://openaipublic.blob.core.windows.net/gpt-2/models/124M/",
)
GPT2_CHECKSUM = "sha256:1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"

# Characters that are encoded at a time. No token spans a space or line end that follows a non-space
# character, so texts are cut there.
_PIECE = 1 << 20
_CUT = re.compile(r"(?<=\S)[ \n]")


class GPT2Tokenizer:
    """Text to GPT-2's tokens and back.

    Args:
        merges: pairs of tokens by the symbols of their bytes, as `read_merges` gives them.
        size: how many tokens the vocabulary has, at least 257; defaults to all. A smaller one uses
            only the first merges, so that a text has more tokens. <|endoftext|> is the last id of
            any size. In a text those characters are ordinary ones.

    Raises:
        ModuleNotFoundError: the package tokenizers is not installed.
        ValueError: a merge of what is not yet a token, or a size out of range.
    """

    kind = "bpe"

    def __init__(self, merges: list[tuple[str, str]], size: int | None = None) -> None:
        try:
            from tokenizers import Tokenizer, decoders, models, pre_tokenizers
        except ImportError:
            raise ModuleNotFoundError(
                "GPT-2's tokens need the package tokenizers: pip install tokenizers, or use "
                "--tokens byte or char"
            ) from None
        largest = 256 + len(merges) + 1
        self.size = largest if size is None else size
        if not 257 <= self.size <= largest:
            raise ValueError(
                f"expected a vocabulary size between 257 and {largest}, got {self.size}"
            )
        merges = merges[: self.size - 257]
        # Ids of single bytes go by their symbols: the printable ones come first.
        ids = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
        for rank, (left, right) in enumerate(merges):
            if left not in ids or right not in ids:
                raise ValueError(
                    f"merge {rank + 1}: expected two tokens made before it, got "
                    f"{shorten(left)} and {shorten(right)}"
                )
            # Two merges may make one token; the first has its id.
            ids.setdefault(left + right, 256 + rank)
        ids.setdefault(END_OF_TEXT, self.size - 1)
        self._encoder = Tokenizer(models.BPE(vocab=ids, merges=merges))
        self._encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._encoder.decoder = decoders.ByteLevel()
        content = "\n".join(f"{left} {right}" for left, right in merges)
        self.identity = f"bpe:{hashlib.sha256(content.encode()).hexdigest()}"

    def encode(self, text: str) -> np.ndarray:
        """See `Tokenizer.encode`.

        Raises:
            UnicodeEncodeError: a lone surrogate.
        """
        text.encode()
        ids = array("i")
        for word in _split_at_spaces(text):
            ids.extend(self._encoder.encode(word).ids)
        return np.array(ids, id_type(self.size))

    def decode(self, ids: np.ndarray) -> str:
        return self._encoder.decode(np.asarray(ids).tolist(), skip_special_tokens=False)

    def state(self) -> dict[str, Any]:
        return {"kind": self.kind, "size": self.size}


def _split_at_spaces(text: str) -> Iterator[str]:
    begin = 0
    while begin < len(text):
        cut = _CUT.search(text, begin + _PIECE)
        end = len(text) if cut is None else cut.start()
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
        path = fetch(GPT2_URLS, MERGES_FILE, GPT2_CHECKSUM, cache_folder() / "gpt2")
    elif not (path := folder / MERGES_FILE).is_file():
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
        if len(pair) != 2 or not all(pair):
            raise ValueError(
                f"{path}, line {number}: expected two tokens with a space between them, got "
                f"{line[:40]!r}"
            )
        merges.append((pair[0], pair[1]))
    if not merges:
        raise ValueError(f"{path}: expected GPT-2's merges, got none")
    return merges


class ByteTokenizer:
    """The bytes of the text in UTF-8: 256 ids, and any text has them."""

    kind = "byte"
    size = 256
    identity = "byte"

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint16)

    def decode(self, ids: np.ndarray) -> str:
        return bytes(np.asarray(ids, np.uint8)).decode(errors="replace")

    def state(self) -> dict[str, Any]:
        return {"kind": self.kind}


class CharTokenizer:
    """The characters of a text, each with an id in the order of their code points.

    Args:
        characters: the vocabulary; repetitions count once.

    Raises:
        ValueError: no characters.
    """

    kind = "char"

    def __init__(self, characters: str) -> None:
        self.characters = "".join(sorted(set(characters)))
        self.size = len(self.characters)
        if not self.size:
            raise ValueError("expected at least one character for a vocabulary, got none")
        self._points = _code_points(self.characters)

    @property
    def identity(self) -> str:
        return f"char:{hashlib.sha256(self.characters.encode('utf-32-le')).hexdigest()}"

    def encode(self, text: str) -> np.ndarray:
        """See `Tokenizer.encode`.

        Raises:
            UnknownToken: a character outside the vocabulary, with its place.
        """
        points = _code_points(text)
        ids = np.searchsorted(self._points, points)
        ids[ids == self.size] = 0
        wrong = self._points[ids] != points
        if wrong.any():
            at = int(wrong.argmax())
            raise UnknownToken(
                f"the character {text[at]!r} (U+{ord(text[at]):04X}) at position {at} is not among "
                f"the {self.size} of the vocabulary: train on a text that has it, or use byte "
                "tokens"
            )
        return ids.astype(id_type(self.size))

    def decode(self, ids: np.ndarray) -> str:
        return "".join(self.characters[i] for i in np.asarray(ids))

    def state(self) -> dict[str, Any]:
        return {"kind": self.kind, "characters": self.characters}


def make_tokenizer(
    kind: str, text: str, bpe_dir: Path | None = None, size: int | None = None
) -> Tokenizer:
    """The tokenizer of one of `KINDS` for `text`.

    Args:
        kind: "char" (the vocabulary is the text's), "byte" or "bpe".
        text: only "char" looks at it.
        bpe_dir: folder with GPT-2's vocab.bpe; without it the file is downloaded once.
        size: of the BPE vocabulary, see `GPT2Tokenizer`.

    Raises:
        ValueError: an unknown kind, an empty text, damaged BPE files.
        OSError: BPE files that are missing and cannot be downloaded.
    """
    if kind == "byte":
        return ByteTokenizer()
    if kind == "char":
        return CharTokenizer(text)
    if kind == "bpe":
        return load_gpt2(bpe_dir, size)
    raise ValueError(f"expected tokens among {', '.join(KINDS)}, got {kind!r}")


def tokenizer_from_state(state: dict[str, Any], bpe_dir: Path | None = None) -> Tokenizer:
    """Make the tokenizer that `state` was taken from.

    Raises:
        ValueError: `state` is not a vocabulary, or the BPE files are not those it was taken from.
        OSError: see `make_tokenizer`.
    """
    check_vocabulary(state)
    tokenizer = make_tokenizer(
        state["kind"], state.get("characters", ""), bpe_dir, state.get("size")
    )
    if tokenizer.identity != state.get("identity", tokenizer.identity):
        raise ValueError(
            f"expected the BPE files of the vocabulary {state['identity'][:20]}..., got those of "
            f"{tokenizer.identity[:20]}...: name the folder of the right ones"
        )
    if tokenizer.size != state.get("size", tokenizer.size):
        raise ValueError(
            f"expected a vocabulary of {tokenizer.size} {tokenizer.kind} tokens, got the size "
            f"{state['size']}"
        )
    return tokenizer


def encode_text(tokenizer: Tokenizer, text: str, source: object) -> np.ndarray:
    """Encode a text; errors begin with its source, a file or an option."""
    try:
        return tokenizer.encode(text)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


def _code_points(text: str) -> np.ndarray:
    # surrogatepass: a lone surrogate is then one unknown character rather than an encoding error
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


MAGIC = b"dynsparse\x00token\n"
VERSION = 1
_START = struct.Struct("<16sII")
_ALIGNMENT = 64


@dataclass(frozen=True)
class TokenFile:
    """The result of `open_tokens`: `ids` [count], mapped read-only, and the head's entries."""

    path: Path
    ids: np.ndarray
    vocabulary: dict[str, Any]
    source: str

    def check_vocabulary(self, identity: str) -> None:
        """Raise ValueError unless the ids are of the vocabulary `identity`."""
        current = self.vocabulary["identity"]
        if current != identity:
            raise ValueError(
                f"{self.path}: expected tokens of the vocabulary {_abbreviate(identity)}, got "
                f"tokens of {_abbreviate(current)}: encode the text again with that vocabulary"
            )


def describe_vocabulary(tokenizer: Tokenizer) -> dict[str, Any]:
    """The head's entry for the vocabulary of `tokenizer`; checkpoints keep the same."""
    return {**tokenizer.state(), "size": tokenizer.size, "identity": tokenizer.identity}


def write_tokens(path: Path, ids: np.ndarray, tokenizer: Tokenizer, source: str) -> None:
    """Write `ids` [count] to `path`, atomically.

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
        "vocabulary": describe_vocabulary(tokenizer),
        "source": source,
    }
    text = json.dumps(head).encode()
    text += b" " * (-(_START.size + len(text)) % _ALIGNMENT)

    def write(file: BinaryIO) -> None:
        file.write(_START.pack(MAGIC, VERSION, len(text)))
        file.write(text)
        file.write(np.ascontiguousarray(ids, dtype).data)

    atomic_write(path, write)


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


def _abbreviate(identity: str) -> str:
    kind, _, digest = identity.partition(":")
    return f"{kind} {digest[:12]}" if digest else kind
