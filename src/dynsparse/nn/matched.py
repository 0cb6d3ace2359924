"""First patterns in which what one layer writes is what the next one reads.

With few large blocks a random pattern leaves rows of blocks empty, and the next layer's blocks read
the constants that come of it. Neurons have no order, so the groups of them that two layers share
may be renamed for nothing.
"""

from __future__ import annotations

from math import lcm

import torch
from torch import Tensor

from dynsparse.nn.start import block_count
from dynsparse.pattern import SparsePattern
from dynsparse.pattern.coordinates import block_grid


def even_pattern(
    shape: tuple[int, int], density: float, block_size: int, generator: torch.Generator | None
) -> SparsePattern:
    """As many blocks as a random pattern has, with numbers of blocks per row of blocks, and per
    column of blocks, that differ by one at most.

    Raises:
        ValueError: as `SparseLinear` does.
    """
    nnz = block_count(shape, density, block_size)
    _, _, (height, width) = block_grid(shape, block_size)
    # Along the diagonals of the torus, each of which is as long as their least common multiple.
    steps = torch.arange(nnz)
    rows, cols = steps % height, (steps + steps // lcm(height, width)) % width
    device = "cpu" if generator is None else generator.device
    rows, cols = (
        torch.randperm(count, generator=generator, device=device).cpu()[places]
        for count, places in ((height, rows), (width, cols))
    )
    return SparsePattern(rows, cols, shape=shape, block_size=block_size)


def reading(pattern: SparsePattern, writer: SparsePattern) -> SparsePattern:
    """`pattern` with its columns of blocks renamed: the fullest read what the fullest rows of
    `writer`, the layer before, write."""
    return _renamed(pattern, pattern.rows, _names(pattern.cols, writer.rows, writer.grid[0]))


def meeting(pattern: SparsePattern, other: SparsePattern) -> SparsePattern:
    """`pattern` with its rows of blocks renamed: the fullest are the fullest of `other`, of which
    the outputs are multiplied with its own."""
    return _renamed(pattern, _names(pattern.rows, other.rows, other.grid[0]), pattern.cols)


def _names(groups: Tensor, others: Tensor, count: int) -> Tensor:
    """`groups`, one per block, by new names: the fullest gets that of the fullest of `others`."""
    own, fullest = (
        torch.bincount(g.long(), minlength=count).argsort(descending=True, stable=True)
        for g in (groups, others)
    )
    names = torch.empty_like(own)
    names[own] = fullest
    return names[groups.long()]


def _renamed(pattern: SparsePattern, rows: Tensor, cols: Tensor) -> SparsePattern:
    return SparsePattern(rows, cols, shape=pattern.shape, block_size=pattern.block_size)
