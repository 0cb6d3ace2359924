"""Writing and reading the words of meta-info, which docs/popsparse-partitioner.md lists.

Every word is an unsigned 16-bit number. Offsets "from here" count words from the first word of
their own entry. A bucket is a list of sub-groups followed by a 0. A sub-group is a header, entries
of its workers in the element format, entries of grad_weight's workers if it has any, and rows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from popsparse.encoding.buckets import BucketLayout, SubGroups
from popsparse.machine.intervals import expand, ranks
from popsparse.planning.cycles import even_split, split_rows
from popsparse.planning.params import (
    BLOCK_HEADER,
    ELEMENT_HEADER,
    ELEMENT_WORKER,
    GRAD_W_WORKER,
    ROW_ENTRY,
    WORD_LIMIT,
)


class MetaInfoWriter:
    """Lays out the meta-info of `groups` and writes it.

    Args:
        groups: the content of the buckets; transposed for `grad_a`.
        grad_a: write grad_input's own buckets.

    Attributes:
        words: words of each bucket, end marker included, int64 [buckets].
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
        """Write into uint16 [buckets, bucket_stride]; each bucket's words must fit its row."""
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

    def _write_header(self, *fields: tuple[str, np.ndarray]) -> None:
        parts_x, parts_y, _ = self.layout.partition
        x, y = self.groups.rectangle // parts_y, self.groups.rectangle % parts_y
        if self.grad_a:
            x, y, parts_y = y, x, parts_x
        named = (("the sub-group id", x * parts_y + y + 1), ("x", x), ("y", y), *fields)
        for k, (what, words) in enumerate(named):
            self._put(self.at + k, words, what)

    def _write_elements(self) -> None:
        groups, layout, work = self.groups, self.layout, self.work
        self._write_header(
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
        self._write_header(
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
        at = self.at[group] + self.grad_w_at[group] + GRAD_W_WORKER * ranks(self.grad_w)
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


class BucketContents(NamedTuple):
    """Every block in the buckets, in order of buckets and inside them as stored. int64 [nnz].

    `bucket` holds the block, `rectangle` = x * Ny + y is its rectangle, `row` and `col` its block
    coordinates inside the rectangle, `place` its position in the bucket's values in blocks.
    `group` counts the sub-groups, in order of buckets.
    """

    bucket: np.ndarray
    rectangle: np.ndarray
    row: np.ndarray
    col: np.ndarray
    place: np.ndarray
    group: np.ndarray


class _Groups(NamedTuple):
    bucket: np.ndarray
    at: np.ndarray
    end: np.ndarray
    first_nz: np.ndarray
    nz: np.ndarray


def _require(ok: np.ndarray, bucket: np.ndarray, what: str) -> None:
    if not ok.all():
        raise ValueError(f"meta-info of bucket {int(bucket[~ok][0])}: {what}")


def _walk_groups(words: np.ndarray, bounds: tuple[int, int], layout: BucketLayout) -> _Groups:
    """Find all sub-groups: follow the offsets from one to the next in all buckets at once.

    `words` is int64 [buckets, stride]; the part read of each bucket is bounds[0]..bounds[1].
    """
    begin, end = bounds
    header = ELEMENT_HEADER if layout.element_format else BLOCK_HEADER
    bucket = np.arange(len(words))
    at = np.full(len(words), begin)
    nz = np.zeros(len(words), np.int64)
    parts: list[np.ndarray] = []
    while len(bucket):
        _require(at < end, bucket, f"no end marker within its {end - begin} words")
        more = words[bucket, at] != 0
        bucket, at, nz = bucket[more], at[more], nz[more]
        _require(at + header < end, bucket, "a sub-group header reaches past the bucket")
        size = words[bucket, at + 4]
        count = words[bucket, at + 3]
        if not layout.element_format:
            _require(count % layout.area == 0, bucket, f"values not in blocks of {layout.area}")
            count = count // layout.area
        _require(size >= header, bucket, "offset to the next sub-group shorter than its header")
        _require(at + size < end, bucket, "offset to the next sub-group past the bucket")
        _require(nz + count <= layout.capacity, bucket, f"more non-zeros than {layout.capacity}")
        parts.append(np.stack([bucket, at, at + size, nz, count]))
        at, nz = at + size, nz + count
    table = np.concatenate(parts, axis=1) if parts else np.zeros((5, 0), np.int64)
    return _Groups(*table[:, np.argsort(table[0], kind="stable")])


def read_buckets(
    meta_info: np.ndarray, layout: BucketLayout, *, grad_a: bool = False
) -> BucketContents:
    """Read the buckets of one group.

    Args:
        meta_info: words without the overflow record, [buckets * stride] or [buckets, stride].
        layout: of the buckets.
        grad_a: read grad_input's own buckets; the result has rows and columns as in the forward
            ones, in the order of columns as stored.

    Raises:
        ValueError: a size that does not match the layout, or words that no bucket can have.
    """
    if meta_info.size != layout.buckets * layout.bucket_stride:
        raise ValueError(
            f"meta-info must have {layout.buckets} buckets of {layout.bucket_stride} words, "
            f"{layout.buckets * layout.bucket_stride} in all, got {meta_info.size}"
        )
    words = np.asarray(meta_info).reshape(layout.buckets, -1).astype(np.int64)
    split = layout.meta_info_words
    bounds = (split, layout.bucket_stride) if grad_a else (0, split)
    groups = _walk_groups(words, bounds, layout)
    bucket, at = groups.bucket, groups.at
    parts_x, parts_y, _ = layout.partition
    part_x, part_y, _ = layout.part
    grid_x, grid_y = layout.grid
    per_nz, step_x, step_y = 1, *layout.block
    if layout.element_format:
        step_x, step_y = 1, layout.num_z * layout.data_bytes
    if grad_a:
        parts_x, parts_y, part_x, part_y = parts_y, parts_x, part_y, part_x
        grid_x, grid_y, per_nz = grid_y, grid_x, 2
    ident = words[bucket, at] - 1
    _require(ident < parts_x * parts_y, bucket, f"sub-group id outside {parts_x} x {parts_y}")
    x, y = ident // parts_y, ident % parts_y
    same = (words[bucket, at + 1] == x) & (words[bucket, at + 2] == y)
    _require(same, bucket, "sub-group id and its x, y differ")
    rows_here = np.minimum(part_x, grid_x - x * part_x)
    cols_here = np.minimum(part_y, grid_y - y * part_y)
    if layout.element_format:
        rows = words[bucket, at + 6] + 1
        row_at = at + words[bucket, at + 7]
    else:
        rows = words[bucket, at + 5] + 1
        workers = words[bucket, at + 6]
        row_at = at + BLOCK_HEADER + GRAD_W_WORKER * workers
    _require(rows <= rows_here, bucket, "more rows than the rectangle has")

    entries: list[np.ndarray] = []
    group = np.arange(len(bucket))
    index = np.zeros(len(bucket), np.int64)
    nz = np.zeros(len(bucket), np.int64)
    while len(group):
        b = bucket[group]
        _require(row_at[group] + ROW_ENTRY <= groups.end[group], b, "a row reaches past its end")
        row = words[b, row_at[group]]
        count = words[b, row_at[group] + 1] + (0 if layout.element_format else 1)
        _require(row % step_x == 0, b, "a row that is not on a block boundary")
        _require(row // step_x < rows_here[group], b, "row outside its rectangle")
        _require((count >= 1) & (count <= cols_here[group]), b, "number of columns out of range")
        end = row_at[group] + ROW_ENTRY + per_nz * count
        _require(end <= groups.end[group], b, "the columns of a row reach past the sub-group")
        entries.append(
            np.stack([group, row // step_x, row_at[group] + ROW_ENTRY, count, nz[group]])
        )
        row_at[group] = end
        nz[group] += count
        index[group] += 1
        group = group[index[group] < rows[group]]
    _require(nz == groups.nz, bucket, "number of non-zeros and rows differ")
    _require(row_at == groups.end, bucket, "words left over in a sub-group")
    table = np.concatenate(entries, axis=1) if entries else np.zeros((5, 0), np.int64)
    group, row, first, count, before = table[:, np.argsort(table[0], kind="stable")]

    entry_group = np.repeat(group, count)
    b = bucket[entry_group]
    entry_at = expand(first, count, per_nz)
    place = expand(before, count)
    if grad_a:
        place = words[b, entry_at] // layout.data_bytes
        entry_at = entry_at + 1
        _require(place < groups.nz[entry_group], b, "position of a value outside its sub-group")
    col = words[b, entry_at]
    _require(col % step_y == 0, b, f"a column that is not a multiple of {step_y}")
    col = col // step_y
    _require(col < cols_here[entry_group], b, "column outside its rectangle")
    row = np.repeat(row, count)
    place = place + groups.first_nz[entry_group]
    rectangle = (y * parts_x + x if grad_a else ident)[entry_group]
    if grad_a:
        row, col = col, row
    return BucketContents(b, rectangle, row, col, place, entry_group)
