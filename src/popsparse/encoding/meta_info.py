"""Meta-info words of the buckets, written for all buckets at once.

Every word is an unsigned 16-bit number. Offsets called "from here" count words from the first word
of the entry they stand in. A bucket is a list of sub-groups and then one 0.

Element format, sub-group of 9 words:
    0 id                  x * Ny + y + 1 of the rectangle (grad_input's buckets: y * Nx + x + 1)
    1 x                   partition of X (of Y in grad_input's buckets)
    2 y                   partition of Y (of X in grad_input's buckets)
    3 nz                  non-zeros of the sub-group
    4 next                words from here to the next sub-group (or the end marker)
    5 num_z               elements of Z on a tile
    6 rows - 1
    7 first row           words from here to the first row entry
    8 workers
  per worker, 5 words: offset of its first value in the sub-group (0 in grad_input's buckets, whose
    rows carry positions), elements of Z, first element of Z, rows - 1, words from here to its
    first row entry
  with grad_weight: one word, how many workers it uses, and for each, 4 words: offset of its first
    value in the sub-group, words from here to the entry of the row it starts in, columns of that
    row before its first, how many non-zeros it computes
  per row, 2 words: row inside the rectangle, columns; then for each non-zero one word: column
    inside the rectangle * num_z * bytes of a value. In grad_input's buckets two words: place of
    the value in the sub-group * bytes of a value, then column * num_z * bytes of a value.

Block format, sub-group of 7 words: id, x, y, elements from this sub-group's values to the next's,
  words from here to the next sub-group, block rows - 1, grad_weight workers (0 without it)
  per grad_weight worker, 4 words as above; the offset of the value counts elements
  per block row, 2 words: first row inside the rectangle in elements, blocks - 1; then for each
    block one word: first column inside the rectangle in elements
"""

from __future__ import annotations

import numpy as np

from popsparse.encoding.assignment import expand
from popsparse.encoding.layout import BucketLayout
from popsparse.encoding.sub_groups import SubGroups
from popsparse.planning.words import (
    BLOCK_HEADER,
    ELEMENT_HEADER,
    ELEMENT_WORKER,
    GRAD_W_WORKER,
    ROW_ENTRY,
    WORD_LIMIT,
)
from popsparse.planning.work_split import even_split, split_rows


