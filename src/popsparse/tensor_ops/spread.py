"""How the elements of a tensor lie on the tiles, and other tensors brought to lie likewise."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from popsparse.machine import Copy, Graph, MappingError, Ragged, Tensor, as_dtype
from popsparse.machine import Sequence as Program


class Spread(NamedTuple):
    """A tensor's elements, tile by tile: one vertex a tile.

    Attributes:
        shape: of the tensor.
        owner: the tile of each element, [numel].
        order: the elements in the order of their tiles, [numel]; None where that is their own.
        tiles: of the vertices, [vertices].
        offsets: where each one's elements begin, [vertices + 1].
    """

    shape: tuple[int, ...]
    owner: np.ndarray
    order: np.ndarray | None
    tiles: np.ndarray
    offsets: np.ndarray

    @classmethod
    def of(cls, graph: Graph, tensor: Tensor) -> Spread:
        """Raises MappingError for elements without a tile."""
        owner = graph.tiles_of(tensor).reshape(-1)
        if not owner.size or owner.min() < 0:
            what = "has no elements" if not owner.size else "has elements without a tile"
            raise MappingError(f"{tensor.name} {what}: map it with set_tile_mapping")
        order = np.argsort(owner, kind="stable")
        placed = owner[order]
        first = np.flatnonzero(np.append(True, np.diff(placed) > 0))
        own = bool((np.diff(owner) >= 0).all())
        offsets = np.append(first, len(owner))
        return cls(tensor.shape, owner, None if own else order, placed[first], offsets)

    def edge(self, tensor: Tensor) -> Ragged:
        """A tensor that lies so, as the vertices' edge."""
        flat = tensor.flatten()
        return Ragged(flat if self.order is None else flat[self.order], self.offsets)

    def like(self, graph: Graph, dtype: Any, name: str) -> Tensor:
        """A new variable that lies so."""
        made = graph.add_variable(as_dtype(dtype), list(self.shape), name)
        new = np.flatnonzero(np.append(True, np.diff(self.owner) != 0))
        lengths = np.diff(np.append(new, len(self.owner)))
        graph.map_stretches(made, self.owner[new], lengths)
        return made

    def bring(self, graph: Graph, tensor: Tensor, program: Program, name: str) -> Tensor:
        """A tensor [of this shape, or broadcast to it] that lies so: itself, or a copy."""
        whole = tensor.broadcast_to(*self.shape)
        if np.array_equal(graph.tiles_of(whole).reshape(-1), self.owner):
            return whole
        local = self.like(graph, tensor.dtype, f"{name} brought")
        program.add(Copy(whole, local, name=f"{name}: bring"))
        return local
