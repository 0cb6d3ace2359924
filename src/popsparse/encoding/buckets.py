"""Buckets: their layout, the assignment of non-zeros to them, and the overflow record.

The names follow the note on PopSparse (Li, Z. et al., arXiv:2303.16999) and the storage of the
library it describes: X counts rows of the sparse matrix (output features), Y its columns (input
features), Z the batch. A *bucket* is the fixed memory of a tile for non-zeros: meta-info, 16-bit
words with their positions, and values. A *sub-group* is the part of a bucket that belongs to one
(x, y) rectangle of the matrix.

X and Y are cut into equal chunks of blocks. The blocks of a rectangle, in row-major order, are cut
into one contiguous piece for each of its Z partners; a piece's rows are kept in order of decreasing
length, so that what is trimmed from the end is short (sections 3 and 4 of the PopSparse note).
All of it is sorting and running sums over arrays: no loop over buckets or rows.

Bucket and operand meet when the bucket of (x - i, y - j) is at the tiles of (x, y), offset (i, j)
cyclic in the partition. The distribution phase covers offset (0, 0) for every Z partner; each
further offset in the overflow record costs one step for each Z partner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import scipy.sparse

from popsparse.formats import stable_argsort
from popsparse.machine.intervals import equal_runs, expand, offsets_of
from popsparse.planning.params import ROW_ENTRY, ceil_div, header_words, overflow_words
from popsparse.planning.plan import Plan


@dataclass(frozen=True)
class BucketLayout:
    """The shape of the buckets: the part of a plan that the partitioner uses.

    Args:
        rows, cols, batch: sizes of X, Y and Z in elements.
        partition: number of parts of X, Y and Z; their product is the number of buckets.
        block: rows and columns of a block; (1, 1) selects the element format of meta-info, any
            other block the block format.
        nz_elements: capacity of a bucket in values (elements, not blocks).
        meta_info_words: capacity of a bucket in 16-bit words of meta-info, end marker included.
        grad_a_words: the same for the extra buckets of grad_input; 0 when the buckets are shared
            between the passes. Only the element format has such buckets.
        grad_w: whether the meta-info contains the work lists of grad_weight.
        batch_grain: elements of Z that stay together on one worker.
        data_bytes: bytes of a value, 2 or 4: column offsets of the element format count bytes.
        workers: worker threads of a tile.

    Raises:
        ValueError: more parts than grains; buckets of grad_input for blocks.
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
        """Number of elements of a block."""
        return self.block[0] * self.block[1]

    @property
    def grid(self) -> tuple[int, int]:
        """Numbers of block rows and block columns of the matrix."""
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
        """Number of (x, y) rectangles of the matrix."""
        return self.partition[0] * self.partition[1]

    @property
    def buckets(self) -> int:
        """Number of buckets: one for each tile in use."""
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

    def sub_group_words(
        self, rows: np.ndarray | int, nz: np.ndarray | int, actual_workers: bool
    ) -> np.ndarray | int:
        """Words that a sub-group of `rows` non-empty block rows and `nz` blocks is charged.

        Every worker is charged, even without work, unless `actual_workers`: then min(workers,
        pieces of work), which the work lists never exceed.
        """
        forward: np.ndarray | int = self.workers
        grad_w: np.ndarray | int = self.workers
        if actual_workers:
            forward = np.minimum(self.workers, rows * np.int64(self.part[2]))
            grad_w = np.minimum(self.workers, nz)
        used = grad_w if self.grad_w else None
        header: np.ndarray | int = header_words(forward, used, element=self.element_format)
        return header + ROW_ENTRY * rows + nz


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


@dataclass(frozen=True)
class Runs:
    """Rows of pieces: `length` consecutive blocks of one row of one rectangle. int64 [runs].

    `piece` is the bucket in which the run starts, `row` the block row inside the rectangle, `start`
    the position of its first block in the order of `Assignment`.
    """

    piece: np.ndarray
    row: np.ndarray
    start: np.ndarray
    length: np.ndarray

    def __getitem__(self, at: np.ndarray) -> Runs:
        return Runs(self.piece[at], self.row[at], self.start[at], self.length[at])

    def __len__(self) -> int:
        return len(self.piece)


@dataclass(frozen=True)
class Assignment:
    """Blocks in order of rectangles: `order` [nnz] has their slots in the pattern, `col` [nnz]
    their block column inside the rectangle; `runs` are sorted by (bucket, decreasing length, row).
    """

    order: np.ndarray
    col: np.ndarray
    runs: Runs


def _piece_bounds(counts: np.ndarray, pieces: int) -> np.ndarray:
    """Where each piece starts, [rectangles * pieces + 1].

    A rectangle of T blocks makes ceil(T / ceil(T / pieces)) equal pieces and leaves the rest empty.
    """
    chunk = np.maximum(ceil_div(counts, pieces), 1)
    used = np.maximum(ceil_div(counts, chunk), 1)
    index = np.minimum(np.arange(pieces)[None, :], used[:, None])
    cuts = index * counts[:, None] // used[:, None]
    starts = (np.cumsum(counts) - counts)[:, None] + cuts
    return np.append(starts.ravel(), counts.sum())


