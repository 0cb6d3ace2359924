"""The ranks of a mesh: along x and y lie the slabs of layers, along z the samples."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from dynsparse.files.shorten import shortened
from dynsparse.pattern import SparsePattern
from dynsparse.ranks.ranks import ALONE, Ranks, ranks_of

AXES = ("x", "y", "z")
"""Of a mesh: what features are split over, and, along z, samples."""


def check_axes(names: Any) -> tuple[str, ...]:
    """The names of a mesh's axes, if it may hold rectangles.

    Raises:
        ValueError: others than x, y and z.
    """
    if not names or not {*names} <= {*AXES}:
        raise ValueError(
            f"mesh must have axes named x, y and z, or some of them, got {shortened(names)}"
        )
    return tuple(names)


@dataclass(frozen=True)
class RankGrid:
    """This rank's lines through a mesh: who moves along each axis together with it.

    Attributes:
        x, y: the ranks of each line; `ALONE` where the mesh has no such axis.
        z: those with other samples for the same slabs. What one of them fails in, `everyone` hears
            of.
        all_ranks: all ranks of the mesh.
    """

    x: Ranks = ALONE
    y: Ranks = ALONE
    z: Ranks = ALONE
    all_ranks: Ranks = ALONE

    def __post_init__(self) -> None:
        place = {"x": self.x.rank, "y": self.y.rank}
        object.__setattr__(self, "z", self.z.within(self.all_ranks, place))

    @classmethod
    def of(cls, mesh: Any) -> RankGrid:
        """Of a `DeviceMesh` with axes named x, y and z, or some of them; or a `RankGrid` as it is.

        Every rank of the mesh calls this at the same time: groups are made.

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
        lines = {axis: ranks_of(mesh[axis]) for axis in AXES if axis in names}
        everyone = mesh[names[0]] if len(names) == 1 else mesh._flatten()
        return cls(**lines, all_ranks=ranks_of(everyone))

    def line(self, axis: str | None) -> Ranks:
        """The ranks along an axis; this one alone for None."""
        line: Ranks = ALONE if axis is None else getattr(self, axis)
        return line


@dataclass(frozen=True)
class Slab:
    """This rank's features of what is cut along one of its dimensions over a line of ranks.

    Attributes:
        line: of the ranks; `ALONE` where each has all features.
        borders: 0 = c_0 < c_1 < ... : rank i has the features [c_i, c_(i+1)).
    """

    line: Ranks
    borders: tuple[int, ...]

    @property
    def ends(self) -> tuple[int, int]:
        """The first feature of this rank, and the one behind its last."""
        return self.borders[self.line.rank], self.borders[self.line.rank + 1]

    def cut(self, whole: Tensor, dim: int) -> Tensor:
        """This rank's features of a tensor that has all: a view."""
        first, last = self.ends
        return whole.narrow(dim, first, last - first)

    def joined(self, own: Tensor, dim: int) -> Tensor:
        """All features, of which each rank has its own; all ranks of the line call this."""
        shapes = [list(own.shape) for _ in range(self.line.size)]
        for shape, (first, last) in zip(shapes, itertools.pairwise(self.borders), strict=True):
            shape[dim] = last - first
        # As they lie in memory: to turn them around and back takes longer than to send them.
        parts = self.line.all_gather(own.reshape(-1), [math.prod(shape) for shape in shapes])
        return torch.cat([part.view(shape) for part, shape in zip(parts, shapes, strict=True)], dim)


@runtime_checkable
class Part(Protocol):
    """What decisions know of a layer of which each rank of a grid holds a rectangle."""

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in] of the whole layer."""

    @property
    def grid(self) -> RankGrid:
        """The lines of ranks."""

    @property
    def axes(self) -> tuple[str, ...]:
        """Those of x and y that the layer is spread over; along others all ranks hold the same."""

    @property
    def slabs(self) -> tuple[Slab, Slab]:
        """Of its rows (out) and columns (in)."""

    @property
    def blocks(self) -> int:
        """Present blocks of the whole layer when it was cut: as many as ever, unless the layer is
        resizable."""

    @property
    def active(self) -> Any:
        """The slots that the forward pass uses, where it does not use all."""

    def with_active(self, active: Any) -> Any:
        """The same rectangle, whose forward pass uses these slots; None: all."""

    def slots(self, pattern: SparsePattern) -> tuple[Tensor, int]:
        """Which slots of the whole layer those of a pattern in this rectangle are, int64 [nnz],
        ascending, and how many the whole layer has. All ranks of the layer's lines call this, each
        with the pattern in its rectangle."""

    def inside(self, flat: Tensor, block_size: int) -> Tensor:
        """Which flat block positions in the whole layer are in the rectangle: bool."""

    def to_whole(self, flat: Tensor, block_size: int) -> Tensor:
        """Flat block positions in the rectangle as positions in the whole; the order stays."""

    def to_part(self, flat: Tensor, block_size: int) -> Tensor:
        """Those of flat positions in the whole layer that are inside, as positions in it."""
