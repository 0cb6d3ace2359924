"""`dynsparse encode`: a text becomes a token file that trainings map into memory."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from dynsparse.data.text import (
    KINDS,
    STDLIB,
    Tokenizer,
    make_tokenizer,
    open_tokens,
    read_text,
    tokenizer_from_state,
    write_tokens,
)
from dynsparse.options import OUTPUT_FILE, parse_integer


def _option(help: str, **more: Any) -> Any:
    return typer.Option(help=help, show_default=False, **more)


def encode(
    output: Annotated[Path, _option("The token file to write.")],
    data: Annotated[
        str,
        _option(
            "The text: a file in UTF-8, plain or packed, or stdlib, the source text of Python's "
            "standard library. stdlib if left out.",
            metavar="FILE|stdlib",
        ),
    ] = STDLIB,
    tokens: Annotated[
        str | None, _option("What a token is: char if left out.", metavar="|".join(KINDS))
    ] = None,
    vocabulary: Annotated[
        Path | None,
        _option(
            "Use the vocabulary of this token file: for the texts that go with it to validate and "
            "to test on."
        ),
    ] = None,
    bpe_dir: Annotated[
        Path | None,
        _option("Folder with GPT-2's vocab.bpe; without it the file is downloaded once."),
    ] = None,
    vocabulary_size: Annotated[
        int | None,
        _option(
            "Use only the first merges of GPT-2's, for as many BPE tokens.",
            parser=parse_integer,
            metavar="<int>",
        ),
    ] = None,
) -> None:
    """Prepare a text for `dynsparse lm` once: tokens, with the vocabulary they belong to."""
    if tokens not in (None, *KINDS):
        raise ValueError(f"--tokens: expected one of {', '.join(KINDS)}, got {tokens!r}")
    if vocabulary is not None and (tokens is not None or vocabulary_size is not None):
        raise ValueError(
            "--vocabulary: the token file defines the tokens: leave out --tokens and "
            "--vocabulary-size"
        )
    if vocabulary_size is not None and tokens != "bpe":
        raise ValueError("--vocabulary-size: expected --tokens bpe with it")
    if bpe_dir is not None and tokens != "bpe" and vocabulary is None:
        raise ValueError("--bpe-dir: expected --tokens bpe with it")
    OUTPUT_FILE.check("output", output)
    begin = time.perf_counter()
    known = None if vocabulary is None else open_tokens(vocabulary).vocabulary
    if bpe_dir is not None and known is not None and known["kind"] != "bpe":
        raise ValueError(
            f"--bpe-dir: expected --vocabulary of BPE tokens with it, got {known['kind']} tokens"
        )
    text = read_text(data)
    tokenizer: Tokenizer
    if known is None:
        tokenizer = make_tokenizer(tokens or KINDS[0], text, bpe_dir, vocabulary_size)
    else:
        tokenizer = tokenizer_from_state(known, bpe_dir)
    try:
        ids = tokenizer.encode(text)
    except ValueError as error:
        raise ValueError(f"{data}: {error}") from None
    write_tokens(output, ids, tokenizer, Path(data).name)
    Console().print(
        f"{output}: {len(ids):,} {tokenizer.kind} tokens of {len(text):,} characters "
        f"({len(text) / len(ids):.2f} each), vocabulary of {tokenizer.size:,}, "
        f"{time.perf_counter() - begin:.1f} s",
        highlight=False,
        soft_wrap=True,
    )