def assign(rows: np.ndarray, cols: np.ndarray, layout: BucketLayout) -> Assignment:
    """Assign blocks to buckets.

    Args:
        rows, cols: block coordinates, integers [nnz], sorted row-major, distinct, in range.
        layout: the layout of the buckets.
    """
    part_x, part_y, _ = layout.part
    parts_y, parts_z = layout.partition[1:]
    rectangle = rows // part_x * parts_y
    if parts_y > 1:
        rectangle = rectangle + cols // part_y
        order = stable_argsort(rectangle)
        rows, cols = rows[order], cols[order]
        col = cols % part_y
    else:
        order, col = np.arange(len(rows), dtype=np.int64), cols
    bounds = _piece_bounds(np.bincount(rectangle, minlength=layout.rectangles), parts_z)
    first = np.zeros(len(rows), bool)
    first[bounds[bounds < len(rows)]] = True
    first[1:] |= rows[1:] != rows[:-1]
    start = np.flatnonzero(first)
    length = np.diff(np.append(start, len(rows)))
    index = np.searchsorted(bounds, start, side="right") - 1
    runs = Runs(index, rows[start].astype(np.int64) % part_x, start, length)
    if len(runs):
        by_length = stable_argsort(length.max() - length)
        runs = runs[by_length[stable_argsort(index[by_length])]]
    return Assignment(order, col, runs)


@dataclass(frozen=True)
class SubGroups:
    """Sub-groups in the order of buckets, and inside a bucket in the order they arrived.

    Attributes:
        bucket, rectangle: int64 [groups]; rectangle is x * Ny + y, to which the blocks belong.
        rows, nz: number of non-empty rows and of blocks in a sub-group, int64 [groups].
        row, length: row inside the rectangle and its number of blocks, int64 [all rows]; within a
            sub-group by decreasing length, then row.
        col: block column inside the rectangle, integers [nnz], row by row.
        source: slot of each block in the pattern, integers [nnz]; for the transposed form the
            place of the block among the values of the sub-group.
    """

    bucket: np.ndarray
    rectangle: np.ndarray
    rows: np.ndarray
    nz: np.ndarray
    row: np.ndarray
    length: np.ndarray
    col: np.ndarray
    source: np.ndarray

    @classmethod
    def collect(
        cls, assignment: Assignment, runs: Runs, bucket: np.ndarray, arrival: np.ndarray,
        layout: BucketLayout,
    ) -> SubGroups:  # fmt: skip
        """Collect sub-groups from rows and their final buckets.

        Args:
            runs: all rows; `runs.piece` is the initial bucket of each.
            bucket: the final bucket of each, int64 [runs].
            arrival: 0 for rows that stayed, else the number of their move; rows of one piece that
                arrived together in a bucket are one sub-group. int64 [runs].
        """
        if arrival.any():
            order = stable_argsort(runs.row)
            for key in (runs.length.max() - runs.length, arrival, bucket):
                order = order[stable_argsort(key[order])]
            runs, bucket, arrival = runs[order], bucket[order], arrival[order]
        at, rows = equal_runs(bucket, arrival)
        blocks = expand(runs.start, runs.length)
        return cls(
            bucket=bucket[at],
            rectangle=runs.piece[at] // layout.partition[2],
            rows=rows,
            nz=np.add.reduceat(runs.length, at) if len(at) else at,
            row=runs.row,
            length=runs.length,
            col=assignment.col[blocks],
            source=assignment.order[blocks],
        )

    @cached_property
    def first_row(self) -> np.ndarray:
        """Rows before each sub-group's, int64 [groups]."""
        return np.cumsum(self.rows) - self.rows

    @cached_property
    def first_nz(self) -> np.ndarray:
        """Blocks before each sub-group's, int64 [groups]."""
        return np.cumsum(self.nz) - self.nz

    @cached_property
    def row_nz(self) -> np.ndarray:
        """Blocks before each row's, int64 [all rows]."""
        return np.cumsum(self.length) - self.length

    def place(self, layout: BucketLayout) -> np.ndarray:
        """Position of each block's first value in the array of all buckets' values, int64 [nnz]."""
        before = np.searchsorted(self.bucket, self.bucket)
        in_bucket = self.first_nz - self.first_nz[before] if len(self.bucket) else self.first_nz
        base = self.bucket * layout.nz_elements + in_bucket * layout.area
        return expand(base, self.nz, layout.area)

    def transpose(self) -> SubGroups:
        """The same sub-groups with rows and columns swapped, for grad_input's own buckets."""
        width = int(self.col.max(initial=0)) + 1
        row_group = np.repeat(np.arange(len(self.rows)), self.rows)
        order = stable_argsort(self.row)
        order = order[stable_argsort(row_group[order])]
        # One matrix with the sub-groups along its diagonal: SciPy's counting sort by columns
        # swaps rows and columns of all of them in one pass.
        length = self.length[order]
        place = expand(self.row_nz[order], length)
        column = self.col[place] + np.repeat(row_group[order] * width, length)
        offsets = offsets_of(length)
        shape = (len(order), len(self.rows) * width)
        transposed = scipy.sparse.csr_array((place, column, offsets), shape=shape).tocsc()
        count = np.diff(transposed.indptr)
        column = np.flatnonzero(count)
        count = count[column].astype(np.int64)
        start = transposed.indptr[column].astype(np.int64)
        group = column // width
        if len(column):
            by_length = stable_argsort(count.max() - count)
            sort = by_length[stable_argsort(group[by_length])]
            column, group, start, count = column[sort], group[sort], start[sort], count[sort]
        blocks = expand(start, count)
        return SubGroups(
            bucket=self.bucket,
            rectangle=self.rectangle,
            rows=np.bincount(group, minlength=len(self.rows)),
            nz=self.nz,
            row=column % width,
            length=count,
            col=self.row[order][transposed.indices[blocks]],
            source=transposed.data[blocks] - np.repeat(self.first_nz, self.nz),
        )


