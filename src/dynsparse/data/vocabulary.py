"""What every tokeniser is: a vocabulary, and the way from text to its ids and back."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from dynsparse.files.shorten import shortened

KINDS = ("char", "byte", "bpe")


class UnknownToken(ValueError):
    """A text holds what the vocabulary does not."""


class Tokenizer(Protocol):
    """A vocabulary and the way from text to its ids."""

    kind: str
    size: int
    """How many ids there are: 0 ... size - 1."""

    @property
    def identity(self) -> str:
        """The same for equal vocabularies, different for others."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """The ids of `text`, [tokens] of `id_type(size)`."""
        ...

    def decode(self, ids: np.ndarray) -> str:
        """The text of `ids` [tokens]; bytes that are no UTF-8 become U+FFFD."""
        ...

    def state(self) -> dict[str, Any]:
        """What `tokenizer_from_state` needs to make it again: plain types."""
        ...


def id_type(size: int) -> type[np.uint16] | type[np.int32]:
    """The integers that hold the ids of a vocabulary of `size`."""
    return np.uint16 if size <= 1 << 16 else np.int32


def check_vocabulary(state: Any) -> None:
    """Raise unless `state` is what `Tokenizer.state` gives, with an "identity" and a "size" or not.

    It comes from token files and checkpoints, which may hold anything.

    Raises:
        ValueError: what it should be, and what it is.
    """
    if not isinstance(state, dict):
        raise ValueError(f"expected a vocabulary, got {shortened(state)}")
    if not isinstance(state.get("kind"), str) or state["kind"] not in KINDS:
        raise ValueError(
            f"expected a vocabulary among {', '.join(KINDS)}, got {shortened(state.get('kind'))}"
        )
    size = state.get("size")
    if size is not None and (type(size) is not int or not 0 < size < 1 << 31):
        raise ValueError(f"expected the size of a vocabulary, got {shortened(size)}")
    for key in ("identity", "characters"):
        text = state.get(key, "")
        if not isinstance(text, str) or not _is_text(text):
            raise ValueError(f"expected text as the vocabulary's {key}, got {shortened(text)}")


def _is_text(text: str) -> bool:
    """Whether it has no lone half of a surrogate pair, which no encoding takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
