"""Which blocks of a matrix are present, and how one such choice turns into the next.

Everything above this file talks in `SparsePattern` and `Rewiring`: layers hold a pattern, pattern
updates produce a rewiring, optimizer states and records follow by applying it.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse
import torch
from torch import Tensor

from dynsparse.encoding import by_columns, follow_, merge, row_pointers, split_flat

__all__ = ["PatternIndex", "Rewiring", "SparsePattern"]

_INT32_MAX = 2**31 - 1


class PatternIndex(NamedTuple):
    """The index tensors the sparse products take: CSR, and CSC with its permutation. All int32.

    `row_ptr` [out/b + 1] and `cols` [nnz] are the pattern by block rows. `col_ptr` [in/b + 1] and
    `csc_rows` [nnz] are the same blocks by columns; entry p of that order is slot `csc_perm[p]`
    of the row-major order.
    """

    row_ptr: Tensor
    cols: Tensor
    col_ptr: Tensor
    csc_rows: Tensor
    csc_perm: Tensor


def _integer(value: Any, what: str, least: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{what} must be an integer, got {value!r}") from None
    if isinstance(value, bool) or number < least:
        raise ValueError(f"{what} must be an integer of at least {least}, got {value!r}")
    return number


def _block_grid(shape: Any, block_size: Any) -> tuple[tuple[int, int], int, tuple[int, int]]:
    """Checked (shape, block size, shape in blocks)."""
    if not isinstance(shape, Sequence) or isinstance(shape, str) or len(shape) != 2:
        raise ValueError(f"shape must be (out_features, in_features), got {shape!r}")
    out_features = _integer(shape[0], "out_features", 1)
    in_features = _integer(shape[1], "in_features", 1)
    block = _integer(block_size, "block_size", 1)
    if out_features % block or in_features % block:
        raise ValueError(
            f"block_size {block} does not divide the shape {(out_features, in_features)}: "
            "choose a block size that divides both, or pad the features"
        )
    grid = (out_features // block, in_features // block)
    if max(grid) > _INT32_MAX:
        raise ValueError(f"block coordinates are int32, a grid of {grid} blocks is too large")
    return (out_features, in_features), block, grid


def _coordinates(values: Any, what: str, bound: int) -> np.ndarray:
    array = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"{what} must be one-dimensional, got the shape {tuple(array.shape)}")
    if array.size == 0:
        return np.zeros(0, np.int64)
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"{what} must be integers, got {array.dtype}")
    array = array.astype(np.int64, copy=False)
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= bound:
        wrong = low if low < 0 else high
        raise ValueError(f"{what} must lie in [0, {bound}), got {wrong}")
    return array


def sample_without_replacement(
    population: int, count: int, generator: torch.Generator | None = None
) -> Tensor:
    """`count` distinct integers of [0, population), uniform over subsets, sorted, int64.

    Memory is in proportion to `count`, not to `population`: the numbers are drawn one round after
    another, each round as many as are still missing, and repeats are thrown away.
    """
    if count > population:
        raise ValueError(f"cannot draw {count} distinct positions from {population}")
    if 2 * count >= population:
        return torch.randperm(population, generator=generator)[:count].sort().values
    drawn = np.zeros(0, np.int64)
    while (missing := count - len(drawn)) > 0:
        more = torch.randint(population, (missing,), generator=generator).numpy()
        drawn = np.concatenate([drawn, more])
        drawn.sort()
        drawn = drawn[np.concatenate([[True], drawn[1:] != drawn[:-1]])]
    return torch.from_numpy(drawn)


class SparsePattern:
    """Which blocks of an [out, in] matrix are present. Immutable; lives on the CPU.

    Args:
        rows, cols: block coordinates, integers [nnz], in any order, without duplicates.
        shape: (out_features, in_features) in elements.
        block_size: edge of the square blocks; 1 is unstructured sparsity. Must divide the shape.

    Raises:
        ValueError: a coordinate out of range, duplicates, lengths that differ, a block size that
            does not divide the shape.
        TypeError: coordinates that are not integers.
    """

    def __init__(self, rows: Any, cols: Any, *, shape: Sequence[int], block_size: int = 1) -> None:
        shape, block_size, grid = _block_grid(shape, block_size)
        row = _coordinates(rows, "rows", grid[0])
        col = _coordinates(cols, "cols", grid[1])
        if len(row) != len(col):
            raise ValueError(f"rows and cols differ in length: {len(row)} and {len(col)}")
        flat = np.sort(row * grid[1] + col)
        if len(flat) > 1 and (repeats := flat[1:] == flat[:-1]).any():
            r, c = divmod(int(flat[1:][repeats][0]), grid[1])
            raise ValueError(
                f"{int(repeats.sum())} duplicate coordinates, the first is (row {r}, col {c})"
            )
        self._set(torch.from_numpy(flat), shape, block_size)

    def _set(self, flat: Tensor, shape: tuple[int, int], block_size: int) -> None:
        if len(flat) > _INT32_MAX:
            raise ValueError(f"at most {_INT32_MAX} blocks fit a pattern, got {len(flat)}")
        self.shape = shape
        self.block_size = block_size
        self.rows, self.cols = split_flat(flat, self.grid[1])

    @classmethod
    def from_flat(cls, flat: Tensor, *, shape: Sequence[int], block_size: int = 1) -> SparsePattern:
        """From sorted, distinct flat block positions (row * (in/b) + col), int64 [nnz]."""
        shape, block_size, grid = _block_grid(shape, block_size)
        if flat.dtype != torch.int64 or flat.dim() != 1:
            raise TypeError(
                f"flat positions must be int64 [nnz], got {flat.dtype} {list(flat.shape)}"
            )
        if len(flat):
            if not bool((flat[1:] > flat[:-1]).all()):
                raise ValueError("flat positions must be sorted and distinct")
            if int(flat[0]) < 0 or int(flat[-1]) >= grid[0] * grid[1]:
                raise ValueError(f"flat positions must lie in [0, {grid[0] * grid[1]})")
        pattern = cls.__new__(cls)
        pattern._set(flat, shape, block_size)
        return pattern

    @classmethod
    def random(
        cls,
        shape: Sequence[int],
        density: float | None = None,
        *,
        nnz: int | None = None,
        block_size: int = 1,
        generator: torch.Generator | None = None,
    ) -> SparsePattern:
        """A uniformly random pattern with an exact number of blocks.

        Give either `density` in [0, 1] (the count is rounded to the nearest block) or `nnz`.
        Memory is in proportion to the blocks drawn, not to the matrix.
        """
        shape, block_size, grid = _block_grid(shape, block_size)
        total = grid[0] * grid[1]
        if (density is None) == (nnz is None):
            raise ValueError("give either density or nnz, and not both")
        if density is not None:
            if not isinstance(density, (int, float)) or not 0 <= density <= 1:
                raise ValueError(f"density must be a number in [0, 1], got {density!r}")
            nnz = round(density * total)
        count = _integer(nnz, "nnz", 0)
        if count > total:
            raise ValueError(f"nnz {count} is more than the {total} blocks of the shape {shape}")
        flat = sample_without_replacement(total, count, generator)
        return cls.from_flat(flat, shape=shape, block_size=block_size)

    @classmethod
    def full(cls, shape: Sequence[int], *, block_size: int = 1) -> SparsePattern:
        """Every block present."""
        return cls.random(shape, density=1.0, block_size=block_size)

    @classmethod
    def from_mask(cls, mask: Any, block_size: int = 1) -> SparsePattern:
        """The blocks of which any element of `mask` (bool or number, [out, in]) is non-zero."""
        mask = torch.as_tensor(mask).detach().cpu()
        if mask.dim() != 2:
            raise ValueError(f"mask must be [out, in], got the shape {list(mask.shape)}")
        shape, block_size, grid = _block_grid(tuple(mask.shape), block_size)
        present = (mask != 0).view(grid[0], block_size, grid[1], block_size).any(3).any(1)
        return cls.from_flat(
            present.flatten().nonzero().flatten(), shape=shape, block_size=block_size
        )

    @classmethod
    def from_scipy(cls, matrix: Any, block_size: int | None = None) -> SparsePattern:
        """The stored positions of a SciPy sparse matrix, explicit zeros included.

        A BSR matrix of square blocks keeps its block size; other formats become elements, or
        blocks of `block_size` with any stored element. `values_of` gives the values.
        """
        if not scipy.sparse.issparse(matrix):
            raise TypeError(f"expected a SciPy sparse matrix, got {type(matrix).__name__}")
        if matrix.format == "bsr" and block_size is None:
            height, width = matrix.blocksize
            if height != width:
                raise ValueError(f"only square blocks are supported, got {matrix.blocksize}")
            block_size = height
            rows = np.repeat(np.arange(len(matrix.indptr) - 1), np.diff(matrix.indptr))
            return cls(rows, matrix.indices, shape=matrix.shape, block_size=block_size)
        block = 1 if block_size is None else block_size
        shape, block, grid = _block_grid(tuple(matrix.shape), block)
        coo = matrix.tocoo()
        flat = (coo.row.astype(np.int64) // block) * grid[1] + coo.col // block
        # Repeated entries of a COO matrix mean one position, and so do the elements of a block.
        return cls.from_flat(torch.from_numpy(np.unique(flat)), shape=shape, block_size=block)

    @property
    def grid(self) -> tuple[int, int]:
        """The shape in blocks."""
        return self.shape[0] // self.block_size, self.shape[1] // self.block_size

    @property
    def total(self) -> int:
        """How many blocks the matrix has, present or not."""
        return self.grid[0] * self.grid[1]

    @property
    def flat(self) -> Tensor:
        """Flat block positions (row * (in/b) + col), sorted, int64 [nnz]; computed at each call."""
        return self.rows.long().mul_(self.grid[1]).add_(self.cols)

    @property
    def nnz(self) -> int:
        """How many blocks are present."""
        return len(self.rows)

    @property
    def density(self) -> float:
        """Present blocks / all blocks."""
        return self.nnz / self.total

    @property
    def values_shape(self) -> tuple[int, ...]:
        """The shape of a values tensor of this pattern: [nnz] or [nnz, b, b]."""
        b = self.block_size
        return (self.nnz,) if b == 1 else (self.nnz, b, b)

    @cached_property
    def row_ptr(self) -> Tensor:
        """Where each block row's slots begin, int32 [out/b + 1]."""
        return row_pointers(self.rows, self.grid[0])

    @cached_property
    def index(self) -> PatternIndex:
        """The kernels' index tensors, made once per pattern."""
        return PatternIndex(
            self.row_ptr, self.cols, *by_columns(self.row_ptr, self.cols, self.grid[1])
        )

    def forget_index(self) -> None:
        """Free the memory of `index`; it is made again when asked for."""
        self.__dict__.pop("index", None)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SparsePattern):
            return NotImplemented
        return (
            self.shape == other.shape
            and self.block_size == other.block_size
            and torch.equal(self.rows, other.rows)
            and torch.equal(self.cols, other.cols)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return (
            f"SparsePattern(shape={self.shape}, block_size={self.block_size}, nnz={self.nnz}, "
            f"density={self.density:.4g})"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {k: getattr(self, k) for k in ("rows", "cols", "shape", "block_size")}

    def __deepcopy__(self, memo: dict[int, Any]) -> SparsePattern:
        return self  # immutable

    def contains(self, flat: Tensor) -> Tensor:
        """Whether each flat block position (int64 [n]) is present: bool [n]."""
        if self.nnz == 0:
            return torch.zeros(len(flat), dtype=torch.bool)
        own = self.flat
        slot = torch.searchsorted(own, flat).clamp_(max=self.nnz - 1)
        return own[slot] == flat

    def _check_values(self, values: Tensor) -> None:
        if tuple(values.shape) != self.values_shape:
            raise ValueError(
                f"values must have the shape {list(self.values_shape)} for {self}, "
                f"got {list(values.shape)}"
            )

    def to_mask(self) -> Tensor:
        """bool [out, in], True at every element of a present block."""
        ones = torch.ones(self.values_shape, dtype=torch.bool)
        return self.to_dense(ones)

    def to_dense(self, values: Tensor) -> Tensor:
        """`values` ([nnz] or [nnz, b, b]) laid out in an [out, in] tensor of zeros.

        Differentiable; dtype and device are those of `values`.
        """
        self._check_values(values)
        height, width = self.grid
        b = self.block_size
        dense = values.new_zeros(self.total, b * b)
        dense = dense.index_put((self.flat.to(values.device),), values.reshape(-1, b * b))
        return dense.view(height, width, b, b).transpose(1, 2).reshape(self.shape)

    def values_of(self, matrix: Any) -> Tensor:
        """The entries of `matrix` at this pattern: [nnz] or [nnz, b, b].

        `matrix` is [out, in]: a tensor (differentiable), an array, or a SciPy sparse matrix, whose
        missing entries are zero.
        """
        if tuple(matrix.shape) != self.shape:
            raise ValueError(
                f"matrix must have the shape {list(self.shape)}, got {list(matrix.shape)}"
            )
        b = self.block_size
        if scipy.sparse.issparse(matrix):
            return self._values_of_scipy(matrix)
        matrix = torch.as_tensor(matrix)
        height, width = self.grid
        blocks = matrix.view(height, b, width, b)[
            self.rows.to(matrix.device).long(), :, self.cols.to(matrix.device).long()
        ]
        return blocks.reshape(self.values_shape)

    def _values_of_scipy(self, matrix: Any) -> Tensor:
        b, width = self.block_size, self.grid[1]
        coo = matrix.tocoo()
        coo.sum_duplicates()
        flat = torch.from_numpy((coo.row.astype(np.int64) // b) * width + coo.col // b)
        inside = self.contains(flat).numpy()
        slot = np.searchsorted(self.flat.numpy(), flat.numpy()[inside])
        values = np.zeros((self.nnz, b, b), coo.data.dtype)
        values[slot, coo.row[inside] % b, coo.col[inside] % b] = coo.data[inside]
        return torch.from_numpy(values.reshape(self.values_shape))

    def to_scipy(self, values: Any, format: str | None = None) -> Any:
        """A SciPy sparse array with `values` at this pattern.

        `format` is any of SciPy's; by default CSR for elements and BSR for blocks.
        """
        tensor = torch.as_tensor(values).detach().cpu()
        self._check_values(tensor)
        row_ptr, cols = self.index.row_ptr.numpy(), self.cols.numpy()
        if self.block_size == 1:
            matrix = scipy.sparse.csr_array((tensor.numpy(), cols, row_ptr), shape=self.shape)
            return matrix if format is None else matrix.asformat(format)
        matrix = scipy.sparse.bsr_array((tensor.numpy(), cols, row_ptr), shape=self.shape)
        return matrix if format in (None, "bsr") else matrix.asformat(format)


@dataclass(frozen=True)
class Rewiring:
    """One pattern update: the pattern before, the pattern after, and where each new slot is from.

    `source` is int32 [after.nnz]: the old slot a new slot comes from, or -1 for a grown one.
    """

    before: SparsePattern
    after: SparsePattern
    source: Tensor

    @classmethod
    def make(cls, pattern: SparsePattern, drop: Tensor, grow: Tensor) -> Rewiring:
        """Drop slots and grow positions.

        Args:
            pattern: the pattern before.
            drop: the slots that leave, int64 [any], distinct, in any order.
            grow: the flat block positions that join, int64 [any], distinct, in any order. A
                position may join only if it is free once `drop` has left.

        Raises:
            ValueError: a slot or position out of range or named twice, or a position that is taken.
        """
        drop = torch.as_tensor(drop, dtype=torch.int64).cpu().flatten()
        grow = torch.as_tensor(grow, dtype=torch.int64).cpu().flatten()
        merged = merge(pattern.row_ptr, pattern.rows, pattern.cols, pattern.grid[1], drop, grow)
        if len(merged.cols) > _INT32_MAX:
            raise ValueError(f"at most {_INT32_MAX} blocks fit a pattern, got {len(merged.cols)}")
        after = SparsePattern.__new__(SparsePattern)
        after.shape, after.block_size = pattern.shape, pattern.block_size
        after.row_ptr, after.rows, after.cols = merged.row_ptr, merged.rows, merged.cols
        return cls(pattern, after, merged.source)

    @classmethod
    def between(cls, before: SparsePattern, after: SparsePattern) -> Rewiring:
        """The rewiring that leads from one pattern to another of the same shape and block size."""
        if (before.shape, before.block_size) != (after.shape, after.block_size):
            raise ValueError(f"{before} and {after} differ in shape or block size")
        positions = after.flat
        stays = before.contains(positions)
        source = torch.full((after.nnz,), -1, dtype=torch.int32)
        source[stays] = torch.searchsorted(before.flat, positions[stays], out_int32=True)
        return cls(before, after, source)

    @property
    def keeps_size(self) -> bool:
        """Whether as many blocks are there after as before."""
        return self.after.nnz == self.before.nnz

    @property
    def grown(self) -> Tensor:
        """The new slots that were grown, int64."""
        return (self.source < 0).nonzero().flatten()

    @property
    def dropped(self) -> Tensor:
        """The old slots that left, int64."""
        leaves = torch.ones(self.before.nnz, dtype=torch.bool)
        leaves[self.source[self.source >= 0].long()] = False
        return leaves.nonzero().flatten()

    def apply(self, tensor: Tensor, fill: float | Tensor = 0.0) -> Tensor:
        """`tensor` ([before.nnz, ...]) in the order of the new slots: a new tensor.

        Survivors keep their entries; grown slots get `fill`, a number or a tensor
        [grown, ...] in slot order.
        """
        self._check_leading(tensor)
        source = self.source.to(tensor.device)
        if self.before.nnz:
            out = tensor.index_select(0, source.clamp(min=0))
        else:
            out = tensor.new_empty((self.after.nnz, *tensor.shape[1:]))
        out[source < 0] = fill.to(out) if isinstance(fill, Tensor) else fill
        return out

    def apply_(self, *tensors: Tensor, fill: float | Tensor = 0.0) -> None:
        """What `apply` does, in place: `tensors` keep their memory and need no more of it.

        Only for rewirings that keep the number of blocks.
        """
        for tensor in tensors:
            self._check_leading(tensor)
        if not self.keeps_size:
            raise ValueError(
                f"{self.before.nnz} blocks become {self.after.nnz}, which tensors cannot follow in "
                "place: use apply()"
            )
        follow_(tensors, self.source)
        if isinstance(fill, Tensor) or fill != 0:
            for tensor in tensors:
                grown = self.grown.to(tensor.device)
                tensor[grown] = fill.to(tensor) if isinstance(fill, Tensor) else fill

    def _check_leading(self, tensor: Tensor) -> None:
        if tensor.dim() == 0 or len(tensor) != self.before.nnz:
            raise ValueError(
                f"expected a tensor with {self.before.nnz} leading entries, "
                f"got the shape {list(tensor.shape)}"
            )
