"""Initial patterns and values of sparse layers."""

from __future__ import annotations

from math import lcm

import torch
from torch import Tensor

from dynsparse.checks import check_within
from dynsparse.ops.grow import select
from dynsparse.pattern import SparsePattern
from dynsparse.pattern.coordinates import block_grid


def largest_blocks(weight: Tensor, nnz: int, block_size: int) -> SparsePattern:
    """The `nnz` blocks of `weight` [out, in] whose magnitudes have the largest sum.

    Ties go to the first in row-major order.
    """
    b = block_size
    height, width = weight.shape[0] // b, weight.shape[1] // b
    magnitude = weight.detach().abs().double()
    score = magnitude.view(height, b, width, b).sum((1, 3)).flatten()
    if bool(torch.isnan(score).any()):
        raise ValueError("the weights hold NaN, so blocks cannot be ranked by magnitude")
    flat = select(score, nnz).cpu()
    return SparsePattern.from_flat(flat, shape=tuple(weight.shape), block_size=b)


def block_count(shape: tuple[int, ...], density: float, block_size: int) -> int:
    check_within("density", density, "(0, 1]")
    _, _, (height, width) = block_grid(shape, block_size)
    return max(1, round(density * height * width))


def random_pattern(
    shape: tuple[int, int], density: float, block_size: int, generator: torch.Generator | None
) -> SparsePattern:
    nnz = block_count(shape, density, block_size)
    return SparsePattern.random(shape, nnz=nnz, block_size=block_size, generator=generator)


def uniform(like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Uniform in [-1, 1), drawn where the generator lives."""
    device = like.device if generator is None else generator.device
    dtype = like.dtype if like.dtype == torch.float64 else torch.float32
    noise = torch.rand(like.shape, generator=generator, dtype=dtype, device=device)
    return (2 * noise - 1).to(device=like.device, dtype=like.dtype)


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


def align_columns(pattern: SparsePattern, writer: SparsePattern) -> SparsePattern:
    """`pattern` with its columns of blocks renamed: the fullest read what the fullest rows of
    `writer`, the layer before, write."""
    return _renamed(pattern, pattern.rows, _names(pattern.cols, writer.rows, writer.grid[0]))


def align_rows(pattern: SparsePattern, other: SparsePattern) -> SparsePattern:
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
