"""What a sparse layer begins with: its pattern and its values."""

from __future__ import annotations

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
