"""What a pattern puts into the buckets of a plan, as the execution model counts it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from popsparse.encoding.overflow import OverflowInfo
from popsparse.encoding.partitioner import Partitioner
from popsparse.encoding.sub_groups import SubGroups
from popsparse.planning.plan import Plan
from popsparse.planning.work_split import grid_split, split_rows

MISS_CYCLES = 32
"""Supervisor cycles to pass over a sub-group of another rectangle."""


class Pieces(NamedTuple):
    """Work of the workers: sub-group, rows, grains of the batch and non-zeros of each piece."""

    group: np.ndarray
    rows: np.ndarray
    grains: np.ndarray
    nz: np.ndarray


@dataclass(frozen=True)
class BucketLoad:
    """Sub-groups of all buckets after spilling, of one group of the product."""

    groups: SubGroups
    partition: tuple[int, int, int]
    workers: int
    overflow: OverflowInfo

    @classmethod
    def of(cls, plan: Plan, pattern: Any) -> BucketLoad:
        """Cut a `SparsePattern` as the partitioner does; its errors too."""
        partitioner = Partitioner(plan)
        groups, layout = partitioner.sub_groups(pattern), partitioner.layout
        overflow = OverflowInfo.of(groups, layout)
        return cls(groups, layout.partition, plan.target.workers, overflow)

    @property
    def blocks(self) -> int:
        return int(self.groups.nz.sum())

    @property
    def rows(self) -> np.ndarray:
        return self.groups.rows

    @property
    def nz(self) -> np.ndarray:
        return self.groups.nz

    @cached_property
    def home(self) -> np.ndarray:
        """The rectangle whose tiles hold each sub-group's bucket."""
        return self.groups.bucket // self.partition[2]

    def at_offset(self, x: int, y: int) -> np.ndarray:
        """Which sub-groups lie (x, y) partitions away from where they belong, bool."""
        px, py, _ = self.partition
        there, here = self.groups.rectangle, self.home
        return ((there // py - here // py) % px == x) & ((there % py - here % py) % py == y)

    @cached_property
    def scan(self) -> int:
        """Supervisor cycles to find nothing in the bucket of most sub-groups."""
        return MISS_CYCLES * int(np.bincount(self.groups.bucket, minlength=1).max())

    def batch_shares(self, grains: int) -> list[int]:
        """The different shares of the batch that workers get."""
        return sorted({share for *_, share in grid_split(1, grains, self.workers)})

    def shared_turns(self, workers: int) -> np.ndarray:
        """For each sub-group, the sum over its rows of ceil(non-zeros / workers)."""
        turns = -(-self.groups.length // workers)
        return np.add.reduceat(turns, self.groups.first_row) if len(turns) else turns

    def pieces(self, grains: int, workers: int, *, transposed: bool = False) -> Pieces:
        groups = self.groups.transposed() if transposed else self.groups
        found = split_rows(groups.rows, groups.length, grains, workers)
        before = np.append(0, np.cumsum(groups.length))
        first = groups.first_row[found.group] + found.row
        nz = before[first + found.rows] - before[first]
        return Pieces(found.group, found.rows, found.grains, nz)

    def slowest(self, group: np.ndarray, work: np.ndarray) -> np.ndarray:
        """The largest `work` of each sub-group's pieces."""
        worst = np.zeros(len(self.groups.rows), np.int64)
        np.maximum.at(worst, group, work)
        return worst

    def _own(self, cycles: np.ndarray) -> np.ndarray:
        """Cycles of sub-groups in place; a look where they belong elsewhere."""
        return np.where(self.groups.rectangle == self.home, cycles, MISS_CYCLES)

    def distribution(self, cycles: np.ndarray) -> float:
        """The tile with most to do, when each tile sees all buckets of its rectangle."""
        return float(np.bincount(self.home, self._own(cycles), minlength=1).max())

    def slowest_bucket(self, cycles: np.ndarray) -> float:
        """The bucket with most to do for its own rectangle."""
        return float(np.bincount(self.groups.bucket, self._own(cycles), minlength=1).max())
