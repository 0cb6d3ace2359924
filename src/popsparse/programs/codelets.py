"""Codelets that read buckets: products, gradients, embedding.

A vertex reads the words in its tile's memory. Many tiles see the same bucket, at different steps,
so each distinct content is decoded once; a vertex still depends only on the words it was given.

No source gives cycles for the embedding kernels, so they are counted from their work: every worker
takes a share of a sub-group's rows, compares each with all indices, and for a hit moves the row's
non-zeros.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse

from popsparse.encoding.buckets import SubGroups, bucket_layout
from popsparse.encoding.meta_info import BucketContents, read_buckets
from popsparse.machine import (
    FLOAT,
    UNSIGNED_INT,
    UNSIGNED_SHORT,
    Codelet,
    In,
    InOut,
    Out,
    VertexView,
)
from popsparse.machine.intervals import equal_runs, expand, offsets_of, ranks
from popsparse.planning import cycles as tile_cycles
from popsparse.planning.params import ceil_div
from popsparse.planning.plan import Method, Plan
from popsparse.timing import MISS_CYCLES, BucketLoad, sub_group_cycles

# The cache of contents is cleared when it has this many times more than a pattern has.
_KEPT_PATTERNS = 8


class DecodedGroups(NamedTuple):
    """The sub-groups of buckets: what one holds for one rectangle, and the cycles that a tile of
    the rectangle spends on it. Its blocks are `size` from `first` on of `row`, `col` and `place`
    (in the bucket's values). int64, `cycles` float64."""

    rectangle: np.ndarray
    cycles: np.ndarray
    first: np.ndarray
    size: np.ndarray
    row: np.ndarray
    col: np.ndarray
    place: np.ndarray

    @classmethod
    def empty(cls) -> DecodedGroups:
        return cls(*(np.zeros(0, float if name == "cycles" else np.int64) for name in cls._fields))

    def append(self, other: DecodedGroups) -> DecodedGroups:
        """These sub-groups and then the others, whose blocks come after those of these."""
        other = other._replace(first=other.first + len(self.row))
        return DecodedGroups(*map(np.concatenate, zip(self, other, strict=True)))

    def take(self, groups: np.ndarray) -> DecodedGroups:
        """Some of the sub-groups, with their blocks one after the other."""
        size = self.size[groups]
        blocks = expand(self.first[groups], size)
        parts = (part[blocks] for part in (self.row, self.col, self.place))
        return DecodedGroups(
            self.rectangle[groups], self.cycles[groups], np.cumsum(size) - size, size, *parts
        )


class BucketMatches(NamedTuple):
    """Blocks that match the vertices which see them, in order of vertices. int64 [blocks].

    `slot` is the vertex's bucket that holds the block.
    """

    vertex: np.ndarray
    slot: np.ndarray
    row: np.ndarray
    col: np.ndarray
    place: np.ndarray


class BucketCodelets(ABC):
    """Codelets whose work depends on the words of buckets.

    The matches of a vertex are looked up once, for its cycles, and kept for the computation that
    follows.
    """

    def __init__(self, plan: Plan, name: str) -> None:
        self.plan = plan
        self.reader = BucketReader(plan, name)
        self._matches: Any = None

    @abstractmethod
    def _match(self, v: VertexView) -> tuple[np.ndarray, Any]:
        """Cycles of each vertex and its matches."""

    def _codelet(
        self,
        name: str,
        fields: dict[str, Any],
        compute: Callable[[VertexView], None],
        scalars: tuple[str, ...] = (),
        flops: Callable[[VertexView], Any] | float = 0,
    ) -> Codelet:
        return Codelet(
            name,
            fields,
            compute,
            self._cycles,
            "supervisor",
            scalars=scalars,
            data_dependent=True,
            flops=flops,
        )

    def _cycles(self, v: VertexView) -> np.ndarray:
        cycles, self._matches = self._match(v)
        return cycles.reshape(v.shape)

    def _flops(self, v: VertexView) -> np.ndarray:
        """Flops of blocks times a tile's part of the batch; `_match` must give `BucketMatches`."""
        bx, by = self.plan.block_dimensions
        each = 2 * bx * by * self.plan.elements_per_tile.z
        return each * np.bincount(self._find_matches(v).vertex, minlength=v.count).reshape(v.shape)

    def _blocks(self, values: np.ndarray, *, transposed: bool = False) -> np.ndarray:
        """A view [..., blocks, rows of a block, columns] of values of buckets [..., values]; with
        `transposed`, of transposed blocks."""
        bx, by = self.plan.block_dimensions
        used = values.shape[-1] // (bx * by) * bx * by
        edges = (by, bx) if transposed else (bx, by)
        return values[..., :used].reshape(*values.shape[:-1], -1, *edges)

    def _find_matches(self, v: VertexView) -> Any:
        """The matches of the vertices, kept until they are taken."""
        return self._match(v)[1] if self._matches is None else self._matches

    def _take_matches(self, v: VertexView) -> Any:
        """The matches of the vertices, which are then forgotten."""
        matches, self._matches = self._find_matches(v), None
        return matches


class BucketReader:
    """Reads the buckets of one pass of a plan."""

    def __init__(self, plan: Plan, name: str) -> None:
        self.plan = plan
        self.name = name
        self.layout = bucket_layout(plan)
        self.grad_a = name == "grad_input" and self.layout.grad_a_words > 0
        self._forget()

    def _forget(self) -> None:
        self._numbers: dict[bytes, int] = {}  # of known buckets, by their words
        self._bounds = np.zeros(1, np.int64)  # the sub-groups of bucket i end at _bounds[i + 1]
        self._decoded = DecodedGroups.empty()

    def _number(self, words: np.ndarray) -> np.ndarray:
        """The numbers of buckets, from their words: uint16 [buckets, words]."""
        rows = np.ascontiguousarray(words, np.uint16).view(f"V{2 * words.shape[1]}")
        keys = rows.reshape(-1).tolist()  # the bytes of each
        numbers = list(map(self._numbers.get, keys))
        if None in numbers:
            if len(self._numbers) > _KEPT_PATTERNS * self.layout.buckets * self.plan.sizes.groups:
                self._forget()
            unknown = [key for key in dict.fromkeys(keys) if key not in self._numbers]
            for first in range(0, len(unknown), self.layout.buckets):
                self._read(unknown[first : first + self.layout.buckets])
            numbers = list(map(self._numbers.get, keys))
        return np.array(numbers, np.int64)

    def find(
        self, words: np.ndarray, is_match: Callable[[np.ndarray, np.ndarray], np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, DecodedGroups]:
        """The sub-groups that match the vertices which see them.

        Args:
            words: uint16 [vertices, buckets each sees, words].
            is_match: whether vertices and the rectangles of sub-groups match, both [pairs].

        Returns:
            The cycles [vertices] for skipping sub-groups that do not match; then the matches in
            order of vertices: vertex and slot (which of its buckets), int64 [matches], and the
            sub-groups.
        """
        count, slots = words.shape[:2]
        numbers = self._number(words.reshape(count * slots, -1))
        begin, end = self._bounds[numbers], self._bounds[numbers + 1]
        groups = expand(begin, end - begin)
        vertex, slot = np.divmod(np.repeat(np.arange(count * slots), end - begin), slots)
        matching = is_match(vertex, self._decoded.rectangle[groups])
        cycles = MISS_CYCLES * np.bincount(vertex[~matching], minlength=count).astype(float)
        return cycles, vertex[matching], slot[matching], self._decoded.take(groups[matching])

    def match(self, words: np.ndarray, rectangles: np.ndarray) -> tuple[np.ndarray, BucketMatches]:
        """The matches of vertices with their own rectangle: cycles [vertices], and the blocks.

        Args:
            words: uint16 [vertices, buckets each sees, words].
            rectangles: x * Ny + y of each vertex, [vertices].
        """
        cycles, vertex, slot, groups = self.find(
            words, lambda vertex, rectangle: rectangle == rectangles[vertex]
        )
        np.add.at(cycles, vertex, groups.cycles)
        vertex, slot = (np.repeat(at, groups.size) for at in (vertex, slot))
        return cycles, BucketMatches(vertex, slot, groups.row, groups.col, groups.place)

    def _read(self, keys: Sequence[bytes]) -> None:
        layout = self.layout
        words = np.zeros((layout.buckets, layout.bucket_stride), np.uint16)
        part = slice(layout.meta_info_words, None) if self.grad_a else slice(layout.meta_info_words)
        rows = np.frombuffer(b"".join(keys), np.uint16).reshape(len(keys), -1)
        words[: len(keys), part] = rows
        contents = read_buckets(words, layout, grad_a=self.grad_a)
        groups = _sub_groups(contents, transposed=self.grad_a)
        load = BucketLoad(groups, layout)
        cycles = sub_group_cycles(self.plan, self.name, load) if len(groups.nz) else groups.nz
        first = np.searchsorted(contents.group, np.arange(len(groups.nz)))
        parts = contents.row, contents.col, contents.place
        read = DecodedGroups(groups.rectangle, cycles, first, groups.nz, *parts)
        bounds = np.cumsum(np.bincount(groups.bucket, minlength=len(keys)))
        self._numbers |= {key: len(self._numbers) + i for i, key in enumerate(keys)}
        self._bounds = np.append(self._bounds, self._bounds[-1] + bounds)
        self._decoded = self._decoded.append(read)


def _sub_groups(contents: BucketContents, *, transposed: bool) -> SubGroups:
    """Sub-groups, rows and blocks of decoded buckets; rows are those of the forward product."""
    order = np.arange(len(contents.group))
    if transposed:
        order = np.lexsort((contents.col, contents.row, contents.group))
    group, row, col = contents.group[order], contents.row[order], contents.col[order]
    (first, nz), (first_row, length) = equal_runs(group), equal_runs(group, row)
    return SubGroups(
        bucket=contents.bucket[order][first],
        rectangle=contents.rectangle[order][first],
        rows=np.bincount(group[first_row], minlength=len(first)),
        nz=nz,
        row=row[first_row],
        length=length,
        col=col,
        source=np.arange(len(group)),
    )


# Vertices are computed together while their operands in float32 stay below this size.
_CHUNK_BYTES = 1 << 26


def chunks(count: int, elements: int) -> Iterator[slice]:
    """Ranges of vertices, each with `elements` of float32, that fit a working set."""
    step = max(1, _CHUNK_BYTES // (4 * max(elements, 1)))
    for first in range(0, count, step):
        yield slice(first, min(first + step, count))


def _view(values: np.ndarray, *shape: int) -> np.ndarray:
    """Return a reshaped view, for writing."""
    view = values.reshape(shape)
    assert not view.size or np.shares_memory(view, values)
    return view


class ProductCodelets(BucketCodelets):
    """Codelets that multiply the blocks of a tile's rectangle in its buckets by the tile's operand.

    `distribution` sees the tile's own bucket and those of its Z partners; `propagation` sees the
    passing one. Edges: words and values of buckets, `operand` [channels, batch], `partials`
    [channels, batch].
    """

    def __init__(self, plan: Plan, name: str, *, transposed_blocks: bool) -> None:
        super().__init__(plan, name)
        self.transposed = name == "grad_input"
        self.transposed_blocks = transposed_blocks
        operand = {"operand": In(), "partials": InOut()}
        inputs = {"words": In(UNSIGNED_SHORT), "values": In()}
        others = {"other_words": In(UNSIGNED_SHORT), "other_values": In()}
        more = (self._compute, ("rectangle",), self._flops)
        edges = {**inputs, **others, **operand}
        self.distribution = self._codelet(f"{name} distribution", edges, *more)
        self.propagation = self._codelet(f"{name} propagation", {**inputs, **operand}, *more)

    @staticmethod
    def _buckets(v: VertexView, what: str) -> np.ndarray:
        """The words or values of all buckets of each vertex, [vertices, buckets, ...]."""
        bucket = getattr(v, what).reshape(v.count, 1, -1)
        other = v.__dict__.get(f"other_{what}")
        if other is None or other.shape[v.rank] == 0:
            return bucket
        return np.concatenate([bucket, other.reshape(v.count, other.shape[v.rank], -1)], axis=1)

    def _match(self, v: VertexView) -> tuple[np.ndarray, BucketMatches]:
        return self.reader.match(self._buckets(v, "words"), v.rectangle.reshape(-1))

    def _compute(self, v: VertexView) -> None:
        matches = self._take_matches(v)
        if not len(matches.vertex):
            return
        grid = v.count
        partials = _view(v.partials, grid, *v.partials.shape[v.rank :])
        operand = v.operand.reshape(grid, *v.operand.shape[v.rank :])
        values = self._blocks(self._buckets(v, "values"), transposed=self.transposed_blocks)
        if self.transposed:
            matches = matches._replace(row=matches.col, col=matches.row)
            values = values if self.transposed_blocks else values.swapaxes(-1, -2)
        add = _add_rounding if partials.dtype == np.float16 else _add
        for part in chunks(grid, operand[0].size + partials[0].size):
            at = slice(*np.searchsorted(matches.vertex, (part.start, part.stop)))
            if at.start == at.stop:
                continue
            here = BucketMatches(*(a[at] for a in matches))
            blocks = values[here.vertex, here.slot, here.place].astype(np.float32)
            here = here._replace(vertex=here.vertex - part.start)
            add(partials[part], operand[part], blocks, here)


def _add(
    partials: np.ndarray, operand: np.ndarray, blocks: np.ndarray, matches: BucketMatches
) -> None:
    """partials += blocks x operand in float32, all vertices as one block-diagonal matrix."""
    _, height, width = blocks.shape
    count, outputs, batch = partials.shape
    inputs = operand.shape[1]
    rows = matches.vertex * (outputs // height) + matches.row
    cols = matches.vertex * (inputs // width) + matches.col
    order = np.argsort(rows, kind="stable")
    offsets = offsets_of(np.bincount(rows, minlength=count * outputs // height))
    shape = (count * outputs, count * inputs)
    if height == width == 1:
        data = blocks.reshape(-1)[order]
        matrix = scipy.sparse.csr_array((data, cols[order], offsets), shape=shape)
    else:
        matrix = scipy.sparse.bsr_array((blocks[order], cols[order], offsets), shape=shape)
    dense = operand.astype(np.float32).reshape(count * inputs, batch)
    partials += (matrix @ dense).reshape(partials.shape)


def _add_rounding(
    partials: np.ndarray, operand: np.ndarray, blocks: np.ndarray, matches: BucketMatches
) -> None:
    """partials += blocks x operand, with float16 partials rounded after each block of a row."""
    _, height, width = blocks.shape
    count, outputs, batch = partials.shape
    order = np.argsort(matches.vertex * outputs + matches.row, kind="stable")
    vertex, row, col = matches.vertex[order], matches.row[order], matches.col[order]
    blocks = blocks[order]
    turn = ranks(equal_runs(vertex, row).lengths)
    # Splitting a dimension leaves a view, whatever the padding between vertices.
    results = partials.reshape(count, outputs // height, height, batch)
    inputs = operand.reshape(count, operand.shape[1] // width, width, batch)
    for number in range(int(turn.max()) + 1):
        now = turn == number
        product = np.matmul(blocks[now], inputs[vertex[now], col[now]].astype(np.float32))
        at = vertex[now], row[now]
        results[at] = results[at].astype(np.float32) + product


def transpose_codelet(plan: Plan) -> Codelet:
    """Transposes every block of a bucket: `values` to `out`, [values]."""
    bx, by = plan.block_dimensions
    count = plan.buckets.nz_elements // (bx * by)
    cycles = int(tile_cycles.transpose_blocks(count, bx, by, plan.dtype, int(plan.target.workers)))

    def transpose(v: VertexView) -> None:
        used = count * bx * by
        blocks = v.values[..., :used].reshape(*v.shape, count, bx, by).swapaxes(-1, -2)
        v.out[..., :used] = blocks.reshape(*v.shape, used)
        v.out[..., used:] = 0

    return Codelet(
        "transpose blocks", {"values": In(), "out": Out()}, transpose, cycles, "supervisor"
    )


class GradWeightCodelets(BucketCodelets):
    """Codelets that add dY x X^T of a tile's part of the batch to a bucket's partial gradients.

    Edges: `words` and `partials` of the bucket; `gradient` and `input`, [channels, batch], or
    [batch, channels] if the matrix units need it. The rectangle of the operands is given by a
    scalar (`resident`: buckets travel) or by the operands themselves (`visiting`: they travel).
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan, "grad_weight")
        self.batch_first = plan.method is Method.BLOCK_AMP
        edges = {"words": In(UNSIGNED_SHORT), "partials": InOut(), "gradient": In(), "input": In()}
        ids = {"x_id": In(UNSIGNED_INT), "y_id": In(UNSIGNED_INT)}
        more = (self._compute, ("rectangle",), self._flops)
        self.resident = self._codelet("grad_weight", edges, *more)
        visitors = {**edges, **ids}
        self.visiting = self._codelet(
            "grad_weight of visitors", visitors, self._compute, flops=self._flops
        )

    def _match(self, v: VertexView) -> tuple[np.ndarray, BucketMatches]:
        words = v.words.reshape(v.count, 1, -1)
        if "x_id" in v.__dict__:
            parts_y = self.plan.partition.y
            rectangle = v.x_id.astype(np.int64) * parts_y + v.y_id.astype(np.int64)
        else:
            rectangle = v.rectangle
        return self.reader.match(words, rectangle.reshape(-1))

    def _compute(self, v: VertexView) -> None:
        matches = self._take_matches(v)
        bx, by = self.plan.block_dimensions
        partials = self._blocks(_view(v.partials, v.count, -1))
        gradient = self._by_block(v, v.gradient, bx)
        inputs = self._by_block(v, v.input, by)
        for part in chunks(len(matches.vertex), (bx + by) * gradient.shape[-1]):
            here = BucketMatches(*(a[part] for a in matches))
            left = gradient[here.vertex, here.row].astype(np.float32)
            right = inputs[here.vertex, here.col].astype(np.float32)
            product = np.matmul(left, right.swapaxes(-1, -2))
            at = here.vertex, here.place
            partials[at] = partials[at].astype(np.float32) + product

    def _by_block(self, v: VertexView, operand: np.ndarray, edge: int) -> np.ndarray:
        """View an operand by blocks of its channels: [vertices, blocks, edge, batch]."""
        operand = operand.reshape(v.count, *operand.shape[v.rank :])
        if self.batch_first:
            operand = operand.swapaxes(-1, -2)
        return operand.reshape(v.count, -1, edge, operand.shape[-1])


def rearrange_codelet(plan: Plan, dim: str) -> Codelet:
    """Transposes the operand of dimension "x" or "y": [channels, batch] to [batch, channels]."""
    blocks = getattr(plan.groups_per_tile, dim)
    edge = getattr(plan.grouping, dim)
    batch = plan.elements_per_tile.z
    workers = int(plan.target.workers)
    cycles = int(tile_cycles.rearrange_batch(blocks, edge, batch, plan.dtype, workers))

    def transpose(v: VertexView) -> None:
        v.out[...] = v.operand.swapaxes(-1, -2)

    return Codelet("rearrange", {"operand": In(), "out": Out()}, transpose, cycles, "supervisor")


_LAUNCH = 46  # Supervisor: find a sub-group, start the workers; as in the products' formulas.
_ROW, _COMPARE = 10, 1  # Worker: a row's entry and pointers; one index.
_HIT, _MOVE = 5, 3  # Worker: a row that matches; load, add or store of a vector.


class _Hits(NamedTuple):
    """Matches of a vertex's indices with blocks: one element per pair."""

    vertex: np.ndarray
    entry: np.ndarray
    inner: np.ndarray
    col: np.ndarray
    place: np.ndarray


class EmbeddingCodelets(BucketCodelets):
    """Codelets of embeddings: `gather` copies from a passing bucket into a tile's slices, `scatter`
    adds passing slices to the partial updates of a tile's bucket."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan, "forward")
        common = {"words": In(UNSIGNED_SHORT), "indices": In(UNSIGNED_INT)}
        bucket = {"values": In(), "slices": InOut()}
        self.gather = self._codelet(
            "embedding slice", {**common, **bucket}, self._gather, ("column",)
        )
        visitors = {"slices": In(), "column": In(UNSIGNED_INT), "scale": In(FLOAT)}
        self.scatter = self._codelet(
            "embedding update", {**common, **visitors, "partials": InOut(FLOAT)}, self._scatter
        )

    def _match(self, v: VertexView) -> tuple[np.ndarray, _Hits]:
        """Cycles of each vertex and the matches it has to move."""
        plan = self.plan
        parts_y, rows = plan.partition.y, plan.groups_per_tile.x
        bx, by = plan.block_dimensions
        columns = v.column.reshape(-1)
        indices = v.indices.reshape(v.count, -1).astype(np.int64)
        words = v.words.reshape(v.count, 1, -1)
        cycles, vertex, _, groups = self.reader.find(
            words, lambda vertex, rectangle: rectangle % parts_y == columns[vertex]
        )
        owner = np.repeat(vertex, groups.size)
        row = groups.row + np.repeat(groups.rectangle // parts_y * rows, groups.size)
        # Indices of all vertices, sorted by (vertex, block row); padding sorts past every row.
        total = plan.partition.x * rows + 1
        requested = np.minimum(indices // bx, total - 1) + np.arange(v.count)[:, None] * total
        order = np.argsort(requested, axis=None, kind="stable")
        keys = requested.reshape(-1)[order]
        low, high = (np.searchsorted(keys, owner * total + row, side) for side in ("left", "right"))
        times = high - low
        block = np.repeat(np.arange(len(row)), times)
        index = order[expand(low, times)] % indices.shape[1]
        hits = _Hits(
            owner[block],
            index,
            indices[owner[block], index] % bx,
            groups.col[block],
            groups.place[block],
        )
        workers = int(plan.target.workers)
        vectors = ceil_div(by, plan.dtype.vector_width)
        moves = np.bincount(hits.vertex, minlength=v.count) * (_MOVE * vectors + _HIT)
        cycles += ceil_div(moves, workers) * workers
        group = np.repeat(np.arange(len(groups.size)), groups.size)
        filled = np.unique(group * rows + groups.row) // rows  # one for each row that has blocks
        counts = np.bincount(filled, minlength=len(groups.size))
        look = _LAUNCH + workers * ceil_div(counts, workers) * (_ROW + _COMPARE * indices.shape[1])
        np.add.at(cycles, vertex, look)
        return cycles, hits

    def _gather(self, v: VertexView) -> None:
        hits = self._take_matches(v)
        by = self.plan.block_dimensions[1]
        values = self._blocks(v.values.reshape(v.count, -1))
        slices = _view(v.slices, v.count, *v.slices.shape[v.rank :])
        slices = slices.reshape(*slices.shape[:2], -1, by)
        slices[hits.vertex, hits.entry, hits.col] = values[hits.vertex, hits.place, hits.inner]

    def _scatter(self, v: VertexView) -> None:
        hits = self._take_matches(v)
        by = self.plan.block_dimensions[1]
        slices = v.slices.reshape(v.count, *v.slices.shape[v.rank :])
        slices = slices.reshape(*slices.shape[:2], -1, by)
        partials = _view(v.partials, v.count, -1)
        update = slices[hits.vertex, hits.entry, hits.col].astype(np.float32)
        update *= v.scale.reshape(v.count, 1)[hits.vertex]
        np.add.at(self._blocks(partials), (hits.vertex, hits.place, hits.inner), update)
