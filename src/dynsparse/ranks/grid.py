"""The ranks of a mesh: layers are sharded along x and y, samples along z."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from dynsparse._core.checks import shortened
from dynsparse.pattern import SparsePattern
from dynsparse.ranks.ranks import ALONE, Ranks, ranks_of

AXES = ("x", "y", "z")
"""Of a mesh: features are sharded along x and y, samples along z."""


def check_axes(names: Any) -> tuple[str, ...]:
    """The axis names of a mesh, checked.

    Raises:
        ValueError: names other than x, y and z.
    """
    if not names or not {*names} <= {*AXES}:
        raise ValueError(
            f"mesh must have axes named x, y and z, or some of them, got {shortened(names)}"
        )
    return tuple(names)


@dataclass(frozen=True)
class RankGrid:
    """This rank's groups in a mesh, one along each axis.

    Attributes:
        x, y: the ranks along these axes; `ALONE` if the mesh has no such axis.
        z: those with other samples for the same shard. Their errors are raised on `all_ranks`.
        all_ranks: all ranks of the mesh.
    """

    x: Ranks = ALONE
    y: Ranks = ALONE
    z: Ranks = ALONE
    all_ranks: Ranks = ALONE

    def __post_init__(self) -> None:
        coordinates = {"x": self.x.rank, "y": self.y.rank}
        object.__setattr__(self, "z", self.z.within(self.all_ranks, coordinates))

    @classmethod
    def of(cls, mesh: Any) -> RankGrid:
        """From a `DeviceMesh` with axes named x, y and z, or some; a `RankGrid` is returned.

        Makes process groups: every rank of the mesh must call it.

        Raises:
            TypeError: something else.
            ValueError: other axes.
        """
        if isinstance(mesh, cls):
            return mesh
        if not hasattr(mesh, "mesh_dim_names"):
            raise TypeError(
                f"mesh must be a DeviceMesh of torch.distributed, got {shortened(mesh)}"
            )
        names = check_axes(mesh.mesh_dim_names)
        groups = {axis: ranks_of(mesh[axis]) for axis in AXES if axis in names}
        flat = mesh[names[0]] if len(names) == 1 else mesh._flatten()
        return cls(**groups, all_ranks=ranks_of(flat))

    def line(self, axis: str | None) -> Ranks:
        """The ranks along an axis; `ALONE` for None."""
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
        """This rank's features of a full tensor: a view."""
        first, last = self.ends
        return full.narrow(dim, first, last - first)

    def all_gather(self, shard: Tensor, dim: int) -> Tensor:
        """The full tensor, from the shards of all ranks of the group, which all call this."""
        shapes = [list(shard.shape) for _ in range(self.ranks.size)]
        for shape, (first, last) in zip(shapes, itertools.pairwise(self.borders), strict=True):
            shape[dim] = last - first
        # Sent as they are in memory: transposing them twice takes longer than sending them.
        parts = self.ranks.all_gather(shard.reshape(-1), [math.prod(shape) for shape in shapes])
        return torch.cat([part.view(shape) for part, shape in zip(parts, shapes, strict=True)], dim)


@runtime_checkable
class ShardSpec(Protocol):
    """How a layer is sharded in two dimensions over a grid, and this rank's shard."""

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in] of the full layer."""

    @property
    def grid(self) -> RankGrid:
        """The ranks."""

    @property
    def axes(self) -> tuple[str, ...]:
        """Those of x and y that the layer is sharded over; along others all ranks hold the same."""

    @property
    def dim_shards(self) -> tuple[DimShard, DimShard]:
        """Of rows (out) and columns (in)."""

    @property
    def blocks(self) -> int:
        """Present blocks of the full layer when it was sharded; constant unless it is resizable."""

    @property
    def active(self) -> Any:
        """The slots that the forward pass uses; None: all."""

    def with_active(self, active: Any) -> Any:
        """The same shard, whose forward pass uses these slots; None: all."""

    def slots(self, pattern: SparsePattern) -> tuple[Tensor, int]:
        """The slots in the full layer of the slots of a pattern in this shard, int64 [nnz],
        ascending, and the number of slots of the full layer. All ranks of the layer call this, each
        with the pattern of its shard."""

    def inside(self, flat: Tensor, block_size: int) -> Tensor:
        """Which flat block positions of the full layer are in the shard: bool."""

    def to_full(self, flat: Tensor, block_size: int) -> Tensor:
        """Flat block positions in the shard as positions in the full layer, in the same order."""

    def to_local(self, flat: Tensor, block_size: int) -> Tensor:
        """The flat positions of the full layer that are inside, as positions in the shard."""
