"""Initial patterns and values of sparse layers, and memory for weights that are loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import lcm
from typing import Any

import torch
from torch import Tensor, nn

from dynsparse._core.checks import check_within
from dynsparse.ops.grow import select
from dynsparse.pattern import SparsePattern
from dynsparse.pattern.coordinates import block_grid


def select_largest_blocks(weight: Tensor, nnz: int, block_size: int) -> SparsePattern:
    """Return the pattern of the `nnz` blocks of `weight` [out, in] with the largest magnitudes.

    Blocks are ranked by the sum of their magnitudes. Ties go to the first in row-major order.
    """
    score = sum_blocks(weight.detach().abs(), block_size).flatten()
    if bool(score.isnan().any()):
        raise ValueError("the weights contain NaN, so blocks cannot be ranked by magnitude")
    flat = select(score, nnz).cpu()
    return SparsePattern.from_flat(flat, shape=tuple(weight.shape), block_size=block_size)


def sum_blocks(scores: Tensor, b: int) -> Tensor:
    """Return the sums [out / b, in / b], float64, of the scores [out, in] in each block."""
    height, width = scores.shape[0] // b, scores.shape[1] // b
    return scores.double().view(height, b, width, b).sum((1, 3))


def count_blocks(shape: tuple[int, ...], density: float, block_size: int) -> int:
    """Return the number of blocks of a pattern of this density, at least 1."""
    check_within("density", density, "(0, 1]")
    _, _, (height, width) = block_grid(shape, block_size)
    return max(1, round(density * height * width))


def random_pattern(
    shape: tuple[int, int], density: float, block_size: int, generator: torch.Generator | None
) -> SparsePattern:
    nnz = count_blocks(shape, density, block_size)
    return SparsePattern.random(shape, nnz=nnz, block_size=block_size, generator=generator)


def uniform(like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw a tensor like `like`, uniform in [-1, 1), on the device of the generator."""
    device = like.device if generator is None else generator.device
    dtype = like.dtype if like.dtype == torch.float64 else torch.float32
    noise = torch.rand(like.shape, generator=generator, dtype=dtype, device=device)
    return (2 * noise - 1).to(device=like.device, dtype=like.dtype)


def even_pattern(
    shape: tuple[int, int], density: float, block_size: int, generator: torch.Generator | None
) -> SparsePattern:
    """Draw a random pattern whose block rows have equally many blocks, to within one, as have its
    block columns.

    Raises:
        ValueError: as `SparseLinear` does.
    """
    nnz = count_blocks(shape, density, block_size)
    _, _, (height, width) = block_grid(shape, block_size)
    # Along the diagonals of the torus, whose length is the least common multiple of the sides.
    steps = torch.arange(nnz, device="cpu")
    rows, cols = steps % height, (steps + steps // lcm(height, width)) % width
    device = "cpu" if generator is None else generator.device
    rows, cols = (
        torch.randperm(count, generator=generator, device=device).cpu()[index]
        for count, index in ((height, rows), (width, cols))
    )
    return SparsePattern(rows, cols, shape=shape, block_size=block_size)


def align_columns(pattern: SparsePattern, previous: SparsePattern) -> SparsePattern:
    """Permute the block columns of `pattern` so that the fullest read the outputs of the fullest
    block rows of the `previous` layer.

    With few large blocks a random pattern leaves block rows empty, and blocks of the next layer
    would read their constant outputs. The order of neurons is arbitrary, so this is free.
    """
    cols = _permute_by_count(pattern.cols, previous.rows, previous.grid[0])
    return SparsePattern(pattern.rows, cols, shape=pattern.shape, block_size=pattern.block_size)


def align_rows(pattern: SparsePattern, other: SparsePattern) -> SparsePattern:
    """Permute the block rows of `pattern` so that the fullest are those of `other`, whose outputs
    are multiplied with its own."""
    rows = _permute_by_count(pattern.rows, other.rows, other.grid[0])
    return SparsePattern(rows, pattern.cols, shape=pattern.shape, block_size=pattern.block_size)


def _permute_by_count(groups: Tensor, reference: Tensor, count: int) -> Tensor:
    """Permute `groups`, one index per block, so that the fullest is the fullest of `reference`."""
    order, reference_order = (
        torch.bincount(g.long(), minlength=count).argsort(descending=True, stable=True)
        for g in (groups, reference)
    )
    permutation = torch.empty_like(order)
    permutation[order] = reference_order
    return permutation[groups.long()]


@contextmanager
def materialize_meta_tensors(model: nn.Module) -> Iterator[None]:
    """Allocate CPU memory for a model's tensors on the meta device; an error restores them."""
    allocated: dict[int, Tensor] = {}
    before: list[tuple[dict[str, Any], str, Tensor]] = []
    for module in model.modules():
        holders: list[dict[str, Any]] = [module._parameters, module._buffers]
        for holder in holders:
            for name, tensor in holder.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if id(tensor) not in allocated:
                    # `empty_like` of a meta tensor imports sympy.
                    memory = torch.empty_strided(
                        tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu"
                    )
                    if isinstance(tensor, nn.Parameter):
                        memory = nn.Parameter(memory, tensor.requires_grad)
                    allocated[id(tensor)] = memory
                before.append((holder, name, tensor))
                holder[name] = allocated[id(tensor)]
    try:
        yield
    except BaseException:
        for holder, name, tensor in before:
            holder[name] = tensor
        raise
