"""The parameters of a product: its type, sizes and their division into parts.

Names and meaning follow PopSparse's `FullyConnectedParams` and its two `MatMulParams`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, TypeVar

import numpy as np

from dynsparse._core.checks import check_integer, check_sizes, check_within
from popsparse.machine.dtypes import FLOAT, HALF, DType, as_dtype

Params = TypeVar("Params")


def data_type(value: Any, what: str = "dtype") -> DType:
    """Convert to float16 or float32, as `machine.as_dtype` does.

    Raises:
        ValueError: any other type.
    """
    try:
        dtype = as_dtype(value)
    except TypeError:
        dtype = None
    if dtype not in (HALF, FLOAT):
        raise ValueError(f"{what} must be float16 or float32, got {value!r}")
    return dtype


def ceil_div(a: Any, b: Any) -> Any:
    """a / b rounded up, of integers or integer arrays."""
    return -(-a // b)


@lru_cache(maxsize=8)
def all_partitions(tiles: int) -> np.ndarray:
    """Every (x, y, z) with x * y * z <= tiles, in ascending order: integers [3, count]."""
    pairs = [(x, y) for x in range(1, tiles + 1) for y in range(1, tiles // x + 1)]
    x, y = np.array(pairs, np.int64).reshape(-1, 2).T
    depth = tiles // (x * y)
    ends = np.cumsum(depth)
    z = np.arange(ends[-1]) - np.repeat(ends - depth, depth) + 1
    partitions = np.stack([np.repeat(x, depth), np.repeat(y, depth), z])
    partitions.setflags(write=False)
    return partitions


def even_parts(groups: int, parts: Any) -> Any:
    """The fewest parts that leave as many groups in the fullest part as `parts` do."""
    return -(-groups // -(-groups // parts))


WORD_LIMIT = 65535

# Words of the fixed parts of meta-info, see docs/popsparse-partitioner.md.
ELEMENT_HEADER, ELEMENT_WORKER, BLOCK_HEADER, GRAD_W_WORKER, ROW_ENTRY = 9, 5, 7, 4, 2


def header_words(workers: Any, grad_w_workers: Any = None, *, element: bool) -> Any:
    """Words of a sub-group before its rows.

    Args:
        workers: workers in use in forward; blocks have no words for them.
        grad_w_workers: workers in use in grad_weight; None: the plan does not include grad_weight.
        element: the element format, not the block format.
    """
    words = ELEMENT_HEADER + ELEMENT_WORKER * workers if element else BLOCK_HEADER
    if grad_w_workers is None:
        return words
    # The element format has a word for their number; the block header already includes it.
    return words + GRAD_W_WORKER * grad_w_workers + (1 if element else 0)


def overflow_words(x_partitions: int) -> int:
    """Words of the overflow record: three counts and the distances in x, two to a word."""
    return 3 + ceil_div(x_partitions, 2)


@dataclass(frozen=True, order=True)
class SparsityParams:
    """The block shape (rows, columns) of the sparse operand; (1, 1) is unstructured sparsity."""

    block_dimensions: tuple[int, int] = (1, 1)

    def __post_init__(self) -> None:
        block: Any = self.block_dimensions
        sizes = block if isinstance(block, Iterable) else (block, block)
        block = check_sizes("block_dimensions", sizes, ("rows", "columns"))
        object.__setattr__(self, "block_dimensions", block)

    @property
    def is_element(self) -> bool:
        return self.block_dimensions == (1, 1)

    @property
    def area(self) -> int:
        return self.block_dimensions[0] * self.block_dimensions[1]


def block_for_plan(block: tuple[int, int], dtype: DType) -> tuple[int, int]:
    """The block of the plan: the largest of 4, 8, 16 (float16) or 4, 8 (float32) that divides the
    edge of a square block. Other blocks stay unchanged.
    """
    if block[0] != block[1]:
        return block
    for edge in (16, 8, 4) if dtype.size == 2 else (8, 4):
        if block[0] % edge == 0:
            return (edge, edge)
    return block


_MOST_ELEMENTS = 2**40
"""Most elements of an operand. No machine holds as many, and byte counts stay far below 2^63."""


def _check_elements(groups: int, batch: int, in_: int, out: int) -> None:
    for what, value, other in (
        ("weights", out, in_),
        ("an input", in_, batch),
        ("an output", out, batch),
    ):
        if groups * value * other > _MOST_ELEMENTS:
            sizes = " x ".join(f"{n:,}" for n in (groups, value, other) if n > 1)
            raise ValueError(
                f"{what} must have at most 2^40 elements, got {sizes}: use smaller sizes"
            )


class _ParamsWithDensity:
    """PopSparse's two ways to create the parameters of a product."""

    @classmethod
    def create_with_nz_ratio(cls: type[Params], *sizes: Any, **named: Any) -> Params:
        """Create parameters from the ratio of non-zeros, as the constructor does."""
        return cls(*sizes, **named)

    @classmethod
    def create_with_num_non_zero_values(
        cls: type[Params],
        sparsity_params: SparsityParams,
        num_non_zero_elements: int,
        *sizes: Any,
        **named: Any,
    ) -> Params:
        """Create parameters from the number of non-zeros; other arguments as the constructor's."""
        params: Any = cls(sparsity_params, 0.0, *sizes, **named)  # type: ignore[call-arg]
        count = check_integer("num_non_zero_elements", num_non_zero_elements, 0)
        if count > params.num_elements:
            raise ValueError(
                f"num_non_zero_elements must be at most {params.num_elements}, got {count}"
            )
        return replace(params, nz_ratio=count / params.num_elements)


