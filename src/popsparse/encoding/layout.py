"""The geometry of buckets: how a matrix is cut over tiles, how much a bucket holds.

The names follow the note on PopSparse (Li, Z. et al., arXiv:2303.16999) and the storage of the
library it describes: X counts rows of the sparse matrix (output features), Y its columns (input
features), Z the batch. A *bucket* is the fixed piece of memory a tile owns: meta-info, 16-bit words
that say where non-zeros belong, and values. A *sub-group* is the part of a bucket that belongs to
one (x, y) rectangle of the matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from popsparse.planning.parts import ceil_div
from popsparse.planning.plan import Plan
from popsparse.planning.words import ROW_ENTRY, header_words, overflow_words


@dataclass(frozen=True)
class BucketLayout:
    """Everything that fixes the shape of the buckets; a plan in the partitioner's own terms.

    Args:
        rows, cols, batch: sizes of X, Y and Z in elements.
        partition: how many parts X, Y and Z are cut into; their product is the number of buckets.
        block: rows and columns of a block; (1, 1) selects the element format of meta-info, any
            other block the block format.
        nz_elements: capacity of a bucket in values (elements, not blocks).
        meta_info_words: capacity of a bucket in 16-bit words of meta-info, end marker included.
        grad_a_words: the same for the extra buckets of grad_input; 0 when the buckets are shared
            between the passes. Only the element format has such buckets.
        grad_w: whether the meta-info carries the work lists of grad_weight.
        batch_grain: elements of Z that are not divided among workers.
        data_bytes: bytes of a value, 2 or 4: column offsets of the element format are bytes.
        workers: worker threads of a tile.

    Raises:
        ValueError: a size below 1, a block that does not divide the matrix, more parts than grains.
    """

    rows: int
    cols: int
    batch: int
    partition: tuple[int, int, int]
    nz_elements: int
    meta_info_words: int
    grad_a_words: int = 0
    block: tuple[int, int] = (1, 1)
    grad_w: bool = False
    batch_grain: int = 1
    data_bytes: int = 4
    workers: int = 6

    def __post_init__(self) -> None:
        for name in ("rows", "cols", "batch", "meta_info_words", "batch_grain", "workers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if min(self.block) < 1 or self.rows % self.block[0] or self.cols % self.block[1]:
            raise ValueError(
                f"block {self.block} does not divide the matrix {(self.rows, self.cols)}: "
                "choose a block that divides both sides, or pad the matrix"
            )
        if self.nz_elements < 0 or self.grad_a_words < 0:
            raise ValueError("bucket sizes must not be negative")
        if self.data_bytes not in (2, 4):
            raise ValueError(f"values are 2 or 4 bytes wide, got data_bytes={self.data_bytes}")
        if self.grad_a_words and not self.element_format:
            raise ValueError("buckets of blocks are shared by all passes: grad_a_words must be 0")
        for axis, parts, grains in zip("XYZ", self.partition, self.grains, strict=True):
            if not 1 <= parts <= grains:
                raise ValueError(
                    f"{axis} has {grains} grains and cannot be cut into {parts} parts: "
                    f"choose between 1 and {grains}"
                )

    @property
    def element_format(self) -> bool:
        """Whether the meta-info has the element format (blocks of 1 x 1)."""
        return self.block == (1, 1)

    @property
    def area(self) -> int:
        """Elements of a block."""
        return self.block[0] * self.block[1]

    @property
    def grid(self) -> tuple[int, int]:
        """The matrix in blocks."""
        return self.rows // self.block[0], self.cols // self.block[1]

    @property
    def grains(self) -> tuple[int, int, int]:
        """X and Y in blocks, Z in grains (a batch that a grain does not divide is padded)."""
        return (*self.grid, ceil_div(self.batch, self.batch_grain))

    @property
    def part(self) -> tuple[int, int, int]:
        """The largest share of a tile, in grains of X, Y and Z."""
        return tuple(ceil_div(n, p) for n, p in zip(self.grains, self.partition, strict=True))

    @property
    def num_z(self) -> int:
        """Elements of Z on a tile."""
        return self.part[2] * self.batch_grain

    @property
    def rectangles(self) -> int:
        """How many (x, y) rectangles the matrix is cut into."""
        return self.partition[0] * self.partition[1]

    @property
    def buckets(self) -> int:
        """How many buckets there are: one for each tile in use."""
        return self.rectangles * self.partition[2]

    @property
    def capacity(self) -> int:
        """Blocks that fit a bucket."""
        return self.nz_elements // self.area

    @property
    def bucket_stride(self) -> int:
        """Words from one bucket's meta-info to the next."""
        return self.meta_info_words + self.grad_a_words

    @cached_property
    def overflow_words(self) -> int:
        """Words before the buckets: the overflow record."""
        return overflow_words(self.partition[0])

    @property
    def meta_info_size(self) -> int:
        """Words of the whole meta-info array."""
        return self.overflow_words + self.buckets * self.bucket_stride

    def header_words(
        self, rows: np.ndarray | int, nz: np.ndarray | int, actual_workers: bool = False
    ) -> np.ndarray | int:
        """Words of a sub-group before its rows, as charged when buckets are filled.

        Every worker is charged, whether the sub-group gives it work or not, unless
        `actual_workers`: then min(workers, pieces of work), which the work lists never exceed.
        """
        forward: np.ndarray | int = self.workers
        grad_w: np.ndarray | int = self.workers
        if actual_workers:
            forward = np.minimum(self.workers, rows * np.int64(self.part[2]))
            grad_w = np.minimum(self.workers, nz)
        return header_words(forward, grad_w if self.grad_w else None, element=self.element_format)

    def sub_group_words(
        self, rows: np.ndarray | int, nz: np.ndarray | int, actual_workers: bool = False
    ) -> np.ndarray | int:
        """Words charged for a sub-group of `rows` non-empty block rows and `nz` blocks."""
        return self.header_words(rows, nz, actual_workers) + ROW_ENTRY * rows + nz


def bucket_layout(plan: Plan) -> BucketLayout:
    """The buckets of one group of a plan."""
    sizes, parts = plan.sizes, plan.partition
    return BucketLayout(
        rows=sizes.x,
        cols=sizes.y,
        batch=sizes.z,
        partition=(parts.x, parts.y, parts.z),
        nz_elements=plan.buckets.nz_elements,
        meta_info_words=plan.buckets.forward_words,
        grad_a_words=plan.buckets.grad_input_words,
        block=plan.block_dimensions,
        grad_w=plan.options.do_grad_w_pass,
        batch_grain=plan.grouping.z,
        data_bytes=plan.dtype.size,
        workers=plan.target.workers,
    )
