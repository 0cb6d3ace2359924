"""How many bytes of each tile a graph and its program take."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dynsparse.machine.errors import OutOfMemoryError
from dynsparse.machine.exchange import CopyPlan
from dynsparse.machine.graph import Graph
from dynsparse.machine.intervals import Runs
from dynsparse.machine.target import Target
from dynsparse.machine.vertex import Codelet, VertexSet

__all__ = ["MemoryUse", "check_memory", "largest_on_tile", "measure_memory"]

# A vertex holds the address of its codelet, for each edge a 32-bit pointer and count (Poplar's
# default vector layout SPAN; smaller ones exist, so this is an upper bound), a word per scalar.
_VERTEX_BYTES = 4
_EDGE_BYTES = 8
_SCALAR_BYTES = 4
# Three control instructions of 32 bits for each fragment received, as in
# `Target.exchange_fragment_cycles`.
_FRAGMENT_BYTES = 12


@dataclass(frozen=True, eq=False)
class MemoryUse:
    """Bytes per tile by category, [tiles] each. Variables are all held at once."""

    by_category: dict[str, np.ndarray]
    limit: int

    @property
    def per_tile(self) -> np.ndarray:
        return np.sum(list(self.by_category.values()), axis=0)

    @property
    def max_tile_bytes(self) -> int:
        return int(self.per_tile.max())

    @property
    def worst_tile(self) -> int:
        return int(self.per_tile.argmax())


def largest_on_tile(graph: Graph, tile: int, count: int) -> list[tuple[str, int]]:
    """The variables with most bytes on a tile: (name, bytes), largest first."""
    found: dict[str, int] = {}
    for dtype, group in graph.variables.items():
        filled = [v for v in group if v.tensor.numel]
        starts = np.array([v.start for v in filled], np.int64)
        lengths = np.array([v.tensor.numel for v in filled], np.int64)
        pieces = graph.tile_map(dtype).split(Runs(starts, lengths))
        here = pieces.tiles == tile
        sums = np.bincount(
            pieces.run[here], weights=pieces.lengths[here] * dtype.size, minlength=len(filled)
        )
        for variable, size in zip(filled, sums, strict=True):
            if size:
                found[variable.name] = found.get(variable.name, 0) + int(size)
    return sorted(found.items(), key=lambda item: -item[1])[:count]


def measure_memory(
    graph: Graph, target: Target, vertex_sets: list[VertexSet], copies: list[CopyPlan]
) -> MemoryUse:
    """The bytes each tile needs."""
    tiles = target.tiles
    variables, constants = np.zeros(tiles), np.zeros(tiles)
    for dtype, group in graph.variables.items():
        variables += graph.tile_map(dtype).elements_per_tile(tiles) * dtype.size
        for variable in group:
            if variable.is_constant and variable.tensor.numel:
                pieces = graph.tile_map(dtype).split(variable.tensor.runs())
                constants += np.bincount(
                    pieces.tiles, weights=pieces.lengths * dtype.size, minlength=tiles
                )
    state, code = np.zeros(tiles), np.zeros(tiles)
    placed: dict[Codelet, np.ndarray] = {}
    for vertices in vertex_sets:
        codelet = vertices.codelet
        size = _VERTEX_BYTES + _EDGE_BYTES * len(codelet.fields)
        size += _SCALAR_BYTES * len(codelet.scalars)
        here = np.bincount(vertices.tiles, minlength=tiles)
        state += here * size
        placed[codelet] = placed.get(codelet, np.zeros(tiles, bool)) | (here > 0)
    for codelet, where in placed.items():
        code[where] += codelet.code_bytes
    exchange = np.zeros(tiles)
    for plan in copies:
        exchange += plan.fragments * _FRAGMENT_BYTES
    return MemoryUse(
        {
            "variables": variables - constants,
            "constants": constants,
            "vertex state": state,
            "vertex code": code,
            "exchange code": exchange,
        },
        target.bytes_per_tile,
    )


def check_memory(graph: Graph, use: MemoryUse) -> None:
    """Raises OutOfMemoryError, naming the largest variables of the worst tile."""
    need = use.per_tile
    over = int((need > use.limit).sum())
    if not over:
        return
    tile = use.worst_tile
    largest = ", ".join(f"{n!r} {size:,}" for n, size in largest_on_tile(graph, tile, 5))
    raise OutOfMemoryError(
        f"tile {tile} needs {int(need[tile]):,} bytes and has {use.limit:,} ({over} of "
        f"{len(need)} tiles are over); its largest variables in bytes: {largest}"
    )
