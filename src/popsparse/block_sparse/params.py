"""What a block-sparse product multiplies, and its options.

Names follow PopSparse's experimental `BSMatMulParams` and its options, in snake case.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dynsparse.checks import check_array, check_choice, check_flag, check_integer
from dynsparse.files.shorten import shortened
from dynsparse.pattern import SparsePattern
from popsparse.planning.options import parse_options
from popsparse.planning.params import FLOAT16, FLOAT32, DataType, data_type, number

SUBBLOCK_MASKS = ("none", "zero_upper_triangle", "zero_lower_triangle")
METHODS = ("strip", "stripv0", "block", "block-naive", "block-group2")
"""How the products are dealt to the tiles, see `partition`."""


def mask_of(sparsity: Any, groups: int, rows: int, cols: int) -> np.ndarray:
    """bool [groups, rows, cols] of a `SparsePattern` of all groups one below the other, or of a
    mask of blocks.

    Raises:
        ValueError: another number of blocks. TypeError: neither.
    """
    wanted = groups * rows * cols
    if isinstance(sparsity, SparsePattern):
        grid = sparsity.grid
        if grid != (groups * rows, cols):
            raise ValueError(
                f"the pattern must have {groups * rows} x {cols} blocks, got {grid[0]} x {grid[1]}"
            )
        found = np.zeros(wanted, bool)
        found[sparsity.flat.numpy()] = True
        return found.reshape(groups, rows, cols)
    array = check_array("sparsity", sparsity, "biuf", "a SparsePattern or a mask of blocks")
    if array.size % groups:
        raise ValueError(f"the mask's {array.size} blocks do not divide into {groups} groups")
    if array.size != wanted:
        raise ValueError(f"the mask must have {wanted} blocks, got {array.size}")
    return array.reshape(groups, rows, cols) != 0


@dataclass(frozen=True, eq=False)
class MatmulParams:
    """Sizes, types and mask of a product in blocks. Made by its class methods.

    Attributes:
        kind: "dense_sparse", "sparse_dense" or "dense_dense".
        dim: (m, k, n) of one group's [m, k] x [k, n].
        block_size: (bm, bk, bn), of blocks of rows, of the sum and of columns.
        mask: bool, blocks of all groups [groups, ..] of the sparse operand as it is stored, or of
            the result.
        transposed: whether the sparse operand is stored as its transpose.
        dtype, out_dtype, partials_type: of the operands, of the result and of partial sums.
        subblock_mask: of the result of "dense_dense".
        groups: products of the same sizes, operands one below the other.

    Raises:
        ValueError: sizes that are no multiples of the blocks (84), a mask of another size (85, 86),
            other types than float16 and float32 (81), float32 operands with float16 partial sums
            (82), no groups (83); the numbers are those of section 8.3 of popsparse-formulas.md.
    """

    kind: str
    dim: tuple[int, int, int]
    block_size: tuple[int, int, int]
    mask: np.ndarray
    transposed: bool
    dtype: DataType
    out_dtype: DataType
    partials_type: DataType
    subblock_mask: str
    groups: int

    @classmethod
    def create_dense_sparse(
        cls,
        dim: Sequence[int],
        block_size: Sequence[int],
        rhs_sparsity: Any,
        rhs_need_transpose: bool = False,
        *,
        dtype: Any = "float16",
        out_dtype: Any = None,
        partials_type: Any = None,
        num_groups: int = 1,
    ) -> MatmulParams:
        """Dense [m, k] x sparse [k, n].

        Args:
            dim: (m, k, n). block_size: (bm, bk, bn).
            rhs_sparsity: a `SparsePattern` [groups * k, n], or a mask of blocks.
            rhs_need_transpose: the sparse operand is stored as [n, k], with blocks [bn, bk], and so
                is its mask.
            dtype: float16 or float32.
            out_dtype: the same if left out. partials_type: float32 if left out.
            num_groups: products at once.
        """
        turned = check_flag("rhs_need_transpose", rhs_need_transpose)
        return cls._made("dense_sparse", dim, block_size, rhs_sparsity, turned, dtype, out_dtype,
                         partials_type, "none", num_groups)  # fmt: skip

    @classmethod
    def create_sparse_dense(
        cls,
        dim: Sequence[int],
        block_size: Sequence[int],
        lhs_sparsity: Any,
        lhs_need_transpose: bool = False,
        *,
        dtype: Any = "float16",
        out_dtype: Any = None,
        partials_type: Any = None,
        num_groups: int = 1,
    ) -> MatmulParams:
        """Sparse [m, k] x dense [k, n], computed as the transposed product; args as of
        `create_dense_sparse`."""
        turned = check_flag("lhs_need_transpose", lhs_need_transpose)
        return cls._made("sparse_dense", dim, block_size, lhs_sparsity, turned, dtype, out_dtype,
                         partials_type, "none", num_groups)  # fmt: skip

    @classmethod
    def create_dense_dense(
        cls,
        dim: Sequence[int],
        block_size: Sequence[int],
        result_sparsity: Any,
        *,
        dtype: Any = "float16",
        out_dtype: Any = None,
        partials_type: Any = None,
        subblock_mask: str = "none",
        num_groups: int = 1,
    ) -> MatmulParams:
        """Dense [m, k] x dense [k, n] at the blocks of a mask [m, n].

        Args:
            subblock_mask: what is zero in the result: what lies above ("zero_upper_triangle") or
                below ("zero_lower_triangle") the diagonal of each group. ("none")
        """
        check_choice("subblock_mask", subblock_mask, SUBBLOCK_MASKS)
        return cls._made("dense_dense", dim, block_size, result_sparsity, False, dtype, out_dtype,
                         partials_type, subblock_mask, num_groups)  # fmt: skip

    @classmethod
    def _made(
        cls,
        kind: str,
        dim: Any,
        block_size: Any,
        sparsity: Any,
        transposed: bool,
        dtype: Any,
        out_dtype: Any,
        partials_type: Any,
        subblock_mask: str,
        num_groups: Any,
    ) -> MatmulParams:
        groups = check_integer("num_groups", num_groups, 1)
        sizes, blocks = _three("dim", dim), _three("block_size", block_size)
        for name, size, block in zip("mkn", sizes, blocks, strict=True):
            if size % block:
                raise ValueError(f"{name} must be a multiple of its block {block}, got {size}")
        data = data_type(dtype)
        partials = FLOAT32 if partials_type is None else data_type(partials_type, "partials_type")
        if data is FLOAT32 and partials is FLOAT16:
            raise ValueError("float32 operands need float32 partial sums, got float16")
        out = data if out_dtype is None else data_type(out_dtype, "out_dtype")
        m, k, n = (size // block for size, block in zip(sizes, blocks, strict=True))
        rows, cols = {"dense_sparse": (k, n), "sparse_dense": (m, k), "dense_dense": (m, n)}[kind]
        if transposed:
            rows, cols = cols, rows
        mask = mask_of(sparsity, groups, rows, cols)
        return cls(kind, sizes, blocks, mask, transposed, data, out, partials, subblock_mask,
                   groups)  # fmt: skip

    @property
    def grid(self) -> tuple[int, int, int]:
        """Blocks of m, k and n."""
        m, k, n = (size // b for size, b in zip(self.dim, self.block_size, strict=True))
        return m, k, n

    @property
    def nnz(self) -> int:
        """Blocks of the mask."""
        return int(self.mask.sum())

    @property
    def multiplications(self) -> int:
        """Of all products of blocks."""
        area = self.block_size[0] * self.block_size[1] * self.block_size[2]
        other = {"dense_sparse": 0, "sparse_dense": 2, "dense_dense": 1}[self.kind]
        return self.nnz * self.grid[other] * area

    def forward(self) -> MatmulParams:
        """The same as dense x sparse or dense x dense: sparse x dense is turned around."""
        if self.kind != "sparse_dense":
            return self
        return MatmulParams("dense_sparse", self.dim[::-1], self.block_size[::-1], self.mask,
                            not self.transposed, self.dtype, self.out_dtype, self.partials_type,
                            "none", self.groups)  # fmt: skip


def _three(name: str, values: Any) -> tuple[int, int, int]:
    try:
        first, second, third = values
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be three sizes (m, k, n), got {shortened(values)}") from None
    sizes = (first, second, third)
    m, k, n = (check_integer(f"{name} of {x}", s, 1) for x, s in zip("mkn", sizes, strict=True))
    return m, k, n


@dataclass(frozen=True)
class Options:
    """Options of a block-sparse product.

    Attributes:
        partition_method: how products are dealt to tiles, one of `METHODS`. ("strip")
        number_of_pass: the product is made in so many parts, one after the other, which share
            memory: of block rows, or of the sum where the result is sparse. With one group and the
            methods strip and stripv0. (1)
        memory_cycle_ratio: how much the methods block and block-group2 mind a tile's memory beside
            its products, in [0, 1]; None: 0.2.

    Raises:
        ValueError, TypeError: an option out of range or of the wrong type, or of another method.
    """

    partition_method: str = "strip"
    number_of_pass: int = 1
    memory_cycle_ratio: float | None = None

    def __post_init__(self) -> None:
        check_choice("partition_method", self.partition_method, METHODS)
        object.__setattr__(
            self, "number_of_pass", check_integer("number_of_pass", self.number_of_pass, 1)
        )
        if self.number_of_pass > 1 and not self.partition_method.startswith("strip"):
            raise ValueError(
                f"number_of_pass goes with strip and stripv0, got {self.number_of_pass} for "
                f"{self.partition_method}"
            )
        if self.memory_cycle_ratio is None:
            return
        if self.partition_method not in ("block", "block-group2"):
            raise ValueError(
                "memory_cycle_ratio goes with the methods block and block-group2, got "
                f"{self.memory_cycle_ratio} for {self.partition_method}"
            )
        share = number(self.memory_cycle_ratio, "memory_cycle_ratio", 0.0, 1.0)
        object.__setattr__(self, "memory_cycle_ratio", share)

    @classmethod
    def parse(cls, value: Options | Mapping[str, Any] | None) -> Options:
        """Options from a mapping; unknown names are an error that names the nearest known one."""
        return parse_options(cls, value)