def distances_from_home(
    rectangle: np.ndarray, bucket: np.ndarray, partition: tuple[int, int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """How many parts of X and of Y buckets travel to the rectangles that their content is for."""
    parts_x, parts_y, parts_z = partition
    home = bucket // parts_z
    return (rectangle // parts_y - home // parts_y) % parts_x, (rectangle - home) % parts_y


FLAGS_PER_WORD = 2


@dataclass(frozen=True)
class OverflowInfo:
    """The overflow record: the loop bounds of the propagation phase.

    Attributes:
        x, y, z: loop end counts: x is the farthest distance in X plus 1; y is Ny when x > 1, else
            the farthest distance in Y plus 1; z is always Nz.
        used_x: bool [Nx]; whether any block travels distance i in X (0 included).
        partition: Nx, Ny, Nz.
    """

    x: int
    y: int
    z: int
    used_x: np.ndarray
    partition: tuple[int, int, int]

    @classmethod
    def of(cls, groups: SubGroups, layout: BucketLayout) -> OverflowInfo:
        parts_x, parts_y, parts_z = layout.partition
        far_x, far_y = distances_from_home(groups.rectangle, groups.bucket, layout.partition)
        used = np.zeros(parts_x, bool)
        used[far_x] = True
        # Distances are compared as pairs (X, Y).
        farthest = int((far_x * parts_y + far_y).max(initial=0))
        x = farthest // parts_y + 1
        y = farthest % parts_y + 1 if x == 1 else parts_y
        return cls(x, y, parts_z, used, layout.partition)

    @classmethod
    def merge(cls, infos: Sequence[OverflowInfo]) -> OverflowInfo:
        """One record that serves several groups of one plan."""
        x = max(info.x for info in infos)
        y = infos[0].partition[1] if x > 1 else max(info.y for info in infos)
        used = np.logical_or.reduce([info.used_x for info in infos])
        return cls(x, y, infos[0].z, used, infos[0].partition)

    @classmethod
    def from_words(cls, words: np.ndarray, partition: tuple[int, int, int]) -> OverflowInfo:
        """Read the record at the start of the meta-info."""
        flags = np.asarray(words[3 : 3 + ceil_div(partition[0], FLAGS_PER_WORD)])
        used = (flags[:, None] >> np.arange(FLAGS_PER_WORD)) & 1
        x, y, z = (int(word) for word in words[:3])
        return cls(x, y, z, used.ravel()[: partition[0]].astype(bool), partition)

    def words(self) -> np.ndarray:
        """x, y, z and the flags of X, two to a word: uint16 [3 + ceil(Nx / 2)]."""
        padded = np.zeros(ceil_div(len(self.used_x), FLAGS_PER_WORD) * FLAGS_PER_WORD, np.uint16)
        padded[: len(self.used_x)] = self.used_x
        flags = padded.reshape(-1, FLAGS_PER_WORD) << np.arange(FLAGS_PER_WORD, dtype=np.uint16)
        counts = np.array([self.x, self.y, self.z], np.uint16)
        return np.concatenate([counts, flags.sum(1).astype(np.uint16)])

    @property
    def kept_offsets(self) -> list[tuple[int, int]]:
        """The (X, Y) offsets the propagation visits, in order; (0, 0) is not among them."""
        return [
            (i, j) for i in range(self.x) if self.used_x[i] for j in range(self.y) if i or j
        ]  # fmt: skip

    @property
    def propagation_steps(self) -> int:
        """Compute steps of the propagation phase: kept offsets times the Z partners.

        Counted as in the note: skipped X offsets still cost one exchange each, not counted here.
        """
        return self.z * len(self.kept_offsets)
