"""What every tokeniser is: a vocabulary, and the way from text to its ids and back."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

__all__ = ["KINDS", "Tokenizer", "UnknownToken", "id_type"]

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
