"""Block patterns of sparse attention.

Each function returns a square `SparsePattern` [tokens, tokens] of queries by keys, for
`SparseMultiheadAttention(attention_pattern=...)`. With `causal` the blocks above the diagonal are
absent; pass `is_causal` to the call to mask later keys inside the diagonal blocks.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from dynsparse._core.checks import check_integer, check_types
from dynsparse.pattern import SparsePattern

__all__ = ["big_bird", "longformer", "sliding_window", "strided"]


def _count_blocks(tokens: int, block_size: int) -> int:
    tokens, block = check_integer("tokens", tokens, 1), check_integer("block_size", block_size, 1)
    if tokens % block:
        raise ValueError(f"tokens must be a multiple of the block size {block}, got {tokens}")
    return tokens // block


def _block_distance(count: int) -> Tensor:
    """Return block row - block column: int64 [count, count]."""
    index = torch.arange(count, device="cpu")
    return index[:, None] - index


def _to_pattern(present: Tensor, block_size: int, causal: bool) -> SparsePattern:
    if causal:
        present = present.tril()
    side = len(present) * block_size
    flat = present.flatten().nonzero().flatten()
    return SparsePattern.from_flat(flat, shape=(side, side), block_size=block_size)


def _in_window(count: int, window: int, block_size: int) -> Tensor:
    """Return which blocks have a query and a key at most `window` tokens apart."""
    check_integer("window", window, 0)
    # Neighbouring blocks contain tokens at a distance of one.
    return (_block_distance(count).abs() - 1) * block_size + 1 <= window


@check_types
def sliding_window(
    tokens: int, window: int, *, block_size: int = 32, causal: bool = False
) -> SparsePattern:
    """Make a pattern of keys at most `window` tokens before or after the query, in full blocks.

    Raises:
        ValueError: tokens that are not a multiple of the block size, sizes out of range.

    Source: Beltagy et al. 2020, "Longformer: The Long-Document Transformer", section 3.1.
    """
    count = _count_blocks(tokens, block_size)
    return _to_pattern(_in_window(count, window, block_size), block_size, causal)


@check_types
def longformer(
    tokens: int, window: int, global_tokens: int, *, block_size: int = 32, causal: bool = False
) -> SparsePattern:
    """Make a pattern of a sliding window and global first tokens, which see and are seen by all.

    Args:
        tokens, window, block_size, causal: as in `sliding_window`.
        global_tokens: number of global tokens, rounded up to full blocks.

    Raises:
        ValueError: as `sliding_window`.

    Source: Beltagy et al. 2020, section 3.1. The separate projections of global tokens are not part
    of a pattern.
    """
    count = _count_blocks(tokens, block_size)
    present = _in_window(count, window, block_size)
    first = -(-check_integer("global_tokens", global_tokens, 0) // block_size)
    present[:first] = True
    present[:, :first] = True
    return _to_pattern(present, block_size, causal)


@check_types
def strided(
    tokens: int, stride: int, *, block_size: int = 32, causal: bool = True
) -> SparsePattern:
    """Make a pattern of the last `stride` tokens and every block at a multiple of `stride` before.

    Args:
        tokens, block_size: as in `sliding_window`.
        stride: a multiple of the block size; in the paper, near the square root of tokens.
        causal: no later blocks; defaults to True, as in the paper.

    Raises:
        ValueError: as `sliding_window`; a stride that is not a multiple of the block size.

    Source: Child et al. 2019, "Generating Long Sequences with Sparse Transformers", section 4.3.
    """
    count = _count_blocks(tokens, block_size)
    if check_integer("stride", stride, 1) % block_size:
        raise ValueError(f"stride must be a multiple of the block size {block_size}, got {stride}")
    apart, step = _block_distance(count).abs(), stride // block_size
    return _to_pattern((apart < step) | (apart % step == 0), block_size, causal)


@check_types
def big_bird(
    tokens: int,
    *,
    block_size: int = 32,
    window_blocks: int = 3,
    global_blocks: int = 2,
    random_blocks: int = 3,
    causal: bool = False,
    generator: Generator | None = None,
) -> SparsePattern:
    """Make a pattern of a window of blocks, global first blocks, and random blocks.

    Args:
        tokens, block_size, causal: as in `sliding_window`.
        window_blocks: width of the window, odd, with the query's own block in the middle.
        global_blocks: number of first blocks that attend to all keys and are attended by all
            queries.
        random_blocks: number of further blocks in each block row, as far as there are any, drawn
            with `generator`. With `causal` none is after the query.

    Raises:
        ValueError: as `sliding_window`; a window that is even.

    Source: Zaheer et al. 2020, "Big Bird: Transformers for Longer Sequences", section 2; the
    defaults are the sizes of its experiments.
    """
    count = _count_blocks(tokens, block_size)
    if check_integer("window_blocks", window_blocks, 1) % 2 == 0:
        raise ValueError(f"window_blocks must be odd, got {window_blocks}")
    first = check_integer("global_blocks", global_blocks, 0)
    more = check_integer("random_blocks", random_blocks, 0)
    apart = _block_distance(count)
    present = apart.abs() <= window_blocks // 2
    present[:first] = True
    present[:, :first] = True
    # The largest of random numbers among the absent blocks.
    free = ~present & (apart >= 0) if causal else ~present
    drawn = torch.rand(count, count, generator=generator, device="cpu").masked_fill(~free, -1)
    best = drawn.topk(min(more, count), dim=1)
    present.scatter_(1, best.indices, present.gather(1, best.indices) | (best.values >= 0))
    return _to_pattern(present, block_size, causal)
