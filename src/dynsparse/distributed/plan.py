"""How to spread a model's sparse layers over ranks: the best of all grids, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from dynsparse.checks import check_integer, check_kind, is_number
from dynsparse.distributed.chains import Chain, find_chains
from dynsparse.distributed.cluster import Cluster
from dynsparse.distributed.placement import Placement
from dynsparse.distributed.search import Cost, Grid, Search, grids
from dynsparse.files.shorten import shortened
from dynsparse.ranks import AXES, check_axes

__all__ = ["Candidate", "Plan", "make_plan"]

MOST_RANKS = 1 << 20


@dataclass(frozen=True)
class Candidate:
    """One grid with its best placements.

    Attributes:
        grid: ranks along x, y and z.
        cost: of a step, of the slowest rank.
        placements: by the layers' names.
        balance: non-zeros of the fullest rank beside the mean, of the layer where that is worst.
        fits: whether the fullest rank's memory is within the bound.
    """

    grid: Grid
    cost: Cost
    placements: dict[str, Placement]
    balance: float
    fits: bool


@dataclass(frozen=True)
class Plan:
    """What `make_plan` chose, and what else there was.

    Attributes:
        chosen: the fastest grid that fits.
        candidates: all grids, the fastest first; those that do not fit come last.
        chains: layers in a row, which share the borders of their slabs.
        batch: samples of a step over all ranks.
        cluster: what the figures hold for.
    """

    chosen: Candidate
    candidates: list[Candidate]
    chains: list[Chain]
    batch: int
    cluster: Cluster

    @property
    def grid(self) -> Grid:
        """Ranks along x, y and z."""
        return self.chosen.grid

    @property
    def placements(self) -> dict[str, Placement]:
        """By the layers' names."""
        return self.chosen.placements

    def make_mesh(self, device_type: str = "cpu") -> Any:
        """A `DeviceMesh` of the grid over all ranks of torch.distributed: z, x, y."""
        from torch.distributed.device_mesh import init_device_mesh  # loads half of torch

        grid = self.grid
        return init_device_mesh(
            device_type, (grid.z, grid.x, grid.y), mesh_dim_names=("z", "x", "y")
        )

    def rows(self) -> list[dict[str, str]]:
        """The candidates as rows of a table, in words."""
        return [
            {
                "grid": str(one.grid),
                "ms a step": f"{one.cost.seconds * 1e3:.3f}",
                "products": f"{one.cost.products * 1e3:.3f}",
                "features": f"{one.cost.features * 1e3:.3f}",
                "weights": f"{one.cost.weights * 1e3:.3f}",
                "optimizer": f"{one.cost.optimizer * 1e3:.3f}",
                "MB sent": f"{one.cost.traffic / 1e6:.2f}",
                "MB held": f"{one.cost.memory / 1e6:.1f}",
                "balance": f"{one.balance:.2f}",
                "": "chosen" if one is self.chosen else "" if one.fits else "too large",
            }
            for one in self.candidates
        ]

    def layers(self) -> list[dict[str, str]]:
        """Where each layer lies on the chosen grid, in words."""
        return [
            {
                "layer": name,
                "rows": _over(placement.rows),
                "columns": _over(placement.cols),
                "comes in": _over(placement.given),
                "goes out": "whole" if placement.whole else _over(placement.rows),
            }
            for name, placement in self.placements.items()
        ]

    def explain(self, most: int = 10) -> str:
        """The choice in plain text: the `most` best grids, and where each layer lies."""
        check_integer("most", most, 1)
        world = self.grid.x * self.grid.y * self.grid.z
        lines = [
            f"{world} ranks, {self.batch:,} samples a step: {self.grid} (x, y: slabs of rows and "
            "columns; z: samples)",
            "",
            *_table(self.rows()[:most]),
        ]
        left = len(self.candidates) - most
        if left > 0:
            lines.append(f"and {left} more grids")
        used = {axis for one in self.placements.values() for axis in (one.rows, one.cols)}
        idle = [axis for axis in AXES[:2] if axis not in used and getattr(self.grid, axis) > 1]
        if idle:
            lines.append(
                f"along {' and '.join(idle)} all ranks compute the same: fewer are as fast"
            )
        return "\n".join([*lines, "", *_table(self.layers())])

    def to_dict(self) -> dict[str, Any]:
        """As plain types, for JSON."""
        return {
            "grid": self.grid._asdict(),
            "batch": self.batch,
            "layers": {name: one._asdict() for name, one in self.placements.items()},
            "candidates": [
                {
                    "grid": one.grid._asdict(),
                    "seconds": one.cost.seconds,
                    **one.cost._asdict(),
                    "balance": one.balance,
                    "fits": one.fits,
                }
                for one in self.candidates
            ],
            "cluster": self.cluster.to_dict(),
        }


