"""The 16-bit words of meta-info: how many each part of a bucket takes."""

from __future__ import annotations

from typing import Any

from popsparse.planning.parts import ceil_div

WORD_LIMIT = 65535

# Words of the fixed parts; `buckets.meta_info` spells the layouts out.
ELEMENT_HEADER, ELEMENT_WORKER, BLOCK_HEADER, GRAD_W_WORKER, ROW_ENTRY = 9, 5, 7, 4, 2


def header_words(workers: Any, grad_w_workers: Any = None, *, element: bool) -> Any:
    """Words of a sub-group before its rows.

    Args:
        workers: those with work of forward; blocks have no words for them.
        grad_w_workers: those with work of grad_weight; None: the plan is not for grad_weight.
        element: the element format rather than that of blocks.
    """
    words = ELEMENT_HEADER + ELEMENT_WORKER * workers if element else BLOCK_HEADER
    if grad_w_workers is None:
        return words
    # The element format says how many there are; blocks have a place for that in their header.
    return words + GRAD_W_WORKER * grad_w_workers + (1 if element else 0)


def overflow_words(x_partitions: int) -> int:
    """Words of the overflow record: three counts and the distances in x, two to a word."""
    return 3 + ceil_div(x_partitions, 2)
