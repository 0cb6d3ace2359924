"""Lists of blocks: the form in which all storage formats meet, and checks of what they hold."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dynsparse.checks import check_array


class Blocks(NamedTuple):
    """The form all formats meet in: block coordinates int64 [n], values [n, height, width]."""

    row: np.ndarray
    col: np.ndarray
    data: np.ndarray


def to_numpy(values: Any, what: str = "values") -> np.ndarray:
    """A tensor or array as an array of real numbers.

    Raises:
        TypeError: a type NumPy does not have (bfloat16), or one that is not a number.
    """
    if isinstance(values, Tensor) and values.dtype == torch.bfloat16:
        raise TypeError(f"{what} must be float16, float32 or float64, got bfloat16: convert it")
    return check_array(what, values)


def index_array(values: Any, what: str) -> np.ndarray:
    """One-dimensional integers as int64."""
    array = to_numpy(values, what)
    if array.ndim != 1:
        raise ValueError(f"{what} must be one-dimensional, got the shape {list(array.shape)}")
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"{what} must be integers, got {array.dtype}")
    return array.astype(np.int64)


def check_positions(indices: np.ndarray, what: str, size: int, edge: int) -> None:
    """Refuse indices outside [0, size) or off the grid of `edge`."""
    if not indices.size:
        return
    if int(indices.min()) < 0 or int(indices.max()) >= size:
        wrong = indices[(indices < 0) | (indices >= size)][0]
        raise ValueError(f"{what} must lie in [0, {size}), got {wrong}")
    if (indices % edge).any():
        wrong = indices[indices % edge != 0][0]
        raise ValueError(f"{what} must be multiples of the block's {edge}, got {wrong}")


def check_offsets(offsets: np.ndarray, what: str, lines: int, total: int, step: int) -> None:
    """Refuse offsets that do not rise from 0 to `total` in steps of `step`."""
    if len(offsets) != lines + 1:
        raise ValueError(f"{what} must have {lines + 1} entries, got {len(offsets)}")
    if (offsets % step).any():
        wrong = offsets[offsets % step != 0][0]
        raise ValueError(f"{what} must be multiples of the block area {step}, got {wrong}")
    if offsets[0] != 0 or (np.diff(offsets) < 0).any():
        raise ValueError(f"{what} must begin with 0 and not decrease")
    if offsets[-1] != total:
        raise ValueError(f"{what} must end with the number of values {total}, got {offsets[-1]}")


def stable_order(keys: np.ndarray) -> np.ndarray:
    """The stable ascending order of non-negative integers; a radix sort where 16 bits suffice."""
    if keys.size == 0:
        return np.zeros(0, np.int64)
    if keys.dtype != np.uint16 and int(keys.max()) <= 65535:
        keys = keys.astype(np.uint16)
    return np.argsort(keys, kind="stable")


def row_major(blocks: Blocks) -> Blocks:
    """The blocks sorted by row, then column."""
    order = stable_order(blocks.col)
    order = order[stable_order(blocks.row[order])]
    return Blocks(*(a[order] for a in blocks))


def split_blocks(blocks: Blocks, by: tuple[int, int]) -> Blocks:
    """Each block as by[0] x by[1] smaller ones, sorted row-major."""
    n, height, width = blocks.data.shape
    small = (height // by[0], width // by[1])
    data = blocks.data.reshape(n, by[0], small[0], by[1], small[1]).transpose(0, 1, 3, 2, 4)
    row = blocks.row[:, None, None] * by[0] + np.arange(by[0])[:, None]
    col = blocks.col[:, None, None] * by[1] + np.arange(by[1])
    row, col = np.broadcast_arrays(row, col)
    return row_major(Blocks(row.ravel(), col.ravel(), data.reshape(-1, *small)))


def merge_blocks(blocks: Blocks, by: tuple[int, int], width: int) -> Blocks:
    """by[0] x by[1] blocks as one; every part must be there exactly once."""
    parts = by[0] * by[1]
    flat = blocks.row // by[0] * width + blocks.col // by[1]
    part = blocks.row % by[0] * by[1] + blocks.col % by[1]
    order = np.lexsort((part, flat))
    whole, counts = np.unique(flat, return_counts=True)
    expected = np.tile(np.arange(parts), len(whole))
    if (counts != parts).any() or (part[order] != expected).any():
        at = whole[counts != parts][:1].tolist() or whole[:1].tolist()
        raise ValueError(
            f"blocks cannot be merged {by[0]} x {by[1]}: not all {parts} parts of the block at "
            f"block row {at[0] // width}, column {at[0] % width} are there exactly once"
        )
    _, height, edge = blocks.data.shape
    data = blocks.data[order].reshape(-1, by[0], by[1], height, edge).transpose(0, 1, 3, 2, 4)
    return Blocks(whole // width, whole % width, data.reshape(-1, by[0] * height, by[1] * edge))


def offsets_of(lines: np.ndarray, count: int) -> np.ndarray:
    """How many of `lines` come before each of 0..count: int64 [count + 1]."""
    return np.append(0, np.cumsum(np.bincount(lines, minlength=count)))
