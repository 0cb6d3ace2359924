"""`dynsparse encode`: a text becomes a token file that trainings map into memory."""

from __future__ import annotations

import time
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from dynsparse.data.text import (
    KINDS,
    STDLIB,
    Tokenizer,
    encode_text,
    make_tokenizer,
    open_tokens,
    read_text,
    tokenizer_from_state,
    write_tokens,
)
from dynsparse.options import (
    FILE,
    OUTPUT_FILE,
    TEXT,
    Need,
    add_flags,
    check_applies,
    check_values,
    choice,
    integer,
    option,
)

_OWN = Need("texts without --vocabulary", lambda o: o.vocabulary is None, lambda o: "--vocabulary")
_BPE = Need("--tokens bpe", lambda o: o.tokens == "bpe", lambda o: f"--tokens {o.tokens}")


@dataclass(frozen=True)
class _Request:
    """The options of the command."""

    output: Path = option(MISSING, "The token file to write.", OUTPUT_FILE)
    data: str = option(
        STDLIB,
        "The text: a file in UTF-8, plain or compressed, or stdlib: the source text of Python's "
        "standard library.",
        TEXT,
        also=("dataset",),
    )
    tokens: str = option(KINDS[0], "What a token is.", choice(*KINDS), needs=(_OWN,))
    vocabulary: Path | None = option(
        None,
        "Use the vocabulary of this token file, for the validation and test texts that belong to "
        "it.",
        FILE,
    )
    bpe_dir: Path | None = option(
        None, "Folder with GPT-2's vocab.bpe; without it the file is downloaded once.", FILE
    )
    vocabulary_size: int | None = option(
        None,
        "Use only the first merges of GPT-2's, for as many BPE tokens.",
        integer(1),
        needs=(_OWN, _BPE),
    )


@add_flags(_Request)
def encode(values: dict[str, Any]) -> None:
    """Encode a text as a token file for `dynsparse lm`, with its vocabulary."""
    request = _Request(**values)
    check_values(request)
    check_applies(request, values)
    begin = time.perf_counter()
    known = None if request.vocabulary is None else open_tokens(request.vocabulary).vocabulary
    kind = request.tokens if known is None else known["kind"]
    if request.bpe_dir is not None and kind != "bpe":
        raise ValueError(f"--bpe-dir: expected BPE tokens with it, got {kind} tokens")
    text = read_text(request.data)
    tokenizer: Tokenizer
    if known is None:
        tokenizer = make_tokenizer(kind, text, request.bpe_dir, request.vocabulary_size)
    else:
        tokenizer = tokenizer_from_state(known, request.bpe_dir)
    ids = encode_text(tokenizer, text, request.data)
    write_tokens(request.output, ids, tokenizer, Path(request.data).name)
    Console().print(
        f"{request.output}: {len(ids):,} {tokenizer.kind} tokens of {len(text):,} characters "
        f"({len(text) / len(ids):.2f} each), vocabulary of {tokenizer.size:,}, "
        f"{time.perf_counter() - begin:.1f} s",
        highlight=False,
        soft_wrap=True,
    )
