"""Codelets of dense products and the reduction of their partial sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from popsparse.dense.layout import Layout
from popsparse.machine import (
    INT,
    Codelet,
    Copy,
    DType,
    Execute,
    Graph,
    In,
    InOut,
    Out,
    Sequence,
    Tensor,
    VertexView,
)
from popsparse.machine.target import KERNEL_CODE, SUM_CODE, Fact
from popsparse.planning import dense_cycles as cycles
from popsparse.planning.dense_cycles import reduction_depths
from popsparse.planning.params import DataType, ceil_div


def _supervisor(
    name: str,
    fields: dict[str, Any],
    compute: Callable[[VertexView], None],
    spent: Any,
    flops: Any = 0,
    code: Fact | None = None,
) -> Codelet:
    size = 0 if code is None else int(code.typical)
    return Codelet(name, fields, compute, spent, "supervisor", flops=flops, code_bytes=size)


def multiply(layout: Layout, *, turned: tuple[bool, bool]) -> Codelet:
    """A part of "a" times a part of "b"; `turned`: which of them are stored transposed."""
    plan = layout.plan
    target = plan.target
    sizes = (layout.field, layout.in_groups, layout.out_groups)
    if isinstance(plan.vertex, cycles.AMP):
        load = target.coefficient_load_bytes_per_cycle
        spent = cycles.amp(*sizes, plan.vertex, plan.dtype, plan.partials, target.workers, load)
    else:
        spent = cycles.hmac(*sizes, plan.vertex, plan.dtype, plan.partials, target.workers)

    def compute(v: VertexView) -> None:
        a, b = (
            part.astype(np.float32).swapaxes(-1, -2) if turn else part.astype(np.float32)
            for part, turn in zip((v.a, v.b), turned, strict=True)
        )
        v.partials[...] = np.matmul(a, b)

    def flops(v: VertexView) -> int:
        inner = v.a.shape[-2 if turned[0] else -1]
        return 2 * inner * v.partials.shape[-1] * v.partials.shape[-2]

    fields = {"a": In(), "b": In(), "partials": Out()}
    return _supervisor("dense product", fields, compute, float(spent), flops, KERNEL_CODE)


def reduce(layout: Layout, result: DataType) -> Codelet:
    """Sums over the axis before the last: a tile's own partials (none or one) and those of
    others."""
    plan = layout.plan
    more = (plan.partials, result, plan.target.workers, plan.target.bytes_per_tile)

    def compute(v: VertexView) -> None:
        total = v.others.sum(axis=-2, dtype=np.float32)
        v.out[...] = total + v.own.sum(axis=-2, dtype=np.float32)

    def spent(v: VertexView) -> Any:
        return cycles.reduce_stage(v.out.shape[-1], v.own.shape[-2] + v.others.shape[-2], *more)

    def flops(v: VertexView) -> int:
        return v.out.shape[-1] * (v.own.shape[-2] + v.others.shape[-2] - 1)

    fields = {"own": In(), "others": In(), "out": Out()}
    return _supervisor("dense reduce", fields, compute, spent, flops, SUM_CODE)


def take_slice(layout: Layout) -> Codelet:
    """The share of the step `index` of all steps: [.., steps, share] to [.., share]."""

    def compute(v: VertexView) -> None:
        index = v.index[..., None, None]
        v.out[...] = np.take_along_axis(v.src, index.astype(np.int64), axis=-2)[..., 0, :]

    def spent(v: VertexView) -> Any:
        return cycles.dynamic_slice(v.out.shape[-1], layout.plan.dtype, layout.plan.target.workers)

    fields = {"src": In(), "index": In(INT), "out": Out()}
    return _supervisor("dynamic slice", fields, compute, spent)


def write_slice(layout: Layout) -> Codelet:
    """The inverse of `take_slice`."""

    def compute(v: VertexView) -> None:
        index = v.index[..., None, None].astype(np.int64)
        np.put_along_axis(v.out, index, v.src[..., None, :], axis=-2)

    def spent(v: VertexView) -> Any:
        return cycles.dynamic_slice(v.src.shape[-1], layout.plan.dtype, layout.plan.target.workers)

    fields = {"src": In(), "index": In(INT), "out": InOut()}
    return _supervisor("dynamic update", fields, compute, spent)


def add(layout: Layout) -> Codelet:
    """What a step made, added to what earlier ones did."""

    def compute(v: VertexView) -> None:
        v.total[...] = v.total.astype(np.float32) + v.src

    def spent(v: VertexView) -> Any:
        return cycles.add_in_place(v.src.shape[-1], layout.plan.dtype, layout.plan.target.workers)

    fields = {"src": In(), "total": InOut()}
    return _supervisor("add in place", fields, compute, spent, lambda v: v.src.shape[-1])


def in_place(name: str, spent: Callable[[int], Any]) -> Codelet:
    """Data brought into another order on its tile; `spent` gives the cycles for so many bytes.

    The order inside a part is nothing that the simulation's numbers depend on, so they stay.
    """

    def of_vertex(v: VertexView) -> Any:
        return spent(v.data.itemsize * v.data.size // max(v.count, 1))

    return _supervisor(name, {"data": InOut()}, lambda v: None, of_vertex)


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
