"""Reading buckets on the tiles: which of what lies in a bucket belongs to which rectangle.

A vertex reads the words in its tile's memory. Many tiles see the same bucket, at different steps,
so each distinct content is read once; what a vertex does still depends on nothing but the words it
was given.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from popsparse.encoding.layout import bucket_layout
from popsparse.encoding.overflow import OverflowInfo
from popsparse.encoding.reader import BucketContents, read_buckets
from popsparse.encoding.sub_groups import SubGroups
from popsparse.machine import Codelet, VertexView
from popsparse.planning.plan import Plan
from popsparse.timing.load import MISS_CYCLES, BucketLoad
from popsparse.timing.model import sub_group_cycles

# Contents are forgotten when this many times more are known than a pattern has.
_KEPT_PATTERNS = 8


class SubGroup(NamedTuple):
    """What a bucket holds for one rectangle: block rows, columns and places in its values, and
    what a tile of the rectangle spends on it."""

    rectangle: int
    cycles: float
    row: np.ndarray
    col: np.ndarray
    place: np.ndarray


class Found(NamedTuple):
    """Blocks that concern the vertices which see them, in order of vertices. int64 [blocks].

    `slot` says in which of a vertex's buckets a block lies.
    """

    vertex: np.ndarray
    slot: np.ndarray
    row: np.ndarray
    col: np.ndarray
    place: np.ndarray


class BucketCodelets(ABC):
    """Codelets whose work is what the words of buckets say.

    What a vertex finds there is looked up once, for its cycles, and kept for its work, which
    follows.
    """

    def __init__(self, plan: Plan, name: str) -> None:
        self.plan = plan
        self.reader = BucketReader(plan, name)
        self._found: Any = None

    @abstractmethod
    def _match(self, v: VertexView) -> tuple[np.ndarray, Any]:
        """Cycles of each vertex and what it has to do."""

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
        cycles, self._found = self._match(v)
        return cycles.reshape(v.shape)

    def _flops(self, v: VertexView) -> np.ndarray:
        """Of blocks, each times a tile's part of the batch; `_match` gives `Found`."""
        found = self._match(v)[1] if self._found is None else self._found
        bx, by = self.plan.block_dimensions
        each = 2 * bx * by * self.plan.elements_per_tile.z
        return each * np.bincount(found.vertex, minlength=v.count).reshape(v.shape)

    def _matched(self, v: VertexView) -> Any:
        found = self._match(v)[1] if self._found is None else self._found
        self._found = None
        return found


class BucketReader:
    """Reads the buckets of one pass of a plan."""

    def __init__(self, plan: Plan, name: str) -> None:
        self.plan = plan
        self.name = name
        self.layout = bucket_layout(plan)
        self.grad_a = name == "grad_input" and self.layout.grad_a_words > 0
        self._known: dict[bytes, list[SubGroup]] = {}

    def groups(self, words: np.ndarray) -> list[list[SubGroup]]:
        """The sub-groups of each bucket, from its words: uint16 [buckets, words]."""
        data = np.ascontiguousarray(words, np.uint16).tobytes()
        step = 2 * words.shape[1]
        keys = [data[at : at + step] for at in range(0, len(data), step)]
        unknown = list({key: None for key in keys if key not in self._known})
        if unknown:
            if len(self._known) > _KEPT_PATTERNS * self.layout.buckets * self.plan.sizes.groups:
                self._known.clear()
                unknown = list(dict.fromkeys(keys))
            for first in range(0, len(unknown), self.layout.buckets):
                self._read(unknown[first : first + self.layout.buckets])
        return [self._known[key] for key in keys]

    def match(self, words: np.ndarray, rectangles: np.ndarray) -> tuple[np.ndarray, Found]:
        """What vertices find of their own rectangle: cycles [vertices], and the blocks.

        Args:
            words: uint16 [vertices, buckets each sees, words].
            rectangles: x * Ny + y of each vertex, [vertices].
        """
        count, slots = words.shape[:2]
        found = self.groups(words.reshape(count * slots, -1))
        cycles = np.zeros(count)
        vertices, places = [], []
        mine: list[SubGroup] = []
        for index, groups in enumerate(found):
            vertex = index // slots
            for group in groups:
                if group.rectangle != rectangles[vertex]:
                    cycles[vertex] += MISS_CYCLES
                    continue
                cycles[vertex] += group.cycles
                vertices.append(vertex)
                places.append(index % slots)
                mine.append(group)
        sizes = [len(group.row) for group in mine]
        return cycles, Found(
            np.repeat(np.array(vertices, np.int64), sizes),
            np.repeat(np.array(places, np.int64), sizes),
            _joined([group.row for group in mine]),
            _joined([group.col for group in mine]),
            _joined([group.place for group in mine]),
        )

    def _read(self, keys: Sequence[bytes]) -> None:
        layout = self.layout
        words = np.zeros((layout.buckets, layout.bucket_stride), np.uint16)
        part = slice(layout.meta_info_words, None) if self.grad_a else slice(layout.meta_info_words)
        rows = np.frombuffer(b"".join(keys), np.uint16).reshape(len(keys), -1)
        words[: len(keys), part] = rows
        contents = read_buckets(words, layout, grad_a=self.grad_a)
        groups = _sub_groups(contents, turned=self.grad_a)
        load = BucketLoad(groups, layout.partition, layout.workers, OverflowInfo.of(groups, layout))
        cycles = sub_group_cycles(self.plan, self.name, load) if len(groups.nz) else groups.nz
        for key in keys:
            self._known[key] = []
        begin = np.searchsorted(contents.group, np.arange(len(groups.nz)))
        for number, bucket in enumerate(groups.bucket.tolist()):
            at = slice(int(begin[number]), int(begin[number] + groups.nz[number]))
            group = SubGroup(
                int(groups.rectangle[number]),
                float(cycles[number]),
                contents.row[at],
                contents.col[at],
                contents.place[at],
            )
            self._known[keys[bucket]].append(group)


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def _sub_groups(contents: BucketContents, *, turned: bool) -> SubGroups:
    """Sub-groups, rows and blocks of what was read; rows are those of the forward product."""
    order = np.arange(len(contents.group))
    if turned:
        order = np.lexsort((contents.col, contents.row, contents.group))
    group, row, col = contents.group[order], contents.row[order], contents.col[order]
    new_group = np.ones(len(group), bool)
    new_group[1:] = group[1:] != group[:-1]
    new_row = new_group.copy()
    new_row[1:] |= row[1:] != row[:-1]
    first, first_row = np.flatnonzero(new_group), np.flatnonzero(new_row)
    return SubGroups(
        bucket=contents.bucket[order][first],
        rectangle=contents.rectangle[order][first],
        rows=np.bincount(group[first_row], minlength=len(first)),
        nz=np.diff(np.append(first, len(group))),
        row=row[first_row],
        length=np.diff(np.append(first_row, len(group))),
        col=col,
        source=np.arange(len(group)),
    )
