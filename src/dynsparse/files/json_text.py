"""JSON from files and flags, with a limit on its size and its depth.

`json.loads` recurses into whatever it is given, and an object takes some twenty times the memory of
its text.
"""

from __future__ import annotations

import json
import re
from typing import Any

from dynsparse.files.limits import HOW_TO_RAISE, LimitError, read_limit

MOST_DEPTH = 100
_MEMORY = 16  # bytes that a byte of JSON may become, roughly
_SIGNS = re.compile(r'[\[\]{}"]|\\.', re.DOTALL)


def parse_json(text: str | bytes) -> Any:
    """What `json.loads` gives; bytes are UTF-8.

    Raises:
        LimitError: nested deeper than 100, or longer than a 16th of `read_limit()` (16 MiB).
        ValueError: not JSON.
    """
    most = read_limit() // _MEMORY
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
    """Brackets outside strings; where the text is not JSON, `json.loads` will say so."""
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
