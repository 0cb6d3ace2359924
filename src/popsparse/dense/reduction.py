"""Summing the partial results of the tiles that share an output, in one stage or several."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from popsparse.machine import Codelet, Copy, DType, Execute, Graph, Sequence, Tensor
from popsparse.planning.dense_cycles import reduction_depths
from popsparse.planning.parts import ceil_div


class Partials(NamedTuple):
    """One partial sum of all outputs, spread over some tiles.

    `tensor` is [*parts, tiles, share], `tiles` [*parts, tiles]; `outputs` of a part.
    """

    tensor: Tensor
    tiles: np.ndarray
    outputs: int

    def sections(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Which tile has which of the outputs [begin, end): (tile's place, from, to)."""
        share = self.tensor.shape[-1]
        for place in range(begin // share, ceil_div(end, share)):
            yield place, max(begin, place * share), min(end, (place + 1) * share)

    def range_of(self, place: int) -> tuple[int, int]:
        share = self.tensor.shape[-1]
        return place * share, min((place + 1) * share, self.outputs)

    def view(self, place: int, begin: int, end: int) -> Tensor:
        """Outputs [begin, end) of the tile at `place`: [*parts, end - begin]."""
        first = place * self.tensor.shape[-1]
        return self.tensor[..., place, begin - first : end - first]


def reduce_stages(
    graph: Graph,
    copies: list[Partials],
    codelet: Callable[[bool], Codelet],
    result: DType,
    name: str,
    steps: Sequence,
) -> Partials:
    """Add the stages of a reduction to a program; returns the sums.

    Args:
        copies: what is summed, two or more.
        codelet: that of a stage; True for the last, whose results are of the type `result`.
    """
    targets = [*reduction_depths(len(copies)), 1]
    for number, wanted in enumerate(targets):
        depth = ceil_div(len(copies), wanted)
        last = number == len(targets) - 1
        dtype = result if last else copies[0].tensor.dtype
        compute = graph.add_compute_set(f"{name} reduce {number}")
        pairs: list[tuple[Tensor, Tensor]] = []
        joined = []
        for first in range(0, len(copies), depth):
            group = copies[first : first + depth]
            if len(group) == 1 and not last:
                joined += group
                continue
            what = f"{name} {number} {first}"
            joined.append(_join(graph, group, codelet(last), dtype, what, compute, pairs))
        copies = joined
        steps.add(
            Copy(pairs, name=f"exchange partials {number}"),
            Execute(compute, name=f"reduce {number}"),
        )
    return copies[0]


def _join(
    graph: Graph,
    group: list[Partials],
    codelet: Codelet,
    dtype: DType,
    name: str,
    compute: object,
    pairs: list[tuple[Tensor, Tensor]],
) -> Partials:
    """One sum of several, spread evenly over the tiles of all of them."""
    outputs, parts = group[0].outputs, group[0].tensor.shape[:-2]
    held = [(one, place) for one in group for place in range(one.tiles.shape[-1])]
    # A tile gets outputs it has already where there is a way: those that end first come first.
    held.sort(key=lambda one: one[0].range_of(one[1])[::-1])
    share = ceil_div(outputs, len(held))
    held = held[: ceil_div(outputs, share)]
    ranges = [(j * share, min((j + 1) * share, outputs)) for j in range(len(held))]
    stays = [
        one.range_of(place)[0] <= begin and end <= one.range_of(place)[1]
        for (one, place), (begin, end) in zip(held, ranges, strict=True)
    ]
    tiles = np.stack([one.tiles[..., place] for one, place in held], axis=-1)
    kind = group[0].tensor.dtype
    shape = [*parts, len(held)]
    depth = len(group) - all(stays)
    others = graph.add_variable(kind, [*shape, depth, share], f"{name} of others", tiles=tiles)
    out = graph.add_variable(dtype, [*shape, share], f"{name} sums", tiles=tiles)
    for j, ((mine, place), (begin, end)) in enumerate(zip(held, ranges, strict=True)):
        size = end - begin
        arriving = [one for one in group if not (all(stays) and one is mine)]
        for at, one in enumerate(arriving):
            for source, low, high in one.sections(begin, end):
                to = others[..., j, at, low - begin : high - begin]
                pairs.append((one.view(source, low, high), to))
        if all(stays):
            own = mine.view(place, begin, end).expand_dims(len(parts))
        else:
            own = others[..., j, :0, :size]
        edges = {"own": own, "others": others[..., j, :, :size], "out": out[..., j, :size]}
        graph.add_vertices(compute, codelet, tiles[..., j], edges)  # type: ignore[arg-type]
    return Partials(out, tiles, outputs)
