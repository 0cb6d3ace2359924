"""The content of every bucket as flat arrays: sub-groups, their rows, their blocks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import scipy.sparse

from popsparse.encoding.assignment import Assignment, Runs, expand
from popsparse.encoding.block_lists import stable_order
from popsparse.encoding.layout import BucketLayout


@dataclass(frozen=True)
class SubGroups:
    """Sub-groups in the order of buckets, and inside a bucket in the order they arrived.

    Attributes:
        bucket, rectangle: int64 [groups]; rectangle is x * Ny + y, where the blocks belong.
        rows, nz: how many non-empty rows and blocks a sub-group has, int64 [groups].
        row, length: row inside the rectangle and its blocks, int64 [all rows]; within a sub-group
            by decreasing length, then row.
        col: block column inside the rectangle, integers [nnz], row by row.
        source: slot of the pattern each block comes from, integers [nnz]; for the transposed form
            the place of the block among the values of the sub-group.
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
        """From rows and the bucket each ended up in.

        Args:
            runs: all rows; `runs.piece` is where each began.
            bucket: where each ended, int64 [runs].
            arrival: 0 for rows that stayed, else the number of the move that brought them; rows
                of one piece that arrived together in a bucket are one sub-group. int64 [runs].
        """
        if arrival.any():
            order = stable_order(runs.row)
            for key in (runs.length.max() - runs.length, arrival, bucket):
                order = order[stable_order(key[order])]
            runs, bucket, arrival = runs[order], bucket[order], arrival[order]
        first = np.ones(len(runs), bool)
        first[1:] = (bucket[1:] != bucket[:-1]) | (arrival[1:] != arrival[:-1])
        at = np.flatnonzero(first)
        blocks = expand(runs.start, runs.length)
        return cls(
            bucket=bucket[at],
            rectangle=runs.piece[at] // layout.partition[2],
            rows=np.diff(np.append(at, len(runs))),
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
        """Where each block's first value lies in the array of all buckets' values, int64 [nnz]."""
        before = np.searchsorted(self.bucket, self.bucket)
        in_bucket = self.first_nz - self.first_nz[before] if len(self.bucket) else self.first_nz
        base = self.bucket * layout.nz_elements + in_bucket * layout.area
        return expand(base, self.nz, layout.area)

    def transposed(self) -> SubGroups:
        """The same sub-groups with rows and columns swapped, for grad_input's own buckets."""
        width = int(self.col.max(initial=0)) + 1
        row_group = np.repeat(np.arange(len(self.rows)), self.rows)
        order = stable_order(self.row)
        order = order[stable_order(row_group[order])]
        # One matrix with the sub-groups along its diagonal: SciPy's counting sort by columns
        # swaps rows and columns of all of them in one pass.
        length = self.length[order]
        place = expand(self.row_nz[order], length)
        column = self.col[place] + np.repeat(row_group[order] * width, length)
        offsets = np.append(0, np.cumsum(length))
        shape = (len(order), len(self.rows) * width)
        turned = scipy.sparse.csr_array((place, column, offsets), shape=shape).tocsc()
        count = np.diff(turned.indptr)
        column = np.flatnonzero(count)
        count = count[column].astype(np.int64)
        start = turned.indptr[column].astype(np.int64)
        group = column // width
        if len(column):
            by_length = stable_order(count.max() - count)
            sort = by_length[stable_order(group[by_length])]
            column, group, start, count = column[sort], group[sort], start[sort], count[sort]
        blocks = expand(start, count)
        return SubGroups(
            bucket=self.bucket,
            rectangle=self.rectangle,
            rows=np.bincount(group, minlength=len(self.rows)),
            nz=self.nz,
            row=column % width,
            length=count,
            col=self.row[order][turned.indices[blocks]],
            source=turned.data[blocks] - np.repeat(self.first_nz, self.nz),
        )
