"""Which variable has how many bytes on which tile."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from popsparse.machine.graph import Graph
from popsparse.machine.intervals import Runs


@dataclass(frozen=True, eq=False)
class Holdings:
    """One element for each piece of a variable that lies on one tile; variables by number."""

    variable: np.ndarray
    tile: np.ndarray
    bytes: np.ndarray
    tiles: int

    @classmethod
    def of(cls, graph: Graph, tiles: int) -> Holdings:
        """Of all variables, numbered type by type as `graph.variables` has them."""
        columns: list[list[np.ndarray]] = [[np.zeros(0, np.int64)] for _ in range(3)]
        first = 0
        for dtype, group in graph.variables.items():
            starts = np.array([v.start for v in group], np.int64)
            lengths = np.array([v.tensor.numel for v in group], np.int64)
            filled = np.flatnonzero(lengths)
            pieces = graph.tile_map(dtype).split(Runs(starts[filled], lengths[filled]))
            for column, values in zip(
                columns,
                (filled[pieces.run] + first, pieces.tiles, pieces.lengths * dtype.size),
                strict=True,
            ):
                column.append(values)
            first += len(group)
        variable, tile, size = (np.concatenate(c) for c in columns)
        return cls(variable, tile, size, tiles)

    def per_tile(self, members: np.ndarray) -> np.ndarray:
        """Bytes on each tile of the variables in a set (bool [variables])."""
        chosen = members[self.variable]
        weights = self.bytes[chosen]
        return np.bincount(self.tile[chosen], weights=weights, minlength=self.tiles)

    def on_tile(self, members: np.ndarray, tile: int) -> np.ndarray:
        """Bytes of each variable of a set on one tile, [variables]."""
        chosen = members[self.variable] & (self.tile == tile)
        weights = self.bytes[chosen]
        return np.bincount(self.variable[chosen], weights=weights, minlength=len(members))
