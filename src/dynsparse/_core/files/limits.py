"""How much memory reading an untrusted file may take, and JSON within that limit.

A small file must not fill the memory: what a file unpacks to, or what its header promises, is
compared with a limit before anything of that size is allocated. SECURITY.md lists the limits.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

VARIABLE = "DYNSPARSE_READ_LIMIT"
"""The environment variable that sets another limit, in bytes."""

HOW_TO_RAISE = f"if you trust the file, set {VARIABLE} to more bytes"

MOST_DEPTH = 100
"""How deep JSON may be nested."""

_LEAST = 256 << 20
# Texts and patterns pack to a tenth, at most to a thirtieth of their size; a bomb to a thousandth.
_TIMES = 64
_JSON_MEMORY = 16  # bytes that a byte of JSON may become, roughly
_SIGNS = re.compile(r'[\[\]{}"]|\\.', re.DOTALL)


class LimitError(ValueError):
    """Reading a file would exceed a limit; the message is one line."""


def check_regular(path: Path) -> None:
    """Raise OSError if `path` exists and is not a file: reading a named pipe would never end."""
    if path.exists() and not path.is_file():
        raise OSError(f"{path}: expected a file, got a folder, pipe or device: remove it")


def read_limit(size: int = 0) -> int:
    """Return how many bytes the unpacked content of a file of `size` bytes may take.

    It is DYNSPARSE_READ_LIMIT if that is set, otherwise 64 times the size, at least 256 MiB.

    Raises:
        ValueError: DYNSPARSE_READ_LIMIT is not a number of bytes.
    """
    given = os.environ.get(VARIABLE)
    if not given:
        return max(_LEAST, _TIMES * size)
    if not (given.isascii() and given.isdigit() and len(given) < 20 and int(given) > 0):
        raise ValueError(f"{VARIABLE}: expected a number of bytes above 0, got {given[:40]!r}")
    return int(given)


def parse_json(text: str | bytes) -> Any:
    """Parse JSON text, or bytes in UTF-8, within limits of length and depth.

    `json.loads` recurses into any nesting, and its result takes about twenty times the memory of
    the text.

    Raises:
        LimitError: nested deeper than 100, or longer than a 16th of `read_limit()` (16 MiB).
        ValueError: not JSON.
    """
    most = read_limit() // _JSON_MEMORY
    if len(text) > most:
        raise LimitError(
            f"expected at most {most:,} bytes of JSON, got {len(text):,}: {HOW_TO_RAISE}"
        )
    if isinstance(text, bytes):
        text = text.decode()
    if text.count("[") + text.count("{") > MOST_DEPTH:
        _check_depth(text)
    return json.loads(text)


def _check_depth(text: str) -> None:
    """Raise LimitError if brackets outside of strings are nested too deep."""
    depth = 0
    inside = False
    for match in _SIGNS.finditer(text):
        sign = match[0]
        if sign == '"':
            inside = not inside
        elif not inside and sign in "[{":
            depth += 1
            if depth > MOST_DEPTH:
                raise LimitError(f"expected JSON nested at most {MOST_DEPTH} deep, got deeper")
        elif not inside and sign in "]}":
            depth -= 1
