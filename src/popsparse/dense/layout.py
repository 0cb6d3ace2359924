"""Where the operands of a dense product lie on the tiles.

A plan cuts each of m, k and n into steps in time, parts over the tiles and elements of a part. An
operand has two of the three; the tiles along the third all need the same part of it. At home that
part is spread over those tiles, so none holds more than its share.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np

from popsparse.machine import DType, Graph, Tensor, as_dtype
from popsparse.planning.dense import DensePlan
from popsparse.planning.params import ceil_div


class Extent(NamedTuple):
    """One dimension: its size, and the steps, parts and elements of a part that cover it."""

    size: int
    steps: int
    parts: int
    each: int


class Matrix(NamedTuple):
    """A matrix [groups, rows, cols] and its cut."""

    groups: int
    rows: Extent
    cols: Extent

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.groups, self.rows.size, self.cols.size

    @property
    def steps(self) -> int:
        return self.rows.steps * self.cols.steps

    @property
    def numel(self) -> int:
        """Elements of a part."""
        return self.rows.each * self.cols.each

    @property
    def is_padded(self) -> bool:
        return any(e.steps * e.parts * e.each != e.size for e in (self.rows, self.cols))

    def spread(self, matrix: np.ndarray) -> np.ndarray:
        """[groups, rows, cols] as [steps, groups, row parts, column parts, numel], padded by 0."""
        (groups, *_), rows, cols = self.shape, self.rows, self.cols
        whole = np.zeros(
            (groups, *(e.steps * e.parts * e.each for e in (rows, cols))), matrix.dtype
        )
        whole[:, : rows.size, : cols.size] = matrix
        whole = whole.reshape(groups, *rows[1:], *cols[1:]).transpose(1, 4, 0, 2, 5, 3, 6)
        return whole.reshape(self.steps, groups, rows.parts, cols.parts, self.numel)

    def join(self, parts: np.ndarray) -> np.ndarray:
        """The inverse of `spread`; each part may have more than its elements, at the end."""
        groups, rows, cols = self
        at = parts.reshape(rows.steps, cols.steps, groups, rows.parts, cols.parts, -1)
        at = at[..., : self.numel].reshape(*at.shape[:-1], rows.each, cols.each)
        at = at.transpose(2, 0, 3, 5, 1, 4, 6)
        at = at.reshape(groups, rows.steps * rows.parts * rows.each, -1)
        return at[:, : rows.size, : cols.size]


class Layout:
    """The cut of a plan, once for each of some groups that share a machine's tiles evenly."""

    def __init__(self, plan: DensePlan, groups: int = 1) -> None:
        self.plan, self.groups = plan, groups
        vertex = plan.vertex
        fields, outs = (plan.n, plan.m) if plan.swapped else (plan.m, plan.n)
        out_groups, in_groups = (
            ceil_div(outs, vertex.out_channels),
            ceil_div(plan.k, vertex.in_channels),
        )
        # Of a tile in one step: field elements, groups of in- and of out-channels.
        self.field = ceil_div(fields, plan.field)
        self.in_groups = ceil_div(in_groups, plan.in_ * plan.serial_in)
        self.out_groups = ceil_div(out_groups, plan.out * plan.serial_out)
        streamed = Extent(fields, 1, plan.field, self.field)
        made = Extent(outs, plan.serial_out, plan.out, self.out_groups * vertex.out_channels)
        self.m, self.n = (made, streamed) if plan.swapped else (streamed, made)
        self.k = Extent(plan.k, plan.serial_in, plan.in_, self.in_groups * vertex.in_channels)

    @cached_property
    def tiles(self) -> np.ndarray:
        """The tile of every part, [groups, parts of m, of k, of n]."""
        plan = self.plan
        shape = (self.groups, plan.in_, plan.field, plan.out)
        group, in_, field, out = np.indices(shape)
        tile = (in_ * plan.field + field) * plan.out + out + group * plan.target.tiles
        return tile.transpose(0, 3, 1, 2) if plan.swapped else tile.transpose(0, 2, 1, 3)

    @property
    def steps(self) -> int:
        return self.plan.serial_out * self.plan.serial_in

    @property
    def is_rearranged(self) -> dict[str, bool]:
        """Which operands do not lie as their user has them: "a", "b" and the result "c"."""
        plan, vertex = self.plan, self.plan.vertex
        outs = plan.m if plan.swapped else plan.n
        padded_in = plan.k % vertex.in_channels != 0
        padded_out = outs % vertex.out_channels != 0
        field = not plan.swapped or padded_in
        coefficients = field or padded_out
        a, b = (coefficients, field) if plan.swapped else (field, coefficients)
        return {"a": a, "b": b, "c": not plan.swapped or padded_out}

    def matrix(self, which: str, *, turned: bool = False) -> Matrix:
        """The cut of "a" [m, k], "b" [k, n] or "c" [m, n]; `turned`: of its transpose."""
        rows, cols = {"a": (self.m, self.k), "b": (self.k, self.n), "c": (self.m, self.n)}[which]
        return Matrix(self.groups, cols, rows) if turned else Matrix(self.groups, rows, cols)

    def home_tiles(self, which: str, *, turned: bool) -> np.ndarray:
        """The tiles of "a" or "b", [groups, row parts, column parts, tiles that share a part]."""
        order = {"a": (0, 1, 2, 3), "b": (0, 2, 3, 1)}[which]
        tiles = self.tiles.transpose(order)
        return tiles.swapaxes(1, 2) if turned else tiles


