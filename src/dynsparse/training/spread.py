"""Layers of which each rank of a mesh holds a rectangle: decided about whole, changed in part."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dynsparse.nn import SparseLinear
from dynsparse.pattern import SparsePattern
from dynsparse.ranks import AXES, GrowRequest, Part, RankGrid, Ranks, gather_sorted, ranks_of


@dataclass(frozen=True)
class Extent:
    """How large a layer is, and how many of its blocks are there: what budgets look at."""

    shape: tuple[int, int]
    block_size: int
    nnz: int

    @property
    def total(self) -> int:
        """How many blocks the layer has, present or not."""
        return self.shape[0] * self.shape[1] // self.block_size**2

    @property
    def density(self) -> float:
        """Present blocks / all blocks."""
        return self.nnz / self.total


@dataclass(frozen=True)
class Spread:
    """A layer of which this rank holds a rectangle, and the rectangle's pattern.

    Where whole layers go by slots, these go by their positions in the whole layer, which are in the
    same order.
    """

    part: Part
    pattern: SparsePattern

    @property
    def limit(self) -> int:
        """What no position reaches."""
        return self.part.shape[0] * self.part.shape[1] // self.pattern.block_size**2

    def positions(self, first: int, last: int) -> Tensor:
        """Of this rank's slots from `first` on."""
        return self.part.to_whole(self.pattern.flat[first:last], self.pattern.block_size)

    def slots(self, positions: Tensor) -> Tensor:
        """This rank's slots among present positions."""
        own = self.part.to_part(positions, self.pattern.block_size)
        return torch.searchsorted(self.pattern.flat, own)


def spreads_of(layers: Mapping[str, SparseLinear]) -> dict[str, Spread]:
    """Those of the layers that are in rectangles."""
    executors: dict[str, Any] = {name: layer.executor for name, layer in layers.items()}
    return {
        name: Spread(executor, layers[name].pattern)
        for name, executor in executors.items()
        if isinstance(executor, Part)
    }


def ranks_for(choice: Any, model: Any) -> Ranks:
    """Who trains a model with this one: those with other samples for the same weights.

    Args:
        choice: as `ranks_of` takes it; or a mesh with axes among x, y and z, whose z line they are.
        model: with layers in rectangles, or without; for "auto" these know their mesh.

    Raises:
        TypeError, ValueError: ranks that are not those of the rectangles' mesh; see `ranks_of`.
    """
    modules = model.modules() if isinstance(model, nn.Module) else ()
    layers = {str(i): m for i, m in enumerate(modules) if isinstance(m, SparseLinear)}
    spreads = list(spreads_of(layers).values())
    if isinstance(choice, RankGrid):
        return choice.z
    names = getattr(choice, "mesh_dim_names", None)
    if not spreads:
        several = names is not None and len(names) > 1 and {*names} <= {*AXES}
        return RankGrid.of(choice).z if several else ranks_of(choice)
    grid = spreads[0].part.grid
    if isinstance(choice, str) and choice == "auto":
        world = ranks_of("auto")
        if world.size in (grid.all_ranks.size, 1):
            return grid.z
    elif names is not None:
        return RankGrid.of(choice).z
    raise ValueError(
        f"the model's layers are in rectangles on a mesh of {grid.all_ranks.size} ranks: pass the "
        "whole mesh as ranks, with the axis of the samples named z and the others x and y"
    )


class WholeSlots:
    """Which slots of whole layers this rank holds, for who draws numbers for all of them."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[SparsePattern, Tensor, int]] = {}

    def look(self, layers: Mapping[str, SparseLinear]) -> None:
        """Find out where patterns have changed; all ranks call this at the same time."""
        for name, spread in spreads_of(layers).items():
            if name not in self._known or self._known[name][0] is not spread.pattern:
                self._known[name] = (spread.pattern, *spread.part.slots(spread.pattern))

    def of(self, name: str, layer: SparseLinear) -> tuple[Tensor | slice, int]:
        """The slots, and how many the whole layer has."""
        if name in self._known:
            return self._known[name][1:]
        return slice(None), layer.pattern.nnz


def described(layer: SparseLinear) -> list[int]:
    """Shape and block size of a whole layer, and its number of blocks where that stays."""
    part: Any = layer.executor
    if isinstance(part, Part):
        shape, blocks = part.shape, part.blocks
    else:
        shape, blocks = layer.pattern.shape, layer.pattern.nnz
    return [*shape, layer.block_size] + ([] if layer.resizable else [blocks])


def extents(layers: Mapping[str, SparseLinear], ranks: Ranks) -> dict[str, Any]:
    """The patterns of whole layers, and what all rectangles of a layer are together."""
    spreads = spreads_of(layers)
    found: dict[str, Any] = {name: layer.pattern for name, layer in layers.items()}
    if spreads:
        own = [s.pattern.nnz if ranks.is_lead_rank(s.part.axes) else 0 for s in spreads.values()]
        counts = ranks.all_ranks.sum(torch.tensor(own, device=ranks.device)).tolist()
        for (name, spread), nnz in zip(spreads.items(), counts, strict=True):
            found[name] = Extent(spread.part.shape, spread.pattern.block_size, nnz)
    return found


def whole_patterns(wanted: Sequence[GrowRequest], ranks: Ranks) -> list[GrowRequest]:
    """What layers want to grow, as whole layers: for choices that follow from the pattern alone."""
    inside = [one for one in wanted if one.part is not None]
    own = [
        Spread(one.part, one.pattern).positions(0, one.pattern.nnz if speaks else 0)
        for one in inside
        if one.part is not None
        for speaks in [ranks.is_lead_rank(one.part.axes)]
    ]
    limits = [Spread(one.part, one.pattern).limit for one in inside if one.part is not None]
    flats = iter(gather_sorted(ranks.all_ranks, own, limits) if inside else [])
    return [
        one
        if one.part is None
        else dataclasses.replace(
            one,
            pattern=SparsePattern.from_flat(
                next(flats), shape=one.part.shape, block_size=one.pattern.block_size
            ),
            part=None,
        )
        for one in wanted
    ]
