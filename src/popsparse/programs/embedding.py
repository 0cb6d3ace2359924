"""Where indices and rows of an embedding lie on the tiles, and how data goes round them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from popsparse.machine import (
    BOOL,
    UNSIGNED_INT,
    UNSIGNED_SHORT,
    Codelet,
    Copy,
    DType,
    Execute,
    Graph,
    In,
    Out,
    Program,
    Repeat,
    RepeatWhileTrue,
    Sequence,
    Tensor,
    VertexView,
    codelets,
    rotation,
)
from popsparse.planning.parts import ceil_div
from popsparse.planning.plan import Plan
from popsparse.programs.layout import tile_grid
from popsparse.programs.weights import SparseTensor, control_tile

_PADDING = np.iinfo(np.uint32).max


@dataclass(frozen=True)
class SliceLayout:
    """Tiles of equal y share the indices among them; each holds the columns of its y."""

    plan: Plan
    num_indices: int

    order = "gyxz"

    @property
    def tiles(self) -> np.ndarray:
        return tile_grid(self.plan, self.order)

    @property
    def columns(self) -> np.ndarray:
        """The y of every tile."""
        return np.broadcast_to(
            np.arange(self.plan.partition.y)[None, :, None, None], self.tiles.shape
        )

    @property
    def share(self) -> int:
        """Indices of a tile."""
        return ceil_div(self.num_indices, self.plan.partition.x * self.plan.partition.z)

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_indices, self.plan.sizes.y

    def add(self, graph: Graph, dtype: DType, name: str) -> Tensor:
        """A variable for rows, [*grid, indices of a tile, columns of a tile]."""
        shape = [*self.tiles.shape, self.share, self.plan.elements_per_tile.y]
        tensor = graph.add_variable(dtype, shape, name, tiles=self.tiles)
        graph.set_initial_value(tensor, 0)
        return tensor

    def add_indices(self, graph: Graph, indices: Tensor, steps: Sequence, name: str) -> Tensor:
        """The indices of each tile, [*grid, indices of a tile], brought there by a new step."""
        tiles, count = self.tiles, self.num_indices
        local = graph.add_variable(UNSIGNED_INT, [*tiles.shape, self.share], name, tiles=tiles)
        graph.set_initial_value(local, _PADDING)
        parts = tiles.shape[1]
        here = local.reshape(parts, -1)[:, :count]
        steps.add(Copy(indices.broadcast_to(parts, count), here, name="distribute indices"))
        return local

    def natural(self, home: Tensor) -> SliceTensor:
        """Rows as [num_indices, columns]."""
        at = home.addresses()
        parts_y, columns = at.shape[1], at.shape[-1]
        at = at.reshape(parts_y, -1, columns)[:, : self.num_indices].transpose(1, 0, 2)
        return SliceTensor(home, at.reshape(self.num_indices, -1)[:, : self.plan.sizes.y], self)


class SliceTensor(Tensor):
    """Rows of an embedding, [num_indices, columns], that lie as the plan wants them."""

    __slots__ = ("home", "layout")

    def __init__(self, home: Tensor, addresses: np.ndarray, layout: SliceLayout) -> None:
        super().__init__(home.graph, home.dtype, addresses.shape, addresses=addresses)
        self.home = home
        self.layout = layout


class Round:
    """Data that goes round the tiles of equal y, and then on to the next y as often as needed."""

    def __init__(self, graph: Graph, weights: SparseTensor, layout: SliceLayout, name: str) -> None:
        self.graph, self.weights, self.layout, self.name = graph, weights, layout, name
        self.tiles = layout.tiles

    def build(
        self, codelet: Codelet, passing: Mapping[str, Tensor], staying: Mapping[str, Any], way: int
    ) -> list[Program]:
        """The steps.

        Args:
            codelet: what runs on every tile at every turn.
            passing: fields that travel, [*grid, ...].
            staying: the others.
            way: +1 if a tile gets what the next one had, -1 for the one before.
        """
        buffers = [
            {
                field: self.graph.add_variable(
                    home.dtype, home.shape, f"{self.name} passing {field} {n}", tiles=self.tiles
                )
                for field, home in passing.items()
            }
            for n in (0, 1)
        ]
        compute = []
        for n in (0, 1):
            here = self.graph.add_compute_set(f"{self.name} {n}")
            self.graph.add_vertices(here, codelet, self.tiles, {**staying, **buffers[n]})
            compute.append(Execute(here, name=f"compute {n}"))

        def move(source: int, axis: int) -> Copy:
            pairs = []
            for field in passing:
                ends = [buffers[n][field] for n in (source, 1 - source)]
                if axis == 2:  # x and z together are one ring.
                    ends = [t.reshape(*t.shape[:2], -1, *t.shape[4:]) for t in ends]
                pairs += rotation(ends[0], ends[1], way, axis)
            return Copy(pairs, name=f"pass on {'xz' if axis == 2 else 'y'} {source}")

        around = self.tiles.shape[2] * self.tiles.shape[3]
        turns = Sequence(name="round")
        if around == 1:
            turns.add(compute[0])
        else:
            both = Sequence(compute[0], move(0, 2), compute[1], move(1, 2))
            turns.add(Repeat(around // 2, both))
            if around % 2:
                turns.add(compute[0], move(0, 2))
        at = around % 2 if around > 1 else 0
        load = Copy([(passing[f], buffers[0][f]) for f in passing], name="load")
        if self.layout.plan.partition.y == 1:
            return [load, turns]
        turns.add(move(at, 1))
        if at == 0:
            back = [(buffers[1][f], buffers[0][f]) for f in passing]
            turns.add(Copy(back, name="copy back"))
        return [load, *self._as_often_as_needed(turns)]

    def _as_often_as_needed(self, turns: Program) -> list[Program]:
        """A loop over the distances in y that the overflow record names."""
        tile = control_tile(self.layout.plan)
        count = self.graph.add_variable(UNSIGNED_INT, [1], f"{self.name} count", tiles=tile)
        more = self.graph.add_variable(BOOL, [1], f"{self.name} goes on", tiles=tile)

        def step(name: str, codelet: Codelet, edges: dict) -> Execute:
            compute = self.graph.add_compute_set(f"{self.name} {name}")
            self.graph.add_vertex(compute, codelet, tile, edges)
            return Execute(compute, name=name)

        begin = step("count", _COUNT, {"words": self.weights.overflow, "count_of_y": count})
        test = step("more?", codelets.NOT_ZERO, {"value": count, "out": more})
        less = step("decrement", codelets.DECREMENT, {"value": count})
        return [begin, RepeatWhileTrue(test, more[0], Sequence(turns, less), name="loop")]


def _count(v: VertexView) -> None:
    v.count_of_y[...] = v.words[..., 1:2]


_COUNT = Codelet(
    "count", {"words": In(UNSIGNED_SHORT), "count_of_y": Out(UNSIGNED_INT)}, _count, 20
)
