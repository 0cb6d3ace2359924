"""The fastest placement of a chain of layers on one grid, by dynamic programming over layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise, product
from typing import NamedTuple

from dynsparse.distributed.chains import Bundle, Chain
from dynsparse.distributed.cluster import Cluster, Link
from dynsparse.distributed.placement import Borders, Placement
from dynsparse.nn import SparseLinear
from dynsparse.ops.linear.costs import Layer
from dynsparse.ranks import AXES

__all__ = ["Cost", "Grid", "Search", "grids"]

INDEX_BYTES = 12
"""Of a block: its column, and the order by columns with its permutation, int32 each."""

THIN_INDEX_BYTES = 4
"""Where the values are shared out: the column alone."""


class Grid(NamedTuple):
    """How many ranks are along each axis of a mesh.

    z comes first in the order of ranks, then x, then y: ranks that split a layer are neighbours.
    """

    x: int
    y: int
    z: int

    def __str__(self) -> str:
        return f"{self.x}x{self.y}x{self.z}"

    def link(self, axis: str, cluster: Cluster) -> Link:
        """Between the ranks along an axis."""
        stride = {"y": 1, "x": self.y, "z": self.x * self.y}[axis]
        return cluster.link(stride, getattr(self, axis))


def grids(world: int) -> list[Grid]:
    """All x, y, z with a product of `world`."""
    sizes = [n for n in range(1, world + 1) if world % n == 0]
    return [Grid(x, y, world // x // y) for x in sizes for y in sizes if world // x % y == 0]


class Cost(NamedTuple):
    """What a training step takes, in seconds of the slowest rank, and bytes of the fullest.

    Attributes:
        products: the three passes.
        features: sums and gathers of activations and of their gradients, and the passes over them
            that come with these or with the functions between layers of a row.
        weights: the sum of the weights' gradients over z.
        optimizer: its step.
        memory: bytes for values, gradient, optimizer state, index, and activations that wait for
            the backward pass.
        traffic: bytes that a rank sends.
    """

    products: float = 0.0
    features: float = 0.0
    weights: float = 0.0
    optimizer: float = 0.0
    memory: float = 0.0
    traffic: float = 0.0

    @property
    def seconds(self) -> float:
        """Of the whole step; nothing is taken to overlap."""
        return self.products + self.features + self.weights + self.optimizer

    def __add__(self, other: Cost) -> Cost:  # type: ignore[override]
        return Cost(*(a + b for a, b in zip(self, other, strict=True)))


@dataclass
class Search:
    """Finds the placements of one model on any grid.

    Args:
        layers: by name.
        chains: that they stand in.
        batch: samples of a whole step, over all ranks.
        states: tensors of optimizer state per value; 2 for Adam.
        cluster: what the ranks run on.
    """

    layers: Mapping[str, SparseLinear]
    chains: list[Chain]
    batch: int
    states: int
    cluster: Cluster
    rectangles: dict[tuple[str, tuple[int, int]], tuple[Layer, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.borders = [Borders(self.layers, chain) for chain in self.chains]

    def best(self, grid: Grid, price: float = 0.0) -> tuple[dict[str, Placement], Cost]:
        """The placements with the least seconds + `price` * bytes of memory, and their cost.

        Layers that cannot be cut into as many slabs are left whole.
        """
        placements: dict[str, Placement] = {}
        total = Cost()
        for chain, borders in zip(self.chains, self.borders, strict=True):
            found = self._chain(chain, borders, grid, price)
            for bundle, (placement, cost) in zip(chain, found, strict=True):
                placements.update(dict.fromkeys(bundle.names, placement))
                total += cost
        return placements, total

    def _chain(
        self, chain: Chain, borders: Borders, grid: Grid, price: float
    ) -> list[tuple[Placement, Cost]]:
        # Layout of the features -> the best way to come there, and what it is worth.
        ways: dict[str | None, tuple[float, list[tuple[Placement, Cost]]]] = {None: (0.0, [])}
        for position, bundle in enumerate(chain):
            last = position == len(chain) - 1
            after: dict[str | None, tuple[float, list[tuple[Placement, Cost]]]] = {}
            for given, (worth, steps) in ways.items():
                for rows, cols in _axes(grid):
                    placement = Placement(rows, cols, given, whole=last)
                    cost = self._bundle(bundle, position, borders, placement, grid)
                    if cost is None:
                        continue
                    new = worth + cost.seconds + price * cost.memory
                    layout = None if last else rows
                    if layout not in after or new < after[layout][0]:
                        after[layout] = new, [*steps, (placement, cost)]
            ways = after
        return ways[None][1]

    def _bundle(
        self, bundle: Bundle, position: int, borders: Borders, placement: Placement, grid: Grid
    ) -> Cost | None:
        total = Cost()
        for name in bundle.names:
            cost = self._layer(name, position, borders, placement, grid)
            if cost is None:
                return None
            total += cost
        return total

    def _layer(
        self, name: str, position: int, borders: Borders, placement: Placement, grid: Grid
    ) -> Cost | None:
        worst = self._worst(name, position, borders, placement.parts(grid))
        if worst is None:
            return None
        layer, _ = worst
        values = layer.nnz * layer.block_size**2
        batch = -(-self.batch // grid.z)
        item = self.layers[name].values.itemsize
        products = sum(
            self.cluster.pass_seconds(layer, batch, backward=backward) for backward in (False, True)
        )
        features, sent = self._features(self.layers[name], layer, placement, grid, batch * item)
        features += self.cluster.copying * self._passed(name, layer, placement) * batch * item
        summed = values * item
        memory = values * item * (2 + self.states) + layer.nnz * INDEX_BYTES
        memory += batch * (layer.in_features + layer.out_features) * item
        return Cost(
            products,
            features,
            grid.link("z", self.cluster).sum_seconds(summed, grid.z),
            values * self.cluster.optimizer,
            memory,
            sent + 2 * (grid.z - 1) / grid.z * summed,
        )

    def _features(
        self, whole: SparseLinear, part: Layer, placement: Placement, grid: Grid, row: int
    ) -> tuple[float, float]:
        """Seconds and bytes sent of the moves of activations; `row` is the bytes of a feature."""
        rows, cols, given, _ = placement
        seconds = sent = 0.0

        def move(axis: str, size: float, taken: Callable[[Link, float, int], float]) -> float:
            nonlocal seconds
            ranks = getattr(grid, axis)
            seconds += taken(grid.link(axis, self.cluster), size, ranks)
            return (ranks - 1) / ranks * size

        def summed(axis: str, features: int) -> None:
            nonlocal sent
            sent += 2 * move(axis, features * row, Link.sum_seconds)

        def gathered(axis: str, features: int) -> None:
            nonlocal sent
            sent += move(axis, features * row, self.cluster.gather_seconds)

        if given is not None and given != cols:
            gathered(given, whole.in_features)  # forward: the slabs become whole
        if cols is not None and given != cols:
            gathered(cols, whole.in_features)  # backward: so do their gradients
        if cols is not None:
            summed(cols, part.out_features)
        if rows is not None:
            summed(rows, part.in_features)
            if placement.whole:
                gathered(rows, whole.out_features)
        return seconds, sent

    def _passed(self, name: str, part: Layer, placement: Placement) -> int:
        """Over how many features one goes beside the products, to copy them or to compute."""
        rows, cols, given, whole = placement
        passes = 0
        if cols is not None:
            passes += part.out_features  # sums are made in a copy
            if self.layers[name].bias is not None:
                passes += 2 * part.out_features  # added behind the sum; its gradient
            if given != cols:
                passes += part.in_features  # the slab is cut out of all
        if rows is not None:
            passes += part.in_features
        if not whole:
            passes += 2 * part.out_features  # a function follows, and its derivative
        return passes

    def _worst(
        self, name: str, position: int, borders: Borders, parts: tuple[int, int]
    ) -> tuple[Layer, float] | None:
        """The rectangle with most blocks as a layer, and how many they are beside the mean."""
        key = name, parts
        if key not in self.rectangles:
            rows, cols = parts
            try:
                edges = borders.of_rows(position, name, rows), borders.of_cols(position, name, cols)
            except ValueError:
                return None
            blocks = borders.blocks(position, name, *edges)
            most = int(blocks.max())
            i, j = divmod(int(blocks.flatten().argmax()), cols)
            heights, widths = ([b - a for a, b in pairwise(edge)] for edge in edges)
            layer = Layer(heights[i], widths[j], most, self.layers[name].block_size)
            self.rectangles[key] = layer, most * blocks.numel() / max(1, int(blocks.sum()))
        return self.rectangles[key]


def _axes(grid: Grid) -> Iterator[tuple[str | None, str | None]]:
    """What rows and columns may be spread over: two axes, one, or none."""
    wide = [axis for axis in AXES[:2] if getattr(grid, axis) > 1]
    for rows, cols in product((None, *wide), repeat=2):
        if rows is None or rows != cols:
            yield rows, cols
