"""How much memory reading a file may take.

A small file must not fill the memory: what a file unpacks to, or what its header promises, is
compared with a limit before anything of that size is made. SECURITY.md lists the limits.
"""

from __future__ import annotations

import os

VARIABLE = "DYNSPARSE_READ_LIMIT"
"""The environment variable that sets another limit, in bytes."""

HOW_TO_RAISE = f"if you trust the file, set {VARIABLE} to more bytes"

_LEAST = 256 << 20
# Texts and patterns pack to a tenth, at most to a thirtieth of their size; a bomb to a thousandth.
_TIMES = 64


class LimitError(ValueError):
    """A file that would take more than it may; the message is one line."""


def read_limit(size: int = 0) -> int:
    """How many bytes the content of a file of `size` bytes may take once it is unpacked.

    64 times its size, and 256 MiB in any case; DYNSPARSE_READ_LIMIT, where it is set, instead.

    Raises:
        ValueError: DYNSPARSE_READ_LIMIT is no number of bytes.
    """
    given = os.environ.get(VARIABLE)
    if not given:
        return max(_LEAST, _TIMES * size)
    if not (given.isascii() and given.isdigit() and len(given) < 20 and int(given) > 0):
        raise ValueError(f"{VARIABLE}: expected a number of bytes above 0, got {given[:40]!r}")
    return int(given)
