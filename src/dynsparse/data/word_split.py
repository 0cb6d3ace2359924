"""How GPT-2 cuts a text into words before it merges bytes.

The pattern is that of Radford et al. 2019: contractions, then letters, digits or other signs with
one space in front, then white space. It speaks of the Unicode properties L and N and of Unicode's
White_Space, none of which `re` has, so they are written out as ranges here.
"""

from __future__ import annotations

import functools
import re
import sys
import unicodedata

__all__ = ["word_pattern"]

# Unicode's property White_Space. `re`'s own \s also takes the separators U+001C to U+001F.
_SPACE = "\t\n\x0b\x0c\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"


@functools.cache
def word_pattern() -> re.Pattern[str]:
    """Its matches, one after another, are the whole text.

    Letters and numbers are those of the Unicode version of the running Python (`unicodedata`).
    """
    letters, numbers = _ranges("L"), _ranges("N")
    space = _SPACE
    return re.compile(
        "'s|'t|'re|'ve|'m|'ll|'d"
        f"| ?[{letters}]+| ?[{numbers}]+| ?[^{space}{letters}{numbers}]+"
        f"|[{space}]+(?![^{space}])|[{space}]+"
    )


def _ranges(kind: str) -> str:
    """The code points whose category begins with `kind`, as the inside of a character class."""
    parts: list[str] = []
    start = None
    for point in range(sys.maxunicode + 2):
        inside = point <= sys.maxunicode and unicodedata.category(chr(point))[0] == kind
        if inside and start is None:
            start = point
        elif not inside and start is not None:
            parts.append(f"\\U{start:08x}-\\U{point - 1:08x}")
            start = None
    return "".join(parts)
