"""From text to token ids and back: bytes, characters, and what they share with GPT-2's tokens."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from dynsparse.data.bpe import load_gpt2
from dynsparse.data.vocabulary import KINDS, Tokenizer, UnknownToken, check_vocabulary, id_type


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
    """What `state` was taken from.

    Raises:
        ValueError: `state` is no vocabulary, or the BPE files are not those it was taken from.
        OSError: see `make_tokenizer`.
    """
    check_vocabulary(state)
    made = make_tokenizer(state["kind"], state.get("characters", ""), bpe_dir, state.get("size"))
    if made.identity != state.get("identity", made.identity):
        raise ValueError(
            f"expected the BPE files of the vocabulary {state['identity'][:20]}..., got those of "
            f"{made.identity[:20]}...: name the folder of the right ones"
        )
    if made.size != state.get("size", made.size):
        raise ValueError(
            f"expected a vocabulary of {made.size} {made.kind} tokens, got the size {state['size']}"
        )
    return made


def _code_points(text: str) -> np.ndarray:
    # surrogatepass: a lone surrogate is then one unknown character rather than an encoding error
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
