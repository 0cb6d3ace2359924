"""What is multiplied: the shapes, the number of groups and how sparse the sparse operand is.

Names and meaning follow PopSparse's `FullyConnectedParams` and `MatMulParams`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dynsparse.checks import check_integer
from popsparse.planning.data_types import DataType, number


@dataclass(frozen=True, order=True)
class SparsityParams:
    """The block shape (rows, columns) of the sparse operand; (1, 1) is unstructured sparsity."""

    block_dimensions: tuple[int, int] = (1, 1)

    def __post_init__(self) -> None:
        block: Any = self.block_dimensions
        if not isinstance(block, Sequence):
            block = (block, block)
        if isinstance(block, str) or len(block) != 2:
            raise ValueError(f"block_dimensions must be (rows, columns), got {block!r}")
        rows, columns = (check_integer("a block dimension", n, 1) for n in block)
        object.__setattr__(self, "block_dimensions", (rows, columns))

    @property
    def is_element(self) -> bool:
        return self.block_dimensions == (1, 1)

    @property
    def area(self) -> int:
        return self.block_dimensions[0] * self.block_dimensions[1]


def planned_block(block: tuple[int, int], dtype: DataType) -> tuple[int, int]:
    """The block the plan works in: the largest of 4, 8, 16 (float16) or 4, 8 (float32) that
    divides the edge of a square block. Other blocks stay as they are.
    """
    if block[0] != block[1]:
        return block
    for edge in (16, 8, 4) if dtype.size == 2 else (8, 4):
        if block[0] % edge == 0:
            return (edge, edge)
    return block


def _check_ratio(ratio: Any) -> float:
    return number(ratio, "nz_ratio (non-zeros over all elements)", 0.0, 1.0)


_MOST_ELEMENTS = 2**40
"""Of an operand. No machine holds as much, and counts of bytes stay far below 2^63."""


def _check_elements(groups: int, batch: int, in_: int, out: int) -> None:
    for what, one, other in (
        ("weights", out, in_),
        ("an input", in_, batch),
        ("an output", out, batch),
    ):
        if groups * one * other > _MOST_ELEMENTS:
            sizes = " x ".join(f"{n:,}" for n in (groups, one, other) if n > 1)
            raise ValueError(
                f"{what} must have at most 2^40 elements, got {sizes}: take smaller sizes"
            )


def _ratio_of_count(count: Any, dense: int) -> float:
    found = check_integer("num_non_zero_elements", count, 0)
    if found > dense:
        raise ValueError(f"num_non_zero_elements must be at most {dense}, got {found}")
    return found / dense


@dataclass(frozen=True, order=True)
class FullyConnectedParams:
    """A sparse fully connected layer: weights [groups, out, in], input [batch, groups * in].

    The passes are, per group: forward [out, in] x [in, batch]; grad_input [in, out] x [out, batch];
    grad_weight [out, batch] x [batch, in] at the pattern's positions.

    Raises:
        ValueError: a size below 1, a ratio outside [0, 1], blocks that do not divide the channels.
        TypeError: something that is not a number.
    """

    sparsity_params: SparsityParams
    nz_ratio: float
    batch_size: int
    num_groups: int
    input_channels_per_group: int
    output_channels_per_group: int

    def __post_init__(self) -> None:
        if not isinstance(self.sparsity_params, SparsityParams):
            raise TypeError(f"sparsity_params must be SparsityParams, got {self.sparsity_params!r}")
        object.__setattr__(self, "nz_ratio", _check_ratio(self.nz_ratio))
        for name in (
            "batch_size",
            "num_groups",
            "input_channels_per_group",
            "output_channels_per_group",
        ):
            object.__setattr__(self, name, check_integer(name, getattr(self, name), 1))
        _check_elements(
            self.num_groups,
            self.batch_size,
            self.input_channels_per_group,
            self.output_channels_per_group,
        )
        rows, columns = self.sparsity_params.block_dimensions
        for what, size, edge in (
            ("output_channels_per_group", self.output_channels_per_group, rows),
            ("input_channels_per_group", self.input_channels_per_group, columns),
        ):
            if size % edge:
                raise ValueError(
                    f"{what} must be a multiple of the block's {edge}, got {size}: "
                    "choose a block size that divides it, or pad the channels"
                )

    @classmethod
    def create_with_nz_ratio(cls, *sizes: Any, **named: Any) -> FullyConnectedParams:
        """As the constructor."""
        return cls(*sizes, **named)

    @classmethod
    def create_with_num_non_zero_values(
        cls,
        sparsity_params: SparsityParams,
        num_non_zero_elements: int,
        batch_size: int,
        num_groups: int,
        input_channels_per_group: int,
        output_channels_per_group: int,
    ) -> FullyConnectedParams:
        sizes = [
            check_integer("num_groups", num_groups, 1),
            check_integer("input_channels_per_group", input_channels_per_group, 1),
            check_integer("output_channels_per_group", output_channels_per_group, 1),
        ]
        ratio = _ratio_of_count(num_non_zero_elements, math.prod(sizes))
        return cls(sparsity_params, ratio, batch_size, *sizes)

    @property
    def input_channels(self) -> int:
        return self.num_groups * self.input_channels_per_group

    @property
    def output_channels(self) -> int:
        return self.num_groups * self.output_channels_per_group

    @property
    def num_non_zero_values(self) -> int:
        dense = self.num_groups * self.input_channels_per_group * self.output_channels_per_group
        return math.ceil(self.nz_ratio * dense)


@dataclass(frozen=True, order=True)
class MatmulParams:
    """A sparse [groups, m, k] times a dense [groups, k, n] matrix. Errors as above."""

    sparsity_params: SparsityParams
    nz_ratio: float
    groups: int
    m: int
    k: int
    n: int
    fully_connected: FullyConnectedParams = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("groups", "m", "k", "n"):
            object.__setattr__(self, name, check_integer(name, getattr(self, name), 1))
        same = FullyConnectedParams(
            self.sparsity_params, self.nz_ratio, self.n, self.groups, self.k, self.m
        )
        object.__setattr__(self, "nz_ratio", same.nz_ratio)
        object.__setattr__(self, "fully_connected", same)

    @classmethod
    def create_with_nz_ratio(cls, *sizes: Any, **named: Any) -> MatmulParams:
        """As the constructor."""
        return cls(*sizes, **named)

    @classmethod
    def create_with_num_non_zero_values(
        cls,
        sparsity_params: SparsityParams,
        num_non_zero_elements: int,
        groups: int,
        m: int,
        k: int,
        n: int,
    ) -> MatmulParams:
        dense = (
            check_integer("groups", groups, 1) * check_integer("m", m, 1) * check_integer("k", k, 1)
        )
        ratio = _ratio_of_count(num_non_zero_elements, dense)
        return cls(sparsity_params, ratio, groups, m, k, n)
