"""Checks of shapes and block coordinates, and sampling of positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dynsparse._core.checks import check_generator, check_integer, check_tensor, shorten

INT32_MAX = 2**31 - 1


def block_grid(shape: Any, block_size: Any) -> tuple[tuple[int, int], int, tuple[int, int]]:
    """Check a shape and a block size; return (shape, block size, shape in blocks)."""
    if not isinstance(shape, Sequence) or isinstance(shape, str) or len(shape) != 2:
        raise ValueError(f"shape must be (out_features, in_features), got {shorten(shape)}")
    out_features = check_integer("out_features", shape[0], 1)
    in_features = check_integer("in_features", shape[1], 1)
    block = check_integer("block_size", block_size, 1)
    if out_features % block or in_features % block:
        raise ValueError(
            f"block_size {block} does not divide the shape {(out_features, in_features)}: "
            "choose a block size that divides both, or pad the features"
        )
    grid = (out_features // block, in_features // block)
    if max(grid) > INT32_MAX:
        raise ValueError(f"block coordinates are int32, a grid of {grid} blocks is too large")
    return (out_features, in_features), block, grid


def check_coordinates(values: Any, what: str, bound: int, least: int = 0) -> np.ndarray:
    """Return `values` as an int64 array [n], after checking that they are in [least, bound)."""
    if isinstance(values, Tensor):
        if check_tensor(what, values).is_meta:
            raise ValueError(f"{what} must hold data, got a tensor on the meta device")
        values = values.detach().cpu()
        values = values.float() if values.dtype == torch.bfloat16 else values
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise ValueError(f"{what} must be one-dimensional integers: {error}") from None
    if array.ndim != 1:
        raise ValueError(f"{what} must be one-dimensional, got the shape {tuple(array.shape)}")
    if array.size == 0:
        return np.zeros(0, np.int64)
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"{what} must be integers, got {array.dtype}")
    array = array.astype(np.int64, copy=False)
    low, high = int(array.min()), int(array.max())
    if low < least or high >= bound:
        wrong = low if low < least else high
        raise ValueError(f"{what} must lie in [{least}, {bound}), got {wrong}")
    return array


def sample_without_replacement(
    population: int, count: int, generator: torch.Generator | None = None
) -> Tensor:
    """Draw `count` distinct integers of [0, population), uniform over subsets; sorted, int64.

    Memory is in proportion to `count`, not to `population`: numbers are drawn in rounds, each as
    many as are still missing, and duplicates are dropped.
    """
    check_generator(generator)
    population = check_integer("population", population, 0)
    count = check_integer("count", count, 0)
    if count > population:
        raise ValueError(f"cannot draw {count} distinct positions from {population}")
    if 2 * count >= population:
        return torch.randperm(population, generator=generator, device="cpu")[:count].sort().values
    drawn = np.zeros(0, np.int64)
    while (missing := count - len(drawn)) > 0:
        more = torch.randint(population, (missing,), generator=generator, device="cpu").numpy()
        drawn = np.concatenate([drawn, more])
        drawn.sort()
        drawn = drawn[np.concatenate([[True], drawn[1:] != drawn[:-1]])]
    return torch.from_numpy(drawn)


def sample_per_row(
    rows: int, width: int, count: int, generator: torch.Generator | None = None
) -> Tensor:
    """Draw `count` distinct positions row * width + column, equally many in each row, to within
    one; uniform over such sets; sorted, int64.

    Memory is in proportion to `count`.
    """
    most = -(-count // max(1, rows))
    cols = _distinct_per_row(rows, width, most, generator)
    flat = torch.arange(rows, device="cpu").mul_(width)[:, None] + cols
    shorter = torch.randperm(rows, generator=generator, device="cpu")[: rows * most - count]
    if not len(shorter):
        return flat.view(-1)
    kept = torch.ones(flat.shape, dtype=torch.bool, device="cpu")
    kept[shorter, torch.randint(most, (len(shorter),), generator=generator, device="cpu")] = False
    return flat[kept]


def _distinct_per_row(
    rows: int, width: int, count: int, generator: torch.Generator | None
) -> Tensor:
    """Draw `count` distinct integers of [0, width) for each row, ascending: int32 [rows, count]."""
    if 2 * count > width:  # draw the absent ones, which are fewer
        present = torch.ones(rows, width, dtype=torch.bool, device="cpu")
        absent = _distinct_per_row(rows, width, width - count, generator)
        present.scatter_(1, absent.long(), False)
        return present.nonzero()[:, 1].int().view(rows, count)

    def draw(*shape: int) -> Tensor:
        return torch.randint(width, shape, generator=generator, dtype=torch.int32, device="cpu")

    drawn = draw(rows, count).sort(1).values
    pending = torch.arange(rows, device="cpu")
    while len(pending):  # duplicates are drawn again
        numbers = drawn[pending]
        repeats = torch.zeros_like(numbers, dtype=torch.bool)
        repeats[:, 1:] = numbers[:, 1:] == numbers[:, :-1]
        numbers[repeats] = draw(int(repeats.sum()))
        drawn[pending] = numbers.sort(1).values
        pending = pending[repeats.any(1)]
    return drawn
