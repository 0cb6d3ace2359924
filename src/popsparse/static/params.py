"""What a static product multiplies, its options, and the plans made earlier.

Names follow PopSparse's `static_::MatMulParams` and its options, in snake case.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dynsparse.checks import check_integer
from dynsparse.pattern import SparsePattern
from popsparse.encoding.formats import SparseMatrix
from popsparse.planning.options import flag, parse_options
from popsparse.planning.params import number

BLOCK_SIZES = (1, 4, 8, 16)
"""Blocks that have a kernel."""


@dataclass(frozen=True)
class MatmulParams:
    """Sizes of a static product: sparse [groups, m, k] times dense [groups, k, n].

    `transposed` marks the product dense [groups, n, k] times sparse [groups, k, m], which is
    computed as the transposed one. Use `create_for_sparse_dense` or `create_for_dense_sparse`.

    Raises:
        ValueError, TypeError: a size that is no positive integer; groups other than 1.
    """

    groups: int
    m: int
    k: int
    n: int
    transposed: bool = False

    def __post_init__(self) -> None:
        for name in ("groups", "m", "k", "n"):
            object.__setattr__(self, name, check_integer(name, getattr(self, name), 1))
        if self.groups != 1:
            raise ValueError(
                f"a static product has one group, got {self.groups}: make one product a group, "
                "since each has its own pattern"
            )

    @classmethod
    def create_for_sparse_dense(cls, groups: int, m: int, k: int, n: int) -> MatmulParams:
        """Sparse [groups, m, k] x dense [groups, k, n]."""
        return cls(groups, m, k, n)

    @classmethod
    def create_for_dense_sparse(cls, groups: int, n: int, k: int, m: int) -> MatmulParams:
        """Dense [groups, n, k] x sparse [groups, k, m]."""
        return cls(groups, m, k, n, True)

    @property
    def sparse_shape(self) -> tuple[int, int]:
        """The sparse operand's shape as the user has it."""
        return (self.k, self.m) if self.transposed else (self.m, self.k)


@dataclass(frozen=True)
class Options:
    """Options of a static product. Partial sums have the type of the data.

    Attributes:
        available_memory_proportion: the part of a tile the plan's temporary data may take. (0.6)
        num_bands: column bands; 0 leaves them to the planner. (0)
        n_split: parts of the dense operand's n columns; 0 leaves them to the planner. (0)
        enable_preprocessing: rows and columns with hardly any non-zeros are set apart while
            planning. (True)

    Raises:
        ValueError, TypeError: an option out of range or of the wrong type.
    """

    available_memory_proportion: float = 0.6
    num_bands: int = 0
    n_split: int = 0
    enable_preprocessing: bool = True

    def __post_init__(self) -> None:
        share = number(self.available_memory_proportion, "available_memory_proportion", 0.0, 1e6)
        object.__setattr__(self, "available_memory_proportion", share)
        for name in ("num_bands", "n_split"):
            object.__setattr__(self, name, check_integer(name, getattr(self, name), 0))
        flag(self.enable_preprocessing, "enable_preprocessing")

    @classmethod
    def parse(cls, value: Options | Mapping[str, Any] | None) -> Options:
        """Options from a mapping; unknown names are an error that names the nearest known one."""
        return parse_options(cls, value)


def pattern_of(matrix: Any, params: MatmulParams) -> tuple[SparsePattern, np.ndarray | None]:
    """The pattern [m, k] to multiply with, and the values [nnz, b, b] if the matrix has some.

    Args:
        matrix: a `SparseMatrix` or a `SparsePattern` of the shape `params.sparse_shape`.

    Raises:
        ValueError: another shape, or blocks without a kernel. TypeError: something else.
    """
    values = None
    if isinstance(matrix, SparseMatrix):
        pattern, tensor = matrix.to_pattern()
        values = tensor.numpy().reshape(-1, pattern.block_size, pattern.block_size)
    elif isinstance(matrix, SparsePattern):
        pattern = matrix
    else:
        raise TypeError(
            "the sparse operand must be a COO, CSR, CSC or BSR matrix or a SparsePattern, got "
            f"{type(matrix).__name__}"
        )
    if tuple(pattern.shape) != params.sparse_shape:
        raise ValueError(
            f"the sparse operand must have the shape {list(params.sparse_shape)}, "
            f"got {list(pattern.shape)}"
        )
    if pattern.block_size not in BLOCK_SIZES:
        raise ValueError(
            f"static products take blocks of {', '.join(map(str, BLOCK_SIZES))}, got "
            f"{pattern.block_size}: split the blocks"
        )
    if not params.transposed:
        return pattern, values
    turned = SparsePattern(
        pattern.cols, pattern.rows, shape=pattern.shape[::-1], block_size=pattern.block_size
    )
    if values is not None:
        order = np.lexsort((pattern.rows.numpy(), pattern.cols.numpy()))
        values = values[order].transpose(0, 2, 1)
    return turned, values
