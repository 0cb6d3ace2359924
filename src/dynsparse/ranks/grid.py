"""The ranks of a mesh: layers are sharded along x and y, samples along z."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dynsparse._core.checks import shorten
from dynsparse.pattern import SparsePattern
from dynsparse.ranks.ranks import ALONE, Ranks, ranks_of

AXES = ("x", "y", "z")
"""The axes of a mesh: features are sharded along x and y, samples along z."""


@dataclass(frozen=True)
class RankGrid:
    """This rank's groups in a mesh, one along each axis.

    Attributes:
        x, y: the ranks along these axes; `ALONE` if the mesh has no such axis.
        z: the ranks with other samples for the same shard. Their errors are raised on `all_ranks`.
        all_ranks: all ranks of the mesh.
    """

    x: Ranks = ALONE
    y: Ranks = ALONE
    z: Ranks = ALONE
    all_ranks: Ranks = ALONE

    def __post_init__(self) -> None:
        coordinates = {"x": self.x.rank, "y": self.y.rank}
        object.__setattr__(self, "z", self.z.as_mesh_group(self.all_ranks, coordinates))

    @classmethod
    def from_mesh(cls, mesh: Any) -> RankGrid:
        """Make the groups of a `DeviceMesh` with axes named x, y and z, or some of them.

        Every rank of the mesh must call it, since it makes process groups. A `RankGrid` is
        returned unchanged.

        Raises:
            TypeError: something else.
            ValueError: other axes.
        """
        if isinstance(mesh, cls):
            return mesh
        if not hasattr(mesh, "mesh_dim_names"):
            raise TypeError(f"mesh must be a DeviceMesh of torch.distributed, got {shorten(mesh)}")
        names = mesh.mesh_dim_names
        if not names or not {*names} <= {*AXES}:
            raise ValueError(
                f"mesh must have axes named x, y and z, or some of them, got {shorten(names)}"
            )
        groups = {axis: ranks_of(mesh[axis]) for axis in AXES if axis in names}
        flat = mesh[names[0]] if len(names) == 1 else mesh._flatten()
        return cls(**groups, all_ranks=ranks_of(flat))

    def ranks_along(self, axis: str | None) -> Ranks:
        """Return the ranks along an axis; `ALONE` for None."""
        ranks: Ranks = ALONE if axis is None else getattr(self, axis)
        return ranks


@dataclass(frozen=True)
class DimShard:
    """This rank's features of tensors that are sharded along one dimension.

    Attributes:
        ranks: the group; `ALONE` where every rank has all features.
        borders: 0 = c_0 < c_1 < ... : rank i has the features [c_i, c_(i+1)).
    """

    ranks: Ranks
    borders: tuple[int, ...]

    @property
    def ends(self) -> tuple[int, int]:
        """This rank's features [first, last)."""
        return self.borders[self.ranks.rank], self.borders[self.ranks.rank + 1]

    def narrow(self, full: Tensor, dim: int) -> Tensor:
        """Return this rank's features of a full tensor: a view."""
        first, last = self.ends
        return full.narrow(dim, first, last - first)

    def all_gather(self, shard: Tensor, dim: int) -> Tensor:
        """Return the full tensor, from the shards of all ranks of the group; a collective."""
        shapes = [list(shard.shape) for _ in range(self.ranks.size)]
        for shape, (first, last) in zip(shapes, itertools.pairwise(self.borders), strict=True):
            shape[dim] = last - first
        # Sent as they are in memory: transposing them twice takes longer than sending them.
        parts = self.ranks.all_gather(shard.reshape(-1), [math.prod(shape) for shape in shapes])
        return torch.cat([part.view(shape) for part, shape in zip(parts, shapes, strict=True)], dim)


class Placement(NamedTuple):
    """The mesh dimensions that a layer is sharded over.

    Attributes:
        rows, cols: the axis ("x" or "y") that rows (out) and columns (in) are sharded over; None if
            every rank has all of them.
        input: the axis that the input's features are sharded over; None if each rank has all.
        gather_output: whether the output's features are gathered; otherwise each rank has those of
            its rows.
    """

    rows: str | None = None
    cols: str | None = None
    input: str | None = None
    gather_output: bool = True