class Operand:
    """An operand "a" or "b" on the machine.

    Attributes:
        home: [steps, groups, row parts, column parts, tiles that share a part, share].
        matrix: its cut.
    """

    def __init__(
        self, graph: Graph, layout: Layout, which: str, name: str, *, turned: bool = False
    ) -> None:
        self.layout, self.which, self.turned = layout, which, turned
        self.matrix = layout.matrix(which, turned=turned)
        self.tiles = layout.home_tiles(which, turned=turned)
        self.share = ceil_div(self.matrix.numel, self.tiles.shape[-1])
        dtype: DType = as_dtype(layout.plan.dtype.name)
        shape = [self.matrix.steps, *self.tiles.shape, self.share]
        self.home = graph.add_variable(dtype, shape, name)
        graph.set_tile_mapping(self.home, np.broadcast_to(self.tiles, shape[:-1]))
        if self.matrix.is_padded:
            graph.set_initial_value(self.home, 0)

    def matches(self, layout: Layout, which: str, *, turned: bool) -> bool:
        mine = (self.layout.plan, self.layout.groups, self.which, self.turned)
        return mine == (layout.plan, layout.groups, which, turned)

    def arrange(self, matrix: np.ndarray) -> np.ndarray:
        """A matrix [groups, rows, cols] as `home` holds it."""
        parts = self.matrix.spread(matrix)
        room = self.tiles.shape[-1] * self.share - parts.shape[-1]
        padded = np.pad(parts, [(0, 0)] * 4 + [(0, room)])
        return padded.reshape(self.home.shape)

    def tensor(self) -> Tensor:
        """The matrix [groups, rows, cols], wherever its elements lie."""
        at = self.home.addresses()
        at = self.matrix.join(at.reshape(*at.shape[:4], -1))
        return Tensor(self.home.graph, self.home.dtype, at.shape, addresses=at)


class OperandView(Tensor):
    """An operand as its user has it, of the shape of `view`; products recognise it and copy
    nothing."""

    __slots__ = ("operand",)

    def __init__(self, operand: Operand, view: Tensor) -> None:
        super().__init__(view.graph, view.dtype, view.shape, addresses=view.addresses())
        self.operand = operand


def create_operand(
    graph: Graph, layout: Layout, which: str, name: str, *, turned: bool = False
) -> Operand | Tensor:
    """A new operand "a" [groups, m, k] or "b" [groups, k, n], where its user would have it: as the
    product wants it, or spread in order where that is not the vertex's.

    `turned`: the user has it transposed.
    """
    if not layout.is_rearranged[which]:
        return Operand(graph, layout, which, name, turned=turned)
    return spread_in_order(graph, layout, layout.matrix(which, turned=turned).shape, name)


def spread_in_order(graph: Graph, layout: Layout, shape: tuple[int, ...], name: str) -> Tensor:
    """A new tensor of the product's type, its elements in order over the tiles."""
    dtype = layout.plan.dtype
    made = graph.add_variable(as_dtype(dtype.name), shape, name)
    graph.map_linearly(made, grain=dtype.vector_width)
    return made
