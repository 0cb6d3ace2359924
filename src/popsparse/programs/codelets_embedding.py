"""The vertices of the embedding: rows gathered from buckets, and added into them.

No source gives cycles for these kernels, so theirs are counted from what they have to do: every
worker takes a share of a sub-group's rows, compares each with all indices, and for a hit moves the
row's non-zeros.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from popsparse.machine import FLOAT, UNSIGNED_INT, UNSIGNED_SHORT, In, InOut, VertexView
from popsparse.planning.plan import Plan
from popsparse.programs.buckets import BucketCodelets, SubGroup
from popsparse.timing.load import MISS_CYCLES

_LAUNCH = 46  # Supervisor: find a sub-group, start the workers; as in the products' formulas.
_ROW, _COMPARE = 10, 1  # Worker: a row's entry and pointers; one index.
_HIT, _MOVE = 5, 3  # Worker: a row that is asked for; load, add or store of a vector.


class _Hits(NamedTuple):
    """Which index of which vertex meets which block: one element per pair."""

    vertex: np.ndarray
    entry: np.ndarray
    inner: np.ndarray
    col: np.ndarray
    place: np.ndarray


class EmbeddingCodelets(BucketCodelets):
    """`gather`: from a passing bucket into a tile's slices. `scatter`: from passing slices into the
    partial updates of a tile's bucket."""

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
        """Cycles of each vertex and what it has to move."""
        plan = self.plan
        parts_y, rows = plan.partition.y, plan.groups_per_tile.x
        bx, by = plan.block_dimensions
        columns = v.column.reshape(-1)
        indices = v.indices.reshape(v.count, -1).astype(np.int64)
        found = self.reader.groups(v.words.reshape(v.count, -1))
        cycles = np.zeros(v.count)
        vertex: list[int] = []
        mine: list[SubGroup] = []
        for number, groups in enumerate(found):
            for group in groups:
                if group.rectangle % parts_y == columns[number]:
                    vertex.append(number)
                    mine.append(group)
                else:
                    cycles[number] += MISS_CYCLES
        sizes = [len(group.row) for group in mine]
        owner = np.repeat(np.array(vertex, np.int64), sizes)
        first = np.repeat([group.rectangle // parts_y * rows for group in mine], sizes)

        def joined(part: str) -> np.ndarray:
            return np.concatenate([np.zeros(0, np.int64), *(getattr(g, part) for g in mine)])

        row = joined("row") + first.astype(np.int64)
        # Indices of all vertices, sorted by (vertex, block row); padding sorts past every row.
        total = plan.partition.x * rows + 1
        wanted = np.minimum(indices // bx, total - 1) + np.arange(v.count)[:, None] * total
        order = np.argsort(wanted, axis=None, kind="stable")
        keys = wanted.reshape(-1)[order]
        low, high = (np.searchsorted(keys, owner * total + row, side) for side in ("left", "right"))
        times = high - low
        block = np.repeat(np.arange(len(row)), times)
        at = np.arange(len(block)) - np.repeat(np.cumsum(times) - times, times)
        index = order[np.repeat(low, times) + at] % indices.shape[1]
        hits = _Hits(
            owner[block],
            index,
            indices[owner[block], index] % bx,
            joined("col")[block],
            joined("place")[block],
        )
        workers = int(plan.target.workers)
        vectors = -(-by // plan.dtype.vector_width)
        moves = np.bincount(hits.vertex, minlength=v.count) * (_MOVE * vectors + _HIT)
        cycles += -(-moves // workers) * workers
        counts = np.array([len(np.unique(group.row)) for group in mine])
        look = _LAUNCH + workers * -(-counts // workers) * (_ROW + _COMPARE * indices.shape[1])
        np.add.at(cycles, np.array(vertex, np.int64), look)
        return cycles, hits

    def _gather(self, v: VertexView) -> None:
        hits = self._matched(v)
        by = self.plan.block_dimensions[1]
        values = self._blocks(v.values.reshape(v.count, -1))
        slices = v.slices.reshape(v.count, *v.slices.shape[v.rank :])
        assert np.shares_memory(slices, v.slices)
        slices = slices.reshape(*slices.shape[:2], -1, by)
        slices[hits.vertex, hits.entry, hits.col] = values[hits.vertex, hits.place, hits.inner]

    def _scatter(self, v: VertexView) -> None:
        hits = self._matched(v)
        by = self.plan.block_dimensions[1]
        slices = v.slices.reshape(v.count, *v.slices.shape[v.rank :])
        slices = slices.reshape(*slices.shape[:2], -1, by)
        partials = v.partials.reshape(v.count, -1)
        assert np.shares_memory(partials, v.partials)
        update = slices[hits.vertex, hits.entry, hits.col].astype(np.float32)
        update *= v.scale.reshape(v.count, 1)[hits.vertex]
        np.add.at(self._blocks(partials), (hits.vertex, hits.place, hits.inner), update)

    def _blocks(self, values: np.ndarray) -> np.ndarray:
        """A view [vertices, blocks, rows of a block, columns]."""
        bx, by = self.plan.block_dimensions
        used = values.shape[1] // (bx * by) * bx * by
        return values[:, :used].reshape(len(values), -1, bx, by)
