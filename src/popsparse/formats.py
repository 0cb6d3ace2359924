"""Formats of sparse matrices and lists of blocks.

As in PopSparse, indices count elements of the dense matrix, also for blocks (so they are multiples
of the block's sides), and offsets count values. Values of a block are row-major, in CSC
column-major. SciPy's matrices go through `SparsePattern.from_scipy` and `to_scipy`.

    matrix = CSRMatrix.from_pattern(pattern, values)
    pattern, values = matrix.to_csc().to_pattern()
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from dynsparse._core.checks import check_array, check_sizes
from dynsparse.pattern import SparsePattern


class Blocks(NamedTuple):
    """The intermediate form of conversions: block coordinates int64 [n], values [n, height,
    width]."""

    row: np.ndarray
    col: np.ndarray
    data: np.ndarray


def to_numpy(values: Any, what: str = "values") -> np.ndarray:
    """A tensor or array as an array of real numbers.

    Raises:
        TypeError: bfloat16, which NumPy does not have, or a type that is not numeric.
    """
    if isinstance(values, Tensor) and values.dtype == torch.bfloat16:
        raise TypeError(f"{what} must be float16, float32 or float64, got bfloat16: convert it")
    return check_array(what, values)


def index_array(values: Any, what: str) -> np.ndarray:
    """Convert one-dimensional integers to int64.

    Raises:
        ValueError: another number of dimensions. TypeError: numbers that are not integers.
    """
    array = to_numpy(values, what)
    if array.ndim != 1:
        raise ValueError(f"{what} must be one-dimensional, got the shape {list(array.shape)}")
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"{what} must be integers, got {array.dtype}")
    return array.astype(np.int64)


def check_positions(indices: np.ndarray, what: str, size: int, edge: int) -> None:
    """Raise ValueError for indices outside [0, size) or not multiples of `edge`."""
    if not indices.size:
        return
    if int(indices.min()) < 0 or int(indices.max()) >= size:
        wrong = indices[(indices < 0) | (indices >= size)][0]
        raise ValueError(f"{what} must lie in [0, {size}), got {wrong}")
    if (indices % edge).any():
        wrong = indices[indices % edge != 0][0]
        raise ValueError(f"{what} must be multiples of the block's {edge}, got {wrong}")


def check_offsets(offsets: np.ndarray, what: str, lines: int, total: int, step: int) -> None:
    """Raise ValueError for offsets that do not rise from 0 to `total` in multiples of `step`."""
    if len(offsets) != lines + 1:
        raise ValueError(f"{what} must have {lines + 1} entries, got {len(offsets)}")
    if (offsets % step).any():
        wrong = offsets[offsets % step != 0][0]
        raise ValueError(f"{what} must be multiples of the block area {step}, got {wrong}")
    if offsets[0] != 0 or (np.diff(offsets) < 0).any():
        raise ValueError(f"{what} must begin with 0 and not decrease")
    if offsets[-1] != total:
        raise ValueError(f"{what} must end with the number of values {total}, got {offsets[-1]}")


def stable_argsort(keys: np.ndarray) -> np.ndarray:
    """The stable ascending order of non-negative integers; a radix sort where 16 bits suffice."""
    if keys.size == 0:
        return np.zeros(0, np.int64)
    if keys.dtype != np.uint16 and int(keys.max()) <= 65535:
        keys = keys.astype(np.uint16)
    return np.argsort(keys, kind="stable")


def sort_row_major(blocks: Blocks) -> Blocks:
    """The blocks sorted by row, then column."""
    order = stable_argsort(blocks.col)
    order = order[stable_argsort(blocks.row[order])]
    return Blocks(*(a[order] for a in blocks))


def split_blocks(blocks: Blocks, by: tuple[int, int]) -> Blocks:
    """Each block as by[0] x by[1] smaller ones, sorted row-major."""
    n, height, width = blocks.data.shape
    small = (height // by[0], width // by[1])
    data = blocks.data.reshape(n, by[0], small[0], by[1], small[1]).transpose(0, 1, 3, 2, 4)
    row = blocks.row[:, None, None] * by[0] + np.arange(by[0])[:, None]
    col = blocks.col[:, None, None] * by[1] + np.arange(by[1])
    row, col = np.broadcast_arrays(row, col)
    return sort_row_major(Blocks(row.ravel(), col.ravel(), data.reshape(-1, *small)))


def merge_blocks(blocks: Blocks, by: tuple[int, int], width: int) -> Blocks:
    """Merge by[0] x by[1] blocks into one; every part must be present exactly once."""
    parts = by[0] * by[1]
    flat = blocks.row // by[0] * width + blocks.col // by[1]
    part = blocks.row % by[0] * by[1] + blocks.col % by[1]
    order = np.lexsort((part, flat))
    merged, counts = np.unique(flat, return_counts=True)
    expected = np.tile(np.arange(parts), len(merged))
    if (counts != parts).any() or (part[order] != expected).any():
        at = merged[counts != parts][:1].tolist() or merged[:1].tolist()
        raise ValueError(
            f"blocks cannot be merged {by[0]} x {by[1]}: not all {parts} parts of the block at "
            f"block row {at[0] // width}, column {at[0] % width} are there exactly once"
        )
    _, height, edge = blocks.data.shape
    data = blocks.data[order].reshape(-1, by[0], by[1], height, edge).transpose(0, 1, 3, 2, 4)
    return Blocks(merged // width, merged % width, data.reshape(-1, by[0] * height, by[1] * edge))


def count_before(lines: np.ndarray, count: int) -> np.ndarray:
    """How many of `lines` come before each of 0..count: int64 [count + 1]."""
    return np.append(0, np.cumsum(np.bincount(lines, minlength=count)))


M = TypeVar("M", bound="SparseMatrix")


def _check_pair(what: str, values: Sequence[int]) -> tuple[int, int]:
    rows, columns = check_sizes(what, values, ("rows", "columns"))
    return rows, columns


class SparseMatrix(ABC):
    """The base class of the formats.

    Args:
        nz_values: the values, [nnz * block area].
        column_indices, row_indices: integers; their meaning depends on the format.
        shape: rows and columns of the matrix in elements.
        block_dimensions: rows and columns of a block.

    Raises:
        ValueError: invalid shapes, offsets or indices. TypeError: wrong types.
    """

    def __init__(
        self,
        nz_values: Any,
        column_indices: Any,
        row_indices: Any,
        shape: Sequence[int],
        block_dimensions: Sequence[int] = (1, 1),
    ) -> None:
        self.shape = _check_pair("shape", shape)
        self.block_dimensions = _check_pair("block_dimensions", block_dimensions)
        for what, size, edge in zip(
            ("rows", "columns"), self.shape, self.block_dimensions, strict=True
        ):
            if size % edge:
                raise ValueError(f"{what} must be a multiple of the block's {edge}, got {size}")
        self.nz_values = to_numpy(nz_values, "nz_values")
        self.column_indices = index_array(column_indices, "column_indices")
        self.row_indices = index_array(row_indices, "row_indices")
        self._check()

    @abstractmethod
    def _check(self) -> None:
        """Raise ValueError for arrays that are not a matrix of the format."""

    @abstractmethod
    def blocks(self) -> Blocks:
        """Block coordinates and values [n, height, width], in the order stored."""

    @classmethod
    @abstractmethod
    def _of(cls: type[M], blocks: Blocks, shape: tuple[int, int], block: tuple[int, int]) -> M:
        """The matrix of some blocks."""

    # Checks the formats share.

    @property
    def area(self) -> int:
        return self.block_dimensions[0] * self.block_dimensions[1]

    def _check_values(self, blocks: int) -> None:
        if self.nz_values.shape != (blocks * self.area,):
            raise ValueError(
                f"nz_values must have {blocks} blocks x {self.area} = {blocks * self.area} values, "
                f"got the shape {list(self.nz_values.shape)}"
            )

    # Conversions.

    def _check_and_list_blocks(self) -> Blocks:
        self._check()  # The arrays may have been replaced since construction.
        return self.blocks()

    def _as(self, kind: type[M]) -> M:
        return kind._of(self._check_and_list_blocks(), self.shape, self.block_dimensions)

    def to_coo(self) -> COOMatrix:
        return self._as(COOMatrix)

    def to_csr(self) -> CSRMatrix:
        return self._as(CSRMatrix)

    def to_csc(self) -> CSCMatrix:
        return self._as(CSCMatrix)

    def canonical(self: M) -> M:
        """The same matrix sorted: row-major (CSC column-major)."""
        return self._as(type(self))

    def transposed(self: M) -> M:
        """The transposed matrix, in the same format."""
        row, col, data = self._check_and_list_blocks()
        swapped = Blocks(col, row, data.transpose(0, 2, 1))
        return type(self)._of(swapped, self.shape[::-1], self.block_dimensions[::-1])

    def with_blocks(self: M, block_dimensions: Sequence[int]) -> M:
        """The same matrix in smaller blocks that divide its own; COO in larger ones too.

        Raises:
            ValueError: sides that do not divide each other, or larger blocks some of whose parts
                are missing.
        """
        new = _check_pair("block_dimensions", block_dimensions)
        old = self.block_dimensions
        blocks = self._check_and_list_blocks()
        if all(o % n == 0 for o, n in zip(old, new, strict=True)):
            blocks = split_blocks(blocks, (old[0] // new[0], old[1] // new[1]))
        elif isinstance(self, (CSRMatrix, CSCMatrix)):
            raise ValueError(
                f"blocks of {old} can only become smaller ones that divide them, got {new}: "
                "convert to COO first to merge blocks"
            )
        elif all(n % o == 0 for o, n in zip(old, new, strict=True)):
            if self.shape[0] % new[0] or self.shape[1] % new[1]:
                raise ValueError(f"blocks of {new} do not divide the matrix {self.shape}")
            blocks = merge_blocks(
                blocks, (new[0] // old[0], new[1] // old[1]), self.shape[1] // new[1]
            )
        else:
            raise ValueError(f"blocks of {old} and {new} do not divide each other")
        return type(self)._of(blocks, self.shape, new)

    @classmethod
    def from_pattern(cls: type[M], pattern: SparsePattern, values: Any) -> M:
        """Create the matrix of a pattern and its values, [nnz] or [nnz, b, b]."""
        array = to_numpy(values)
        if array.shape != pattern.values_shape:
            raise ValueError(
                f"values must have the shape {list(pattern.values_shape)}, got {list(array.shape)}"
            )
        b = pattern.block_size
        rows, cols = (a.numpy().astype(np.int64) for a in (pattern.rows, pattern.cols))
        return cls._of(Blocks(rows, cols, array.reshape(-1, b, b)), pattern.shape, (b, b))

    def to_pattern(self) -> tuple[SparsePattern, Tensor]:
        """The pattern and its values; blocks must be square.

        Raises:
            ValueError: blocks that are not square, or a position stored twice.
        """
        edge, other = self.block_dimensions
        if edge != other:
            raise ValueError(
                f"a pattern has square blocks, got {self.block_dimensions}: "
                f"use with_blocks(({min(edge, other)}, {min(edge, other)})) or smaller"
            )
        row, col, data = sort_row_major(self._check_and_list_blocks())
        pattern = SparsePattern(row, col, shape=self.shape, block_size=edge)
        return pattern, torch.from_numpy(np.ascontiguousarray(data.reshape(pattern.values_shape)))

    def to_dense(self) -> np.ndarray:
        """The dense matrix; duplicate positions are summed."""
        row, col, data = self._check_and_list_blocks()
        height, width = self.block_dimensions
        grid = (self.shape[0] // height, self.shape[1] // width)
        out = np.zeros((*grid, height, width), data.dtype)
        np.add.at(out, (row, col), data)
        return out.transpose(0, 2, 1, 3).reshape(self.shape)

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other) or not isinstance(other, SparseMatrix):
            return NotImplemented
        return (
            (self.shape, self.block_dimensions) == (other.shape, other.block_dimensions)
            and np.array_equal(self.nz_values, other.nz_values)
            and np.array_equal(self.column_indices, other.column_indices)
            and np.array_equal(self.row_indices, other.row_indices)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        blocks = self.nz_values.size // self.area
        return (
            f"{type(self).__name__}(shape={self.shape}, block_dimensions={self.block_dimensions}, "
            f"blocks={blocks}, dtype={self.nz_values.dtype})"
        )


class COOMatrix(SparseMatrix):
    """Row and column of each block's first element, in any order."""

    def _check(self) -> None:
        if len(self.row_indices) != len(self.column_indices):
            raise ValueError(
                "row_indices and column_indices must have the same length, got "
                f"{len(self.row_indices)} and {len(self.column_indices)}"
            )
        self._check_values(len(self.row_indices))
        (rows, cols), (height, width) = self.shape, self.block_dimensions
        check_positions(self.row_indices, "row_indices", rows, height)
        check_positions(self.column_indices, "column_indices", cols, width)

    def blocks(self) -> Blocks:
        height, width = self.block_dimensions
        data = self.nz_values.reshape(-1, height, width)
        return Blocks(self.row_indices // height, self.column_indices // width, data)

    @classmethod
    def _of(cls, blocks: Blocks, shape: tuple[int, int], block: tuple[int, int]) -> COOMatrix:
        row, col, data = sort_row_major(blocks)
        return cls(data.ravel(), col * block[1], row * block[0], shape, block)


class CSRMatrix(SparseMatrix):
    """A column for each block; `row_indices` [rows / height + 1] count the values before each block
    row."""

    def _check(self) -> None:
        (rows, cols), (height, width) = self.shape, self.block_dimensions
        total = self.nz_values.size
        check_offsets(self.row_indices, "row_indices", rows // height, total, self.area)
        self._check_values(len(self.column_indices))
        check_positions(self.column_indices, "column_indices", cols, width)

    def blocks(self) -> Blocks:
        height, width = self.block_dimensions
        lines = np.diff(self.row_indices) // self.area
        row = np.repeat(np.arange(len(lines)), lines)
        return Blocks(row, self.column_indices // width, self.nz_values.reshape(-1, height, width))

    @classmethod
    def _of(cls, blocks: Blocks, shape: tuple[int, int], block: tuple[int, int]) -> CSRMatrix:
        row, col, data = sort_row_major(blocks)
        offsets = count_before(row, shape[0] // block[0]) * (block[0] * block[1])
        return cls(data.ravel(), col * block[1], offsets, shape, block)


class CSCMatrix(SparseMatrix):
    """A row for each block, whose values are column-major; `column_indices` [columns / width + 1]
    count the values before each block column."""

    def _check(self) -> None:
        (rows, cols), (height, width) = self.shape, self.block_dimensions
        total = self.nz_values.size
        check_offsets(self.column_indices, "column_indices", cols // width, total, self.area)
        self._check_values(len(self.row_indices))
        check_positions(self.row_indices, "row_indices", rows, height)

    def blocks(self) -> Blocks:
        height, width = self.block_dimensions
        lines = np.diff(self.column_indices) // self.area
        col = np.repeat(np.arange(len(lines)), lines)
        data = self.nz_values.reshape(-1, width, height).transpose(0, 2, 1)
        return Blocks(self.row_indices // height, col, data)

    @classmethod
    def _of(cls, blocks: Blocks, shape: tuple[int, int], block: tuple[int, int]) -> CSCMatrix:
        order = np.lexsort((blocks.row, blocks.col))
        row, col, data = (a[order] for a in blocks)
        offsets = count_before(col, shape[1] // block[1]) * (block[0] * block[1])
        return cls(data.transpose(0, 2, 1).ravel(), offsets, row * block[0], shape, block)
