"""Which keys queries look at, block by block: the usual patterns of sparse attention.

Each makes a square `SparsePattern` [tokens, tokens] of queries by keys, for
`SparseMultiheadAttention(attention_pattern=...)`. With `causal` there is no block that lies wholly
behind its queries; inside the blocks on the diagonal `is_causal` of the call masks what does.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from dynsparse.checks import check_integer
from dynsparse.pattern import SparsePattern
from dynsparse.typed import typed

__all__ = ["big_bird", "longformer", "sliding_window", "strided"]


def _blocks(tokens: int, block_size: int) -> int:
    tokens, block = check_integer("tokens", tokens, 1), check_integer("block_size", block_size, 1)
    if tokens % block:
        raise ValueError(f"tokens must be a multiple of the block size {block}, got {tokens}")
    return tokens // block


def _apart(count: int) -> Tensor:
    """How many blocks a query is behind a key: int64 [count, count], negative before it."""
    places = torch.arange(count)
    return places[:, None] - places


def _made(present: Tensor, block_size: int, causal: bool) -> SparsePattern:
    if causal:
        present = present.tril()
    side = len(present) * block_size
    flat = present.flatten().nonzero().flatten()
    return SparsePattern.from_flat(flat, shape=(side, side), block_size=block_size)


def _near(count: int, window: int, block_size: int) -> Tensor:
    """Blocks of which some query and key are at most `window` tokens apart."""
    check_integer("window", window, 0)
    # Neighbouring blocks have tokens at a distance of one.
    return (_apart(count).abs() - 1) * block_size + 1 <= window


@typed
def sliding_window(
    tokens: int, window: int, *, block_size: int = 32, causal: bool = False
) -> SparsePattern:
    """Keys at most `window` tokens before or after the query, rounded up to whole blocks.

    Raises:
        ValueError: tokens that are no multiple of the block size, sizes out of range.

    Source: Beltagy et al. 2020, "Longformer: The Long-Document Transformer", section 3.1.
    """
    count = _blocks(tokens, block_size)
    return _made(_near(count, window, block_size), block_size, causal)


@typed
def longformer(
    tokens: int, window: int, global_tokens: int, *, block_size: int = 32, causal: bool = False
) -> SparsePattern:
    """A sliding window, and the first tokens, which see all and are seen by all.

    Args:
        tokens, window, block_size, causal: as of `sliding_window`.
        global_tokens: how many; rounded up to whole blocks.

    Raises:
        ValueError: as `sliding_window`.

    Source: Beltagy et al. 2020, section 3.1. Its projections of their own for global tokens are
    not part of a pattern.
    """
    count = _blocks(tokens, block_size)
    present = _near(count, window, block_size)
    first = -(-check_integer("global_tokens", global_tokens, 0) // block_size)
    present[:first] = True
    present[:, :first] = True
    return _made(present, block_size, causal)


@typed
def strided(
    tokens: int, stride: int, *, block_size: int = 32, causal: bool = True
) -> SparsePattern:
    """The last `stride` tokens, and before them every block a multiple of `stride` away.

    Args:
        tokens, block_size: as of `sliding_window`.
        stride: a multiple of the block size; near the square root of tokens in the paper.
        causal: nothing behind the query. (True, as in the paper)

    Raises:
        ValueError: as `sliding_window`; a stride that is no multiple of the block size.

    Source: Child et al. 2019, "Generating Long Sequences with Sparse Transformers", section 4.3.
    """
    count = _blocks(tokens, block_size)
    if check_integer("stride", stride, 1) % block_size:
        raise ValueError(f"stride must be a multiple of the block size {block_size}, got {stride}")
    apart, step = _apart(count).abs(), stride // block_size
    return _made((apart < step) | (apart % step == 0), block_size, causal)


@typed
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
    """A window of blocks around the query's, the first blocks for all, and some at random.

    Args:
        tokens, block_size, causal: as of `sliding_window`.
        window_blocks: an odd number, the query's own in the middle.
        global_blocks: the first blocks of queries see all, the first of keys are seen by all.
        random_blocks: how many more each row of blocks has, or as many as are left; drawn from
            `generator`. With `causal` they come from those that are not behind the query.

    Raises:
        ValueError: as `sliding_window`; a window that is even.

    Source: Zaheer et al. 2020, "Big Bird: Transformers for Longer Sequences", section 2; the sizes
    left out are those of its experiments.
    """
    count = _blocks(tokens, block_size)
    if check_integer("window_blocks", window_blocks, 1) % 2 == 0:
        raise ValueError(f"window_blocks must be odd, got {window_blocks}")
    first = check_integer("global_blocks", global_blocks, 0)
    more = check_integer("random_blocks", random_blocks, 0)
    apart = _apart(count)
    present = apart.abs() <= window_blocks // 2
    present[:first] = True
    present[:, :first] = True
    # The largest of random numbers among the blocks that are free.
    free = ~present & (apart >= 0) if causal else ~present
    drawn = torch.rand(count, count, generator=generator).masked_fill(~free, -1)
    best = drawn.topk(min(more, count), dim=1)
    present.scatter_(1, best.indices, present.gather(1, best.indices) | (best.values >= 0))
    return _made(present, block_size, causal)
