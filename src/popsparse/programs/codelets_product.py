"""The vertices of forward and grad_input: sub-groups of buckets times a dense operand."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import scipy.sparse

from popsparse.machine import UNSIGNED_SHORT, Codelet, In, InOut, Out, VertexView
from popsparse.planning import tile_cycles
from popsparse.planning.plan import Plan
from popsparse.programs.buckets import BucketCodelets, Found

# Vertices are computed together as long as their operands in float32 stay below this.
_CHUNK_BYTES = 1 << 26


def chunks(count: int, elements: int) -> Iterator[slice]:
    """Ranges of vertices, each with `elements` of float32, that fit a working set."""
    step = max(1, _CHUNK_BYTES // (4 * max(elements, 1)))
    for first in range(0, count, step):
        yield slice(first, min(first + step, count))


class ProductCodelets(BucketCodelets):
    """Codelets that add what a tile's buckets hold of its rectangle, times the tile's operand.

    `distribution` sees the tile's own bucket and those of its Z partners; `propagation` sees the
    one that is passing. Their edges: words and values of buckets, `operand` [channels, batch],
    `partials` [channels, batch].
    """

    def __init__(self, plan: Plan, name: str, *, turned_blocks: bool) -> None:
        super().__init__(plan, name)
        self.turned = name == "grad_input"
        self.turned_blocks = turned_blocks
        operand = {"operand": In(), "partials": InOut()}
        own = {"words": In(UNSIGNED_SHORT), "values": In()}
        others = {"other_words": In(UNSIGNED_SHORT), "other_values": In()}
        self.distribution = self._codelet(
            f"{name} distribution",
            {**own, **others, **operand},
            self._compute,
            ("rectangle",),
            self._flops,
        )
        self.propagation = self._codelet(
            f"{name} propagation",
            {**own, **operand},
            self._compute,
            ("rectangle",),
            self._flops,
        )

    @staticmethod
    def _buckets(v: VertexView, what: str) -> np.ndarray:
        """[vertices, buckets, words or values]."""
        own = getattr(v, what).reshape(v.count, 1, -1)
        other = v.__dict__.get(f"other_{what}")
        if other is None or other.shape[v.rank] == 0:
            return own
        return np.concatenate([own, other.reshape(v.count, other.shape[v.rank], -1)], axis=1)

    def _match(self, v: VertexView) -> tuple[np.ndarray, Found]:
        return self.reader.match(self._buckets(v, "words"), v.rectangle.reshape(-1))

    def _compute(self, v: VertexView) -> None:
        found = self._matched(v)
        if not len(found.vertex):
            return
        grid = v.count
        partials = v.partials.reshape(grid, *v.partials.shape[v.rank :])
        assert np.shares_memory(partials, v.partials)
        operand = v.operand.reshape(grid, *v.operand.shape[v.rank :])
        values = self._buckets(v, "values")
        if self.turned:
            found = found._replace(row=found.col, col=found.row)
        bx, by = self.plan.block_dimensions
        values = values[..., : values.shape[-1] // (bx * by) * bx * by]
        if not self.turned:
            values = values.reshape(*values.shape[:2], -1, bx, by)
        elif self.turned_blocks:
            values = values.reshape(*values.shape[:2], -1, by, bx)
        else:
            values = values.reshape(*values.shape[:2], -1, bx, by).swapaxes(-1, -2)
        rounds = partials.dtype == np.float16
        for part in chunks(grid, operand[0].size + partials[0].size):
            at = slice(*np.searchsorted(found.vertex, (part.start, part.stop)))
            if at.start == at.stop:
                continue
            here = Found(*(a[at] for a in found))
            blocks = values[here.vertex, here.slot, here.place].astype(np.float32)
            here = here._replace(vertex=here.vertex - part.start)
            add = _add_rounding if rounds else _add
            add(partials[part], operand[part], blocks, here)


def _add(partials: np.ndarray, operand: np.ndarray, blocks: np.ndarray, found: Found) -> None:
    """partials += blocks x operand in float32, all vertices as one block-diagonal matrix."""
    _, height, width = blocks.shape
    count, outputs, batch = partials.shape
    inputs = operand.shape[1]
    rows = found.vertex * (outputs // height) + found.row
    cols = found.vertex * (inputs // width) + found.col
    order = np.argsort(rows, kind="stable")
    offsets = np.append(0, np.cumsum(np.bincount(rows, minlength=count * outputs // height)))
    shape = (count * outputs, count * inputs)
    if height == width == 1:
        data = blocks.reshape(-1)[order]
        matrix = scipy.sparse.csr_array((data, cols[order], offsets), shape=shape)
    else:
        matrix = scipy.sparse.bsr_array((blocks[order], cols[order], offsets), shape=shape)
    dense = operand.astype(np.float32).reshape(count * inputs, batch)
    partials += (matrix @ dense).reshape(partials.shape)


def _add_rounding(
    partials: np.ndarray, operand: np.ndarray, blocks: np.ndarray, found: Found
) -> None:
    """The same with float16 partials, which round after each block of a row."""
    _, height, width = blocks.shape
    count, outputs, batch = partials.shape
    order = np.argsort(found.vertex * outputs + found.row, kind="stable")
    vertex, row, col = found.vertex[order], found.row[order], found.col[order]
    blocks = blocks[order]
    key = vertex * outputs + row
    turn = np.arange(len(key)) - np.searchsorted(key, key)
    # Splitting a dimension leaves a view, whatever the padding between vertices.
    results = partials.reshape(count, outputs // height, height, batch)
    inputs = operand.reshape(count, operand.shape[1] // width, width, batch)
    for number in range(int(turn.max()) + 1):
        now = turn == number
        product = np.matmul(blocks[now], inputs[vertex[now], col[now]].astype(np.float32))
        at = vertex[now], row[now]
        results[at] = results[at].astype(np.float32) + product


def transpose_codelet(plan: Plan) -> Codelet:
    """Turns every block of a bucket: `values` to `out`, [values]."""
    bx, by = plan.block_dimensions
    count = plan.buckets.nz_elements // (bx * by)
    cycles = int(tile_cycles.transpose_blocks(count, bx, by, plan.dtype, int(plan.target.workers)))

    def turn(v: VertexView) -> None:
        used = count * bx * by
        blocks = v.values[..., :used].reshape(*v.shape, count, bx, by).swapaxes(-1, -2)
        v.out[..., :used] = blocks.reshape(*v.shape, used)
        v.out[..., used:] = 0

    return Codelet("transpose blocks", {"values": In(), "out": Out()}, turn, cycles, "supervisor")