@dataclass(frozen=True, order=True)
class FullyConnectedParams(_ParamsWithDensity):
    """A sparse fully connected layer: weights [groups, out, in], input [batch, groups * in].

    The passes are, per group: forward [out, in] x [in, batch]; grad_input [in, out] x [out, batch];
    grad_weight [out, batch] x [batch, in] at the pattern's positions.

    Raises:
        ValueError: a size below 1, a ratio outside [0, 1], blocks that do not divide the channels.
        TypeError: an argument that is not a number.
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
        ratio = check_within("nz_ratio (non-zeros over all elements)", self.nz_ratio, "[0, 1]")
        object.__setattr__(self, "nz_ratio", float(ratio))
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

    @property
    def num_elements(self) -> int:
        """Number of elements of the weights, zeros included."""
        return self.num_groups * self.input_channels_per_group * self.output_channels_per_group


@dataclass(frozen=True, order=True)
class MatmulParams(_ParamsWithDensity):
    """A sparse [groups, m, k] times a dense [groups, k, n] matrix.

    A dynamic product is planned for a density: use `create_with_nz_ratio`. A static product is
    planned for its pattern, so `sparsity_params` and `nz_ratio` are None, and has one group: use
    `create_for_sparse_dense`, or `create_for_dense_sparse` for dense [groups, n, k] times sparse
    [groups, k, m], which is `transposed`, since it is computed as the transposed product.

    Raises what `FullyConnectedParams` raises.
    """

    sparsity_params: SparsityParams | None
    nz_ratio: float | None
    groups: int
    m: int
    k: int
    n: int
    transposed: bool = False

    def __post_init__(self) -> None:
        for name in ("groups", "m", "k", "n"):
            object.__setattr__(self, name, check_integer(name, getattr(self, name), 1))
        if self.sparsity_params is not None or self.nz_ratio is not None:
            object.__setattr__(self, "nz_ratio", self.fully_connected.nz_ratio)
        elif self.groups != 1:
            raise ValueError(
                f"a static product has one group, got {self.groups}: create one product per group, "
                "since each has its own pattern"
            )

    @classmethod
    def create_for_sparse_dense(cls, groups: int, m: int, k: int, n: int) -> MatmulParams:
        """Parameters of a static product, sparse [groups, m, k] x dense [groups, k, n]."""
        return cls(None, None, groups, m, k, n)

    @classmethod
    def create_for_dense_sparse(cls, groups: int, n: int, k: int, m: int) -> MatmulParams:
        """Parameters of a static product, dense [groups, n, k] x sparse [groups, k, m]."""
        return cls(None, None, groups, m, k, n, transposed=True)

    @cached_property
    def fully_connected(self) -> FullyConnectedParams:
        """The layer whose forward pass is this product.

        Raises:
            ValueError: parameters of a static product.
        """
        if self.sparsity_params is None or self.nz_ratio is None:
            raise ValueError(
                "these parameters have no density: use MatmulParams.create_with_nz_ratio"
            )
        return FullyConnectedParams(
            self.sparsity_params, self.nz_ratio, self.n, self.groups, self.k, self.m
        )

    @property
    def num_elements(self) -> int:
        """Number of elements of the sparse operand, zeros included."""
        return self.groups * self.m * self.k

    @property
    def sparse_shape(self) -> tuple[int, int]:
        """The shape of the user's sparse operand."""
        return (self.k, self.m) if self.transposed else (self.m, self.k)
