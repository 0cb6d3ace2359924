"""How many bytes of each tile a graph and its programs take."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from popsparse.machine.errors import OutOfMemoryError
from popsparse.machine.exchange import CopyPlan
from popsparse.machine.facts import CONTROL_CODE, HOST_EXCHANGE, STACKS
from popsparse.machine.graph import Graph
from popsparse.machine.holdings import Holdings
from popsparse.machine.liveness import Liveness
from popsparse.machine.target import Target
from popsparse.machine.vertex import Codelet, VertexSet

# A vertex holds the address of its codelet, for each edge a 32-bit pointer and count (Poplar's
# default vector layout SPAN; smaller ones exist, so this is an upper bound), a word per scalar.
_VERTEX_BYTES = 4
_EDGE_BYTES = 8
_SCALAR_BYTES = 4
# The smallest tiles that were built, the Mk1's. Smaller ones, as tests have, are charged neither
# stacks nor control code: they would hold little else.
REAL_TILE = 256 * 1024


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
    def max_data_bytes(self) -> int:
        """Of variables and constants alone, on the tile with most of them."""
        data = ("always live", "temporary", "constants")
        return int(np.sum([self.by_category[name] for name in data], axis=0).max())

    @property
    def worst_tile(self) -> int:
        return int(self.per_tile.argmax())


def measure_memory(
    graph: Graph,
    target: Target,
    vertex_sets: list[VertexSet],
    copies: list[CopyPlan],
    liveness: Liveness,
    stack_bytes: int | None = None,
    steps: int = 0,
) -> MemoryUse:
    """The bytes each tile needs.

    Args:
        stack_bytes: of each worker, on tiles with vertices; None: what is typical of real tiles.
        steps: compute sets, copies and decisions, whose control code every tile in use has; where
            there are any, also the code that talks to the host.
    """
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
    exchange = np.zeros(tiles)
    for plan in copies:
        exchange += plan.code_bytes
    stacks = control = 0.0
    if target.bytes_per_tile >= REAL_TILE:
        stacks = STACKS.typical
        control = CONTROL_CODE.typical * steps + HOST_EXCHANGE.typical * (steps > 0)
    if stack_bytes is not None:
        stacks = float(stack_bytes * target.workers)

    holdings = Holdings.of(graph, tiles)
    always = liveness.members(liveness.always)
    constant = np.array([v.is_constant for v in liveness.variables], bool)
    temporary = np.zeros(tiles)
    sums = {}
    for bits in liveness.moments:
        sums[bits] = holdings.per_tile(liveness.members(bits) & ~always)
        np.maximum(temporary, sums[bits], out=temporary)
    everything = holdings.per_tile(np.ones(len(always), bool))
    in_use = (everything > 0) | (state > 0)
    categories = {
        "always live": holdings.per_tile(always & ~constant),
        "temporary": temporary,
        "constants": holdings.per_tile(constant),
        "vertex state": state,
        "vertex code": code,
        "exchange code": exchange,
        "control code": np.where(in_use, control, 0.0),
        "stacks": np.where(state > 0, stacks, 0.0),
    }
    # The step at which the fullest tile is fullest, and what it then holds.
    tile = int(np.sum(list(categories.values()), axis=0).argmax())
    peak = max(sums, key=lambda bits: sums[bits][tile], default=0)
    held = holdings.on_tile(always | liveness.members(peak), tile)
    order = np.argsort(-held, kind="stable")[:5]
    largest = tuple((liveness.variables[i].name, int(held[i])) for i in order if held[i])
    step = liveness.moments.get(peak, "")
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