def make_plan(
    model: nn.Module,
    mesh: Any,
    batch: int,
    *,
    chains: Sequence[Sequence[str]] = (),
    cluster: Cluster | None = None,
    memory: float | None = None,
    states: int = 2,
) -> Plan:
    """The fastest way to spread a model's sparse layers over ranks.

    Rank (x, y, z) holds a slab of rows and one of columns of a layer and sees its share of the
    samples, as PopSparse spreads a product over tiles. All grids are looked at; on each, where the
    layers of a chain lie is found by dynamic programming over what is whole or split in between.
    The costs are the worst rank's three passes by the constants that choose kernels
    (`ops.linear.costs`), the alpha-beta model of every sum and gather, the passes over activations
    that come with these and with the functions between layers of a row, and the optimizer's step.
    Nothing is taken to overlap, and other modules of the model cost nothing.

    Args:
        model: with `SparseLinear` layers, whole; their patterns count.
        mesh: how many ranks, or a `DeviceMesh` with axes among x, y and z, whose grid then holds.
        batch: samples (of tokens: all of them) of a step, over all ranks.
        chains: names of layers in a row, beyond those that are found: see `find_chains`.
        cluster: what the ranks run on, as `measure` finds it; `Cluster()` if left out.
        memory: bytes that a rank has for these layers; no bound if left out.
        states: tensors of optimizer state per value: 2 for Adam, 1 for SGD with momentum.

    Raises:
        TypeError: no model, no number of ranks.
        ValueError: a model without sparse layers, chains that do not fit, sizes below 1, no
            grid within the memory.
    """
    batch = check_integer("batch", batch, 1)
    states = check_integer("states", states, 0)
    if cluster is not None:
        check_kind("cluster", cluster, Cluster, "a Cluster")
    if memory is not None and not (is_number(memory) and memory > 0):
        raise ValueError(f"memory must be a number of bytes above 0, got {shortened(memory)}")
    layers, found = find_chains(model, chains)
    cluster = Cluster() if cluster is None else cluster
    search = Search(layers, found, batch, states, cluster)
    candidates = [_candidate(search, grid, memory) for grid in _grids(mesh)]
    candidates.sort(key=lambda one: (not one.fits, one.cost.seconds))
    if not candidates[0].fits:
        least = min(candidates, key=lambda one: one.cost.memory)
        raise ValueError(
            f"no grid fits into memory={memory:,.0f} bytes: the least is {least.cost.memory:,.0f} "
            f"bytes a rank, on {least.grid}; use more ranks"
        )
    return Plan(candidates[0], candidates, found, batch, cluster)


def _grids(mesh: Any) -> list[Grid]:
    names = getattr(mesh, "mesh_dim_names", None)
    if names is None:
        world = check_integer("mesh", mesh, 1)
        if world > MOST_RANKS:
            raise ValueError(f"mesh must be at most {MOST_RANKS:,} ranks, got {world:,}")
        return grids(world)
    return [grid_of(mesh)]


def grid_of(mesh: Any) -> Grid:
    """Of a `DeviceMesh`.

    Raises:
        ValueError: axes that are not x, y and z.
    """
    names = check_axes(mesh.mesh_dim_names)
    return Grid(*(mesh.size(names.index(axis)) if axis in names else 1 for axis in AXES))


def _candidate(search: Search, grid: Grid, memory: float | None) -> Candidate:
    """The best of a grid; with a bound on memory, at the least price of a byte that keeps it."""
    found = search.best(grid)
    price = 1e-15  # seconds a byte
    while memory is not None and found[1].memory > memory and price < 1:
        found = search.best(grid, price)
        price *= 4
    placements, cost = found
    balance = max(search.rectangles[name, one.parts(grid)][1] for name, one in placements.items())
    return Candidate(grid, cost, placements, balance, memory is None or cost.memory <= memory)


def _over(axis: str | None) -> str:
    return "whole" if axis is None else f"over {axis}"


def _table(rows: list[dict[str, str]]) -> list[str]:
    heads = list(rows[0])
    widths = [max(len(head), *(len(row[head]) for row in rows)) for head in heads]
    lines = [heads, *([row[head] for head in heads] for row in rows)]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