@dataclass(frozen=True, eq=False)
class ShardSpec:
    """How a layer is sharded in two dimensions over a grid, and this rank's shard: a range of rows
    and one of columns.

    Attributes:
        grid: the ranks along each axis.
        placement: the axes that rows, columns and input are sharded over.
        shape: [out, in] of the full layer.
        row_borders, col_borders: the borders of the shards, in features.
        input_borders: the borders of the input's shards, in features.
        blocks: present blocks of the full layer when it was sharded; constant unless it is
            resizable.
        active: the slots that the forward pass uses, where it does not use all: Top-KAST's.
    """

    grid: RankGrid
    placement: Placement
    shape: tuple[int, int]
    row_borders: tuple[int, ...]
    col_borders: tuple[int, ...]
    input_borders: tuple[int, ...]
    blocks: int
    active: Any = None

    @property
    def rows(self) -> tuple[int, int]:
        """The first feature of this rank's rows, and the one after its last."""
        return self.dim_shards[0].ends

    @property
    def cols(self) -> tuple[int, int]:
        """The first feature of this rank's columns, and the one after its last."""
        return self.dim_shards[1].ends

    @property
    def dim_shards(self) -> tuple[DimShard, DimShard]:
        """The shards of rows and columns."""
        line = self.grid.ranks_along
        return (
            DimShard(line(self.placement.rows), self.row_borders),
            DimShard(line(self.placement.cols), self.col_borders),
        )

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that the layer is sharded over; along others all ranks hold the same."""
        return tuple(axis for axis in self.placement[:2] if axis is not None)

    def replace_active(self, active: Any) -> Any:
        """Return the same shard with a forward pass that uses these slots; all if None."""
        return self if active is self.active else replace(self, active=active)

    def slots(self, pattern: SparsePattern) -> tuple[Tensor, int]:
        """Return the slots in the full layer of this shard's slots, and the full layer's count.

        The slots are int64 [nnz], ascending. It is a collective of all ranks of the layer, each
        with the pattern of its shard, which exchange the number of blocks of each block row.
        """
        rows, cols = self.dim_shards
        counts = pattern.row_ptr.long().diff()
        by_shard = torch.stack(cols.ranks.all_gather(counts, [len(counts)] * cols.ranks.size))
        per_row = by_shard.sum(0)
        totals = rows.ranks.all_gather(per_row.sum().view(1), [1] * rows.ranks.size)
        per_band = torch.cat(totals)
        first = per_band[: rows.ranks.rank].sum() + per_row.cumsum(0) - per_row
        first += by_shard[: cols.ranks.rank].sum(0)
        block_rows = pattern.rows.long()
        offset = torch.arange(pattern.nnz, device="cpu") - pattern.row_ptr.long()[block_rows]
        return first[block_rows] + offset, int(per_band.sum())

    def to_full(self, flat: Tensor, block_size: int) -> Tensor:
        """Convert flat block positions in the shard to positions in the full layer, in order."""
        (top, _), (left, right) = self.rows, self.cols
        width = (right - left) // block_size
        rows = flat // width + top // block_size
        return rows * (self.shape[1] // block_size) + flat % width + left // block_size

    def to_local(self, flat: Tensor, block_size: int) -> Tensor:
        """Convert flat positions in the full layer to positions in the shard; drop the others."""
        top, (left, right) = self.rows[0], self.cols
        flat = flat[self.contains(flat, block_size)]
        full_width, width = self.shape[1] // block_size, (right - left) // block_size
        return (
            (flat // full_width - top // block_size) * width
            + flat % full_width
            - left // block_size
        )

    def contains(self, flat: Tensor, block_size: int) -> Tensor:
        """Whether each flat position in the full layer is in the shard: bool [any]."""
        width = self.shape[1] // block_size
        row, col = flat // width * block_size, flat % width * block_size
        (top, bottom), (left, right) = self.rows, self.cols
        return (row >= top) & (row < bottom) & (col >= left) & (col < right)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardSpec:
        return self  # it does not change
