"""Patterns in few bytes, as files of weights hold them.

Blocks are numbered in row-major order. A pattern is one uint8 tensor, of the two the shorter:

    mask  [ceil(blocks / 8)]: bit i % 8 of byte i // 8, counted from the lowest, is 1 if block i is
          present
    gaps  [n]: for each present block the number of absent ones before it, since the last present
          one; a byte of 255 stands for 255 absent blocks, and the next byte goes on counting
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dynsparse._core.checks import shorten
from dynsparse.pattern.coordinates import block_grid
from dynsparse.pattern.index_arrays import unpack_entries
from dynsparse.pattern.sparse_pattern import SparsePattern

PACKED = ("gaps", "mask")
"""The names of the two forms."""

_MORE = 255  # a byte of `gaps` that the next one continues


def pack(flat: Tensor, total: int) -> tuple[str, Tensor]:
    """Pack a pattern; return its form, "gaps" or "mask", and its bytes.

    Args:
        flat: sorted, distinct positions of the present blocks, int64 [nnz].
        total: how many blocks the matrix has.
    """
    positions = flat.cpu().numpy()
    gaps = np.diff(positions, prepend=-1) - 1
    more, rest = np.divmod(gaps, _MORE)
    if len(gaps) + int(more.sum()) < -(-total // 8):
        ends = np.cumsum(more + 1)
        packed = np.full(int(ends[-1]) if len(ends) else 0, _MORE, np.uint8)
        packed[ends - 1] = rest
        return "gaps", torch.from_numpy(packed)
    present = np.zeros(total, np.bool_)
    present[positions] = True
    return "mask", torch.from_numpy(np.packbits(present, bitorder="little"))


def unpack(
    tensors: Mapping[str, Any], prefix: str, shape: tuple[int, int], values: Tensor
) -> SparsePattern | None:
    """Unpack the pattern that `tensors` hold under names with this prefix; None without one.

    The memory it takes is in proportion to the tensors of the file.

    Args:
        shape: (out_features, in_features).
        values: the values of the blocks, [nnz] or [nnz, b, b].

    Raises:
        ValueError: another number of blocks than of values, positions outside the matrix.
    """
    name = next((name for name in PACKED if prefix + name in tensors), None)
    if name is None:
        return None
    packed, block = tensors[prefix + name], 1 if values.dim() == 1 else values.shape[1]
    if not isinstance(packed, Tensor) or packed.dtype != torch.uint8 or packed.dim() != 1:
        raise ValueError(f"{name} must be uint8 [n], got {shorten(packed)}")
    shape, block, grid = block_grid(shape, block)
    bytes_ = packed.detach().cpu().contiguous()
    if (entries := unpack_entries(bytes_, name == "gaps", grid, len(values))) is not None:
        return SparsePattern._from_entries(*entries, shape=shape, block_size=block)
    read = _read_gaps if name == "gaps" else _read_mask
    flat = read(bytes_.numpy(), grid[0] * grid[1], len(values))
    return SparsePattern.from_flat(torch.from_numpy(flat), shape=shape, block_size=block)


def _read_gaps(packed: np.ndarray, total: int, nnz: int) -> np.ndarray:
    last = packed != _MORE
    count = int(np.count_nonzero(last))
    if count != nnz or (len(last) and not last[-1]):
        raise ValueError(f"expected the gaps of {nnz} blocks, got those of {count}")
    flat = np.cumsum(packed, dtype=np.int64)[last] + np.arange(nnz)
    if nnz and flat[-1] >= total:
        raise ValueError(f"the last block is number {flat[-1]} of {total}")
    return flat


def _read_mask(packed: np.ndarray, total: int, nnz: int) -> np.ndarray:
    if len(packed) != -(-total // 8):
        raise ValueError(f"expected a mask of {total} blocks, got {len(packed)} bytes")
    present = np.unpackbits(packed, bitorder="little")
    count = int(np.count_nonzero(present))
    if count != nnz or present[total:].any():
        raise ValueError(f"expected a mask with {nnz} blocks of {total}, got {count}")
    return np.flatnonzero(present).astype(np.int64, copy=False)