class MetaInfoWriter:
    """Lays out the meta-info of `groups` and writes it.

    Args:
        groups: the content of the buckets; transposed for `grad_a`.
        grad_a: write grad_input's own buckets.

    Attributes:
        words: words each bucket takes, end marker included, int64 [buckets].
    """

    def __init__(self, groups: SubGroups, layout: BucketLayout, *, grad_a: bool = False) -> None:
        self.groups, self.layout, self.grad_a = groups, layout, grad_a
        self.per_nz = 2 if grad_a else 1
        if layout.element_format:
            self.work = split_rows(groups.rows, groups.length, layout.part[2], layout.workers)
            self.workers = np.bincount(self.work.group, minlength=len(groups.rows))
            header = ELEMENT_HEADER + ELEMENT_WORKER * self.workers
        else:
            header = np.full(len(groups.rows), BLOCK_HEADER)
        self.grad_w = np.zeros(len(groups.rows), np.int64)
        if layout.grad_w and not grad_a:
            self.grad_w = np.minimum(groups.nz, layout.workers)
            self.grad_w_at = header + (1 if layout.element_format else 0)
            header = self.grad_w_at + GRAD_W_WORKER * self.grad_w
        self.header = header
        self.size = header + ROW_ENTRY * groups.rows + self.per_nz * groups.nz
        # float64 counts are exact far beyond any number of words.
        self.words = 1 + np.bincount(groups.bucket, self.size, layout.buckets).astype(np.int64)

    def write(self, out: np.ndarray) -> None:
        """Write into uint16 [buckets, bucket_stride]; each bucket's words must fit its part."""
        groups, layout = self.groups, self.layout
        before = np.cumsum(self.size) - self.size
        if len(before):
            before -= before[np.searchsorted(groups.bucket, groups.bucket)]
        offset = layout.meta_info_words if self.grad_a else 0
        self.at = groups.bucket * layout.bucket_stride + offset + before
        self.out = out.reshape(-1)
        self.row_at = expand(self.at + self.header, groups.rows, ROW_ENTRY)
        if len(groups.row):
            inside = groups.row_nz - np.repeat(groups.first_nz, groups.rows)
            self.row_at += self.per_nz * inside
        if layout.element_format:
            self._write_elements()
        else:
            self._write_blocks()
        if layout.grad_w and not self.grad_a:
            self._write_grad_w()

    def _put(self, at: np.ndarray, words: np.ndarray, what: str) -> None:
        if words.size and int(words.max()) > WORD_LIMIT:
            raise ValueError(
                f"meta-info word out of range: {what} reaches {int(words.max())}, a word holds at "
                f"most {WORD_LIMIT}; use a plan with more parts (smaller rectangles or buckets)"
            )
        self.out[at] = words

    def _header(self, *fields: tuple[str, np.ndarray]) -> None:
        parts_x, parts_y, _ = self.layout.partition
        x, y = self.groups.rectangle // parts_y, self.groups.rectangle % parts_y
        if self.grad_a:
            x, y, parts_y = y, x, parts_x
        named = (("the sub-group id", x * parts_y + y + 1), ("x", x), ("y", y), *fields)
        for k, (what, words) in enumerate(named):
            self._put(self.at + k, words, what)

    def _write_elements(self) -> None:
        groups, layout, work = self.groups, self.layout, self.work
        self._header(
            ("the number of non-zeros of a sub-group", groups.nz),
            ("the size of a sub-group", self.size),
            ("the batch of a tile", np.full_like(groups.nz, layout.num_z)),
            ("the number of rows", groups.rows - 1),
            ("the offset of the first row", self.header),
            ("the number of workers", self.workers),
        )
        at = self.at[work.group] + ELEMENT_HEADER + ELEMENT_WORKER * work.number
        row = groups.first_row[work.group] + work.row
        nz = groups.row_nz[row] - groups.first_nz[work.group] if len(row) else row
        entries = (
            ("the offset of a value", np.zeros_like(nz) if self.grad_a else nz),
            ("the batch of a worker", work.grains * layout.batch_grain),
            ("the batch offset of a worker", work.grain * layout.batch_grain),
            ("the rows of a worker", work.rows - 1),
            ("the row offset of a worker", self.row_at[row] - at),
        )
        for k, (what, words) in enumerate(entries):
            self._put(at + k, words, what)
        self._put(self.row_at, groups.row, "the row in a tile")
        self._put(self.row_at + 1, groups.length, "the number of columns of a row")
        at = expand(self.row_at + ROW_ENTRY, groups.length, self.per_nz)
        if self.grad_a:
            self._put(at, groups.source * layout.data_bytes, "the position of a value in bytes")
            at += 1
        scale = np.int64(layout.num_z * layout.data_bytes)
        self._put(at, groups.col * scale, "the column offset in bytes")

    def _write_blocks(self) -> None:
        groups, layout = self.groups, self.layout
        self._header(
            ("the number of values of a sub-group", groups.nz * layout.area),
            ("the size of a sub-group", self.size),
            ("the number of block rows", groups.rows - 1),
            ("the number of grad_weight workers", self.grad_w),
        )
        self._put(self.row_at, groups.row * layout.block[0], "the row in a tile")
        self._put(self.row_at + 1, groups.length - 1, "the number of blocks of a row")
        at = expand(self.row_at + ROW_ENTRY, groups.length)
        self._put(at, groups.col.astype(np.int64) * layout.block[1], "the column in a tile")

    def _write_grad_w(self) -> None:
        groups, layout = self.groups, self.layout
        if layout.element_format:
            self._put(self.at + self.grad_w_at - 1, self.grad_w, "the number of workers")
        group, begin, size = even_split(groups.nz, layout.workers)
        index = np.arange(len(group)) - np.repeat(np.cumsum(self.grad_w) - self.grad_w, self.grad_w)
        at = self.at[group] + self.grad_w_at[group] + GRAD_W_WORKER * index
        nz = groups.first_nz[group] + begin
        row = np.searchsorted(groups.row_nz, nz, side="right") - 1
        entries = (
            ("the offset of a value", begin * layout.area),
            ("the row offset of a worker", self.row_at[row] - at),
            ("the columns before a worker's first", nz - groups.row_nz[row]),
            ("the non-zeros of a worker", size),
        )
        for k, (what, words) in enumerate(entries):
            self._put(at + k, words, what)
