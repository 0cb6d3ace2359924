"""The ranks of a mesh: along x and y lie the slabs of layers, along z the samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dynsparse.distributed.placement import AXES, check_axes
from dynsparse.files.shorten import shortened
from dynsparse.ranks import ALONE, Ranks, ranks_of

__all__ = ["RankGrid"]


@dataclass(frozen=True)
class RankGrid:
    """This rank's lines through a mesh: who moves along each axis together with it.

    Attributes:
        x, y, z: the ranks of each line; `ALONE` where the mesh has no such axis.
        everyone: all ranks of the mesh.
    """

    x: Ranks = ALONE
    y: Ranks = ALONE
    z: Ranks = ALONE
    everyone: Ranks = ALONE

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
        return cls(**lines, everyone=ranks_of(everyone))

    def line(self, axis: str | None) -> Ranks:
        """The ranks along an axis; this one alone for None."""
        line: Ranks = ALONE if axis is None else getattr(self, axis)
        return line
