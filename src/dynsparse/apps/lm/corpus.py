"""What a language model learns from: token ids to train on, to validate on and to test on."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dynsparse.apps.lm.options import Options
from dynsparse.data.text import (
    KINDS,
    STDLIB,
    describe_vocabulary,
    encode_text,
    is_token_file,
    make_tokenizer,
    open_tokens,
    read_text,
    tokenizer_from_state,
)
from dynsparse.options import flag

_PARTS = ("train", "valid", "test")


@dataclass(frozen=True)
class Corpus:
    """Ids [tokens] of each part, and the vocabulary: `tokenizer_from_state` makes its tokenizer.

    `name` is for people.
    """

    name: str
    vocabulary: dict[str, Any]
    train: np.ndarray
    valid: np.ndarray
    test: np.ndarray

    @property
    def size(self) -> int:
        """How many tokens the vocabulary has."""
        return int(self.vocabulary["size"])

    def check_length(self, sequence_length: int) -> None:
        """Raise ValueError for a part without a single sequence and the token that follows it."""
        for part in _PARTS:
            count = len(getattr(self, part))
            if count < sequence_length + 1:
                raise ValueError(
                    f"--sequence-length: expected less than the {count:,} tokens of the {part} "
                    f"part of {self.name}, got {sequence_length}: shorten it, or give more text"
                )

    def digest(self) -> str:
        """The SHA-256 of the training part."""
        return hashlib.sha256(np.ascontiguousarray(self.train).data).hexdigest()

    def batch(self, count: int, sequence_length: int, generator: torch.Generator) -> Tensor:
        """`count` random stretches of the training part, int64 [count, sequence_length + 1]."""
        starts = torch.randint(
            len(self.train) - sequence_length, (count, 1), generator=generator
        ).numpy()
        return torch.from_numpy(self.train[starts + np.arange(sequence_length + 1)].astype("i8"))

    def sequences_of(self, part: str, sequence_length: int, most: int | None = None) -> Tensor:
        """All of `part` in order, int64 [stretches, sequence_length + 1].

        Each begins with the last token of the one before, so that every token but the first is
        predicted once; what does not fill a stretch at the end is left out. With `most`, only as
        many stretches as predict no more tokens than that, and at least one.
        """
        ids = getattr(self, part)
        count = (len(ids) - 1) // sequence_length
        if most is not None:
            count = min(count, max(1, most // sequence_length))
        starts = np.arange(count)[:, None] * sequence_length
        return torch.from_numpy(ids[starts + np.arange(sequence_length + 1)].astype("i8"))


def empty_corpus(vocabulary: dict[str, Any]) -> Corpus:
    """A vocabulary without texts, for a model that is only to write."""
    none = np.empty(0, np.uint16)
    return Corpus("", vocabulary, none, none, none)


def load_corpus(options: Options, vocabulary: dict[str, Any] | None = None) -> Corpus:
    """The texts or token files of the options, as ids.

    Args:
        options: `data`, `tokens` and what belongs to them. Parts without a file of their own are
            the last shares of `data`.
        vocabulary: the vocabulary a checkpoint was trained with, which must hold for the data.

    Raises:
        ValueError: a text that is empty or binary, a character the vocabulary lacks, token files
            that are damaged or of several vocabularies.
        OSError: a file that is missing.
    """
    source = options.data if str(options.data) == STDLIB else Path(options.data)
    if isinstance(source, Path) and is_token_file(source):
        return _from_token_files(options, source, vocabulary)
    text = read_text(source)
    if vocabulary is None:
        kind = options.tokens or KINDS[0]
        tokenizer = make_tokenizer(kind, text, options.bpe_dir, options.vocabulary_size)
    else:
        tokenizer = tokenizer_from_state(vocabulary, options.bpe_dir)
    ids = {"train": encode_text(tokenizer, text, source)}
    for part in _PARTS[1:]:
        file = getattr(options, f"{part}_data")
        if file is None:
            continue
        if is_token_file(file):
            raise ValueError(
                f"--{part}-data: expected a text, as --data is one, got the token file {file}"
            )
        ids[part] = encode_text(tokenizer, read_text(file), file)
    return _make_corpus(options, source, describe_vocabulary(tokenizer), ids)


def _from_token_files(options: Options, source: Path, expected: dict[str, Any] | None) -> Corpus:
    first = open_tokens(source)
    for name, key in (("tokens", "kind"), ("vocabulary_size", "size")):
        requested, stored = getattr(options, name), first.vocabulary[key]
        if requested not in (None, stored):
            raise ValueError(
                f"--{flag(name)}: {source} was encoded with {stored}, got {requested}: leave "
                f"--{flag(name)} out, or encode the text again"
            )
    if expected is not None:
        first.check_vocabulary(expected["identity"])
    ids = {"train": first.ids}
    for part in _PARTS[1:]:
        file = getattr(options, f"{part}_data")
        if file is None:
            continue
        if not is_token_file(file):
            raise ValueError(
                f"--{part}-data: expected a token file, as --data is one, got {file}: make one by "
                "`dynsparse encode`"
            )
        other = open_tokens(file)
        other.check_vocabulary(first.vocabulary["identity"])
        ids[part] = other.ids
    return _make_corpus(options, source, first.vocabulary, ids)


def _make_corpus(
    options: Options, source: str | Path, vocabulary: dict[str, Any], ids: dict[str, np.ndarray]
) -> Corpus:
    if options.bpe_dir is not None and vocabulary["kind"] != "bpe":
        raise ValueError(f"--bpe-dir: expected --tokens bpe with it, got {vocabulary['kind']}")
    train = ids["train"]
    end = len(train)
    # The test part is cut off first, from the very end: it stays what it is when the share to
    # validate on changes.
    for part in reversed(_PARTS[1:]):
        if part in ids:
            continue
        share = getattr(options, f"{part}_share")
        count = int(share * len(train))
        if not count:
            raise ValueError(
                f"--{flag(part)}-share: {share:g} of the {len(train):,} tokens of {source} is "
                f"none: raise it, give more text, or name a file by --{part}-data"
            )
        ids[part] = train[end - count : end]
        end -= count
    name = source if isinstance(source, str) else source.name
    return Corpus(str(name), vocabulary, train[:end], ids["valid"], ids["test"])
