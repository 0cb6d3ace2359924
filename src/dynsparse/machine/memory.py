"""How many bytes of each tile a graph and its programs take."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dynsparse.machine.errors import OutOfMemoryError
from dynsparse.machine.exchange import CopyPlan
from dynsparse.machine.graph import Graph
from dynsparse.machine.holdings import Holdings
from dynsparse.machine.liveness import Liveness
from dynsparse.machine.target import Target
from dynsparse.machine.vertex import Codelet, VertexSet

__all__ = ["MemoryUse", "check_memory", "measure_memory"]

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
    """Bytes per tile by category, [tiles] each.

    "temporary" is the most that variables which are not always wanted take at once on each tile,
    if they are packed without gaps; `all_variables` is what every variable would take side by
    side.
    """

    by_category: dict[str, np.ndarray]
    all_variables: np.ndarray
    limit: int
    peak_step: str = ""
    largest: tuple[tuple[str, int], ...] = ()

    @property
    def per_tile(self) -> np.ndarray:
        return np.sum(list(self.by_category.values()), axis=0)

    @property
    def max_tile_bytes(self) -> int:
        return int(self.per_tile.max())

    @property
    def worst_tile(self) -> int:
        return int(self.per_tile.argmax())


def measure_memory(
    graph: Graph,
    target: Target,
    vertex_sets: list[VertexSet],
    copies: list[CopyPlan],
    liveness: Liveness,
    stack_bytes: int = 0,
) -> MemoryUse:
    """The bytes each tile needs; `stack_bytes` for each worker of a tile with vertices."""
    tiles = target.tiles
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
    stack = np.where(state > 0, float(stack_bytes * target.workers), 0.0)
    exchange = np.zeros(tiles)
    for plan in copies:
        exchange += plan.fragments * _FRAGMENT_BYTES

    holdings = Holdings.of(graph, tiles)
    always = liveness.members(liveness.always)
    constant = np.array([v.is_constant for v in liveness.variables], bool)
    temporary = np.zeros(tiles)
    sums = {}
    for bits in liveness.moments:
        sums[bits] = holdings.per_tile(liveness.members(bits) & ~always)
        np.maximum(temporary, sums[bits], out=temporary)
    categories = {
        "always live": holdings.per_tile(always & ~constant),
        "temporary": temporary,
        "constants": holdings.per_tile(constant),
        "vertex state": state,
        "vertex code": code,
        "exchange code": exchange,
    }
    if stack_bytes:
        categories["stacks"] = stack
    # The step at which the fullest tile is fullest, and what it then holds.
    tile = int(np.sum(list(categories.values()), axis=0).argmax())
    peak = max(sums, key=lambda bits: sums[bits][tile], default=0)
    held = holdings.on_tile(always | liveness.members(peak), tile)
    order = np.argsort(-held, kind="stable")[:5]
    largest = tuple((liveness.variables[i].name, int(held[i])) for i in order if held[i])
    step = liveness.moments.get(peak, "")
    everything = holdings.per_tile(np.ones(len(always), bool))
    return MemoryUse(categories, everything, target.bytes_per_tile, step, largest)


def check_memory(use: MemoryUse) -> None:
    """Raises OutOfMemoryError, naming the largest variables of the worst tile."""
    need = use.per_tile
    over = int((need > use.limit).sum())
    if not over:
        return
    tile = use.worst_tile
    largest = ", ".join(f"{name!r} {size:,}" for name, size in use.largest)
    when = f" at step {use.peak_step!r}" if use.peak_step else ""
    raise OutOfMemoryError(
        f"tile {tile} needs {int(need[tile]):,} bytes{when} and has {use.limit:,} ({over} of "
        f"{len(need)} tiles are over); its largest variables in bytes: {largest}"
    )
