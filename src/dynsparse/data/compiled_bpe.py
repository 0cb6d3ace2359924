"""The same tokens by the package tiktoken, which is compiled, where it is installed.

tiktoken joins any two neighbours that make a token, `GPT2Tokenizer` the pairs that were learned.
Both give the same where every token, as a word of its own, is encoded to itself: two neighbours
that make a token are then always the pair it was learned from. That is looked at.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from dynsparse.data.word_split import word_pattern

__all__ = ["compiled"]


def compiled(
    tokens: list[bytes], is_whole: Callable[[bytes], bool]
) -> Callable[[str], np.ndarray] | None:
    """A function from text to ids; None without tiktoken, or where it might give others.

    Args:
        tokens: the 256 bytes, then what each merge makes; the place is the id.
        is_whole: whether a word of these bytes is encoded as one token.
    """
    try:
        import tiktoken
    except ImportError:
        return None
    ranks = {token: i for i, token in enumerate(tokens)}
    if len(ranks) < len(tokens) or not all(map(is_whole, tokens[256:])):
        return None
    # Its regular expressions know no \U and bring a Unicode of their own: ranges are written out.
    pattern = re.sub(r"\\U([0-9a-f]{8})", lambda m: chr(int(m[1], 16)), word_pattern().pattern)
    made = tiktoken.Encoding("gpt2", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    return lambda text: made.encode_to_numpy(text, disallowed_special=())
