"""The program of a dense product: the layout of its operands, its codelets, and its steps.

A plan cuts each of m, k and n into steps in time, parts over the tiles and elements of a part. An
operand has two of the three; the tiles along the third all need the same part of it. At home that
part is spread over those tiles, so each holds only its share.

Each step in time slices the operands it needs, sends them to the tiles that multiply them, sums
the partial results in stages and writes its part of the result. No constant is fitted: the cost of
vertices comes from `planning.cycles`, that of exchanges from the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

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
    Repeat,
    Sequence,
    Tensor,
    VertexView,
    codelets,
)
from popsparse.machine.target import KERNEL_CODE
from popsparse.planning import cycles
from popsparse.planning.dense import DensePlan
from popsparse.planning.params import ceil_div
from popsparse.programs.layout import PlannedTensor


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
        """Number of elements of a part."""
        return self.rows.each * self.cols.each

    @property
    def is_padded(self) -> bool:
        return any(e.steps * e.parts * e.each != e.size for e in (self.rows, self.cols))

    def view(self, home: Tensor) -> Tensor:
        """View a home [steps, groups, row parts, column parts, tiles, share] as [groups, rows,
        cols]; the tiles that share a part may hold padding after its elements."""
        groups, rows, cols = self
        at = home.addresses().reshape(rows.steps, cols.steps, groups, rows.parts, cols.parts, -1)
        at = at[..., : self.numel].reshape(*at.shape[:-1], rows.each, cols.each)
        at = at.transpose(2, 0, 3, 5, 1, 4, 6)
        at = at.reshape(groups, rows.steps * rows.parts * rows.each, -1)
        at = at[:, : rows.size, : cols.size]
        return Tensor(home.graph, home.dtype, at.shape, addresses=at)


@dataclass(frozen=True)
class Layout:
    """The cut of a plan, repeated for each group; groups share the machine's tiles evenly."""

    plan: DensePlan
    groups: int = 1

    @cached_property
    def sizes(self) -> tuple[int, int, int]:
        """Sizes of a tile in one step: field elements, groups of in- and of out-channels."""
        field, in_groups, out_groups = map(int, self.plan.cut.tile_sizes[:3])
        return field, in_groups, out_groups

    @cached_property
    def extents(self) -> dict[str, Extent]:
        """The extents of "m", "k" and "n"."""
        plan, (field, in_groups, out_groups) = self.plan, self.sizes
        streamed, outs = ("n", "m") if plan.swapped else ("m", "n")
        outputs = out_groups * plan.vertex.out_channels
        summed = in_groups * plan.vertex.in_channels
        return {
            streamed: Extent(getattr(plan, streamed), 1, plan.field, field),
            outs: Extent(getattr(plan, outs), plan.serial_out, plan.out, outputs),
            "k": Extent(plan.k, plan.serial_in, plan.in_, summed),
        }

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
        return self.plan.cut.serial

    @property
    def is_rearranged(self) -> dict[str, bool]:
        """Which of "a", "b" and the result "c" have a layout other than the user's."""
        names = "bac" if self.plan.swapped else "abc"
        return dict(zip(names, self.plan.cut.is_rearranged, strict=True))

    def matrix(self, which: str, *, transposed: bool = False) -> Matrix:
        """The cut of "a" [m, k], "b" [k, n] or "c" [m, n], or of its transpose."""
        names = {"a": "mk", "b": "kn", "c": "mn"}[which]
        rows, cols = (self.extents[name] for name in names)
        return Matrix(self.groups, cols, rows) if transposed else Matrix(self.groups, rows, cols)


@dataclass(frozen=True)
class Operand:
    """The layout of an operand "a" or "b": its home is [steps, groups, row parts, column parts,
    tiles that share a part, share]. `transposed`: the user's operand is transposed."""

    layout: Layout
    which: str
    transposed: bool = False

    @cached_property
    def matrix(self) -> Matrix:
        return self.layout.matrix(self.which, transposed=self.transposed)

    @property
    def order(self) -> tuple[int, ...]:
        """The dimensions of `Layout.tiles` in the order of `tiles`."""
        order = (0, 1, 2, 3) if self.which == "a" else (0, 3, 1, 2)
        swapped = {1: 2, 2: 1} if self.transposed else {}
        return tuple(swapped.get(axis, axis) for axis in order)

    @cached_property
    def tiles(self) -> np.ndarray:
        """[groups, row parts, column parts, tiles that share a part]."""
        return self.layout.tiles.transpose(*np.argsort(self.order))

    def add(self, graph: Graph, name: str) -> PlannedTensor:
        """Add an operand, [groups, rows, cols], with this layout."""
        share = ceil_div(self.matrix.numel, self.tiles.shape[-1])
        shape = [self.matrix.steps, *self.tiles.shape, share]
        tiles = np.broadcast_to(self.tiles, shape[:-1])
        home = graph.add_variable(self.layout.plan.dtype, shape, name, tiles=tiles)
        if self.matrix.is_padded:
            graph.set_initial_value(home, 0)
        return PlannedTensor(home, self.matrix.view(home).addresses(), self)


def create_operand(
    graph: Graph, layout: Layout, which: str, name: str, *, transposed: bool = False
) -> Tensor:
    """Create an operand "a" [groups, m, k] or "b" [groups, k, n]: in the product's layout, or, if
    the product rearranges it, spread in order.

    `transposed`: the user's operand is transposed.
    """
    operand = Operand(layout, which, transposed)
    if not layout.is_rearranged[which]:
        return operand.add(graph, name)
    return spread_in_order(graph, layout, operand.matrix.shape, name)


def spread_in_order(graph: Graph, layout: Layout, shape: tuple[int, ...], name: str) -> Tensor:
    """Create a tensor of the product's type, its elements in order over the tiles."""
    dtype = layout.plan.dtype
    variable = graph.add_variable(dtype, shape, name)
    graph.map_linearly(variable, grain=dtype.vector_width)
    return variable


def _product_codelet(layout: Layout, *, transposed: tuple[bool, bool]) -> Codelet:
    """A part of "a" times a part of "b"; `transposed`: which of them are stored transposed."""
    plan = layout.plan
    target = plan.target
    sizes = layout.sizes
    if isinstance(plan.vertex, cycles.AMP):
        load = target.coefficient_load_bytes_per_cycle
        estimate = cycles.amp(*sizes, plan.vertex, plan.dtype, plan.partials, target.workers, load)
    else:
        estimate = cycles.hmac(*sizes, plan.vertex, plan.dtype, plan.partials, target.workers)

    def compute(v: VertexView) -> None:
        a, b = (
            part.astype(np.float32).swapaxes(-1, -2) if turn else part.astype(np.float32)
            for part, turn in zip((v.a, v.b), transposed, strict=True)
        )
        v.partials[...] = np.matmul(a, b)

    def count_flops(v: VertexView) -> int:
        inner = v.a.shape[-2 if transposed[0] else -1]
        return 2 * inner * v.partials.shape[-1] * v.partials.shape[-2]

    fields = {"a": In(), "b": In(), "partials": Out()}
    code = int(KERNEL_CODE.typical)
    return Codelet(
        "dense product",
        fields,
        compute,
        float(estimate),
        "supervisor",
        flops=count_flops,
        code_bytes=code,
    )


def _reduce_codelet(layout: Layout, result: DType) -> Codelet:
    """Sums over the axis before the last: a tile's own partials, if any, and those of others."""
    plan = layout.plan
    more = (plan.partials, result, plan.target.workers, plan.target.bytes_per_tile)

    def estimate_cycles(v: VertexView) -> Any:
        return cycles.reduce_stage(v.out.shape[-1], v.own.shape[-2] + v.others.shape[-2], *more)

    def count_flops(v: VertexView) -> int:
        return v.out.shape[-1] * (v.own.shape[-2] + v.others.shape[-2] - 1)

    return codelets.sum_codelet("dense reduce", estimate_cycles, count_flops)


def _take_slice_codelet(layout: Layout) -> Codelet:
    """The share of the step `index` of all steps: [.., steps, share] to [.., share]."""

    def compute(v: VertexView) -> None:
        index = v.index[..., None, None]
        v.out[...] = np.take_along_axis(v.src, index.astype(np.int64), axis=-2)[..., 0, :]

    def estimate_cycles(v: VertexView) -> Any:
        return cycles.dynamic_slice(v.out.shape[-1], layout.plan.dtype, layout.plan.target.workers)

    fields = {"src": In(), "index": In(INT), "out": Out()}
    return Codelet("dynamic slice", fields, compute, estimate_cycles, "supervisor")


def _write_slice_codelet(layout: Layout) -> Codelet:
    """Writes the share of the step `index`: [.., share] into [.., steps, share]."""

    def compute(v: VertexView) -> None:
        index = v.index[..., None, None].astype(np.int64)
        np.put_along_axis(v.out, index, v.src[..., None, :], axis=-2)

    def estimate_cycles(v: VertexView) -> Any:
        return cycles.dynamic_slice(v.src.shape[-1], layout.plan.dtype, layout.plan.target.workers)

    fields = {"src": In(), "index": In(INT), "out": InOut()}
    return Codelet("dynamic update", fields, compute, estimate_cycles, "supervisor")


def _add_codelet(layout: Layout) -> Codelet:
    """Adds the result of a step to those of earlier steps."""

    def compute(v: VertexView) -> None:
        v.total[...] = v.total.astype(np.float32) + v.src

    def estimate_cycles(v: VertexView) -> Any:
        return cycles.add_in_place(v.src.shape[-1], layout.plan.dtype, layout.plan.target.workers)

    fields = {"src": In(), "total": InOut()}
    return Codelet(
        "add in place",
        fields,
        compute,
        estimate_cycles,
        "supervisor",
        flops=lambda v: v.src.shape[-1],
    )


def _rearrange_codelet(
    name: str, plan: DensePlan, estimate: Callable[..., Any], **how: Any
) -> Codelet:
    """Rearranges data on its tile, in the cycles that `estimate` gives for its bytes.

    The simulation's numbers do not depend on the order inside a part, so the data stays in place.
    """
    copy_bytes = int(plan.target.memcpy_bytes_per_cycle)

    def estimate_cycles(v: VertexView) -> Any:
        size = v.data.nbytes // max(v.count, 1)
        return estimate(size, dtype=plan.dtype, copy_bytes=copy_bytes, **how)

    return Codelet(name, {"data": InOut()}, lambda v: None, estimate_cycles, "supervisor")


class _Partials(NamedTuple):
    """One partial sum of all outputs, spread over some tiles.

    `tensor` is [*parts, tiles, share], `tiles` [*parts, tiles]; `outputs` of a part.
    """

    tensor: Tensor
    tiles: np.ndarray
    outputs: int

    def sections(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """The tiles that hold the outputs [begin, end): (tile's place, from, to)."""
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


def _reduce_stages(
    graph: Graph,
    copies: list[_Partials],
    codelet: dict[bool, Codelet],
    result: DType,
    name: str,
    steps: Sequence,
) -> _Partials:
    """Add the stages of a reduction to a program; returns the sums.

    Args:
        copies: the partial sums to reduce, two or more.
        codelet: returns the codelet of a stage; with True, of the last, whose results are of the
            type `result`.
    """
    targets = [*cycles.reduction_depths(len(copies)), 1]
    for number, remaining in enumerate(targets):
        depth = ceil_div(len(copies), remaining)
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
            joined.append(_join(graph, group, codelet[last], dtype, what, compute, pairs))
        copies = joined
        steps.add(
            Copy(pairs, name=f"exchange partials {number}"),
            Execute(compute, name=f"reduce {number}"),
        )
    return copies[0]


def _join(
    graph: Graph,
    group: list[_Partials],
    codelet: Codelet,
    dtype: DType,
    name: str,
    compute: object,
    pairs: list[tuple[Tensor, Tensor]],
) -> _Partials:
    """Join several partial sums into one, spread evenly over the tiles of all of them."""
    outputs, parts = group[0].outputs, group[0].tensor.shape[:-2]
    holders = [(copy, place) for copy in group for place in range(copy.tiles.shape[-1])]
    # A tile keeps outputs that it already has if possible: those that end first come first.
    holders.sort(key=lambda copy: copy[0].range_of(copy[1])[::-1])
    share = ceil_div(outputs, len(holders))
    holders = holders[: ceil_div(outputs, share)]
    ranges = [(j * share, min((j + 1) * share, outputs)) for j in range(len(holders))]
    stays = [
        copy.range_of(place)[0] <= begin and end <= copy.range_of(place)[1]
        for (copy, place), (begin, end) in zip(holders, ranges, strict=True)
    ]
    tiles = np.stack([copy.tiles[..., place] for copy, place in holders], axis=-1)
    kind = group[0].tensor.dtype
    shape = [*parts, len(holders)]
    depth = len(group) - all(stays)
    others = graph.add_variable(kind, [*shape, depth, share], f"{name} of others", tiles=tiles)
    out = graph.add_variable(dtype, [*shape, share], f"{name} sums", tiles=tiles)
    for j, ((mine, place), (begin, end)) in enumerate(zip(holders, ranges, strict=True)):
        size = end - begin
        arriving = [copy for copy in group if not (all(stays) and copy is mine)]
        for at, copy in enumerate(arriving):
            for source, low, high in copy.sections(begin, end):
                to = others[..., j, at, low - begin : high - begin]
                pairs.append((copy.view(source, low, high), to))
        if all(stays):
            part = mine.view(place, begin, end).expand_dims(len(parts))
        else:
            part = others[..., j, :0, :size]
        edges = {"own": part, "others": others[..., j, :, :size], "out": out[..., j, :size]}
        graph.add_vertices(compute, codelet, tiles[..., j], edges)  # type: ignore[arg-type]
    return _Partials(out, tiles, outputs)


def add_product(
    graph: Graph,
    layout: Layout,
    a: Tensor,
    b: Tensor,
    program: Sequence,
    name: str,
    *,
    transposed: tuple[bool, bool] = (False, False),
) -> Tensor:
    """Add the product of "a" [groups, m, k] and "b" [groups, k, n] to a program.

    Args:
        a, b: operands of `create_operand` have the product's layout; others are copied.
        transposed: which of them are transposed.

    Returns:
        [groups, m, n].
    """
    return _Product(graph, layout, name).add((a, b), program, transposed)


class _Product:
    """Builds the program of one product."""

    def __init__(self, graph: Graph, layout: Layout, name: str) -> None:
        self.graph, self.layout, self.name = graph, layout, name
        self.plan = layout.plan
        self.dtype, self.partials_type = self.plan.dtype, self.plan.partials
        self.index: Tensor | None = None

    def variable(self, dtype: DType, what: str, shape: list[int], tiles: np.ndarray) -> Tensor:
        return self.graph.add_variable(dtype, shape, f"{self.name} {what}", tiles=tiles)

    def execute(self, what: str, vertices: list[tuple[Codelet, np.ndarray, dict]]) -> Execute:
        compute = self.graph.add_compute_set(f"{self.name} {what}")
        for codelet, tiles, edges in vertices:
            self.graph.add_vertices(compute, codelet, tiles, edges)
        return Execute(compute, name=what)

    def add(
        self, operands: tuple[Tensor, Tensor], program: Sequence, transposed: tuple[bool, bool]
    ) -> Tensor:
        plan, layout = self.plan, self.layout
        steps = Sequence(name=self.name)
        program.add(steps)
        homes = self._bring_home(operands, transposed, steps)
        tiles = layout.tiles
        if layout.steps > 1:
            self.index = self.variable(INT, "step", [*tiles.shape], tiles)
            fill = {"out": self.index, "value": 0}
            steps.add(self.execute("first step", [(codelets.FILL, tiles, fill)]))
        field = "b" if plan.swapped else "a"
        before_loop: dict[Operand, Tensor] = {}
        in_loop: dict[Operand, Tensor] = {}
        for operand, home in homes.items():
            is_fixed = plan.broadcast_once and operand.which == field
            (before_loop if is_fixed else in_loop)[operand] = home
        local = self._fetch(before_loop, steps, "fetch field operand")
        body = Sequence()
        local |= self._fetch(in_loop, body, "fetch")
        sums = self._reduce(self._multiply(local, transposed, body), body)
        home = self._collect(sums, body, steps)
        if layout.steps > 1:
            assert self.index is not None
            count = {"value": self.index}
            body.add(self.execute("next step", [(codelets.INCREMENT, tiles, count)]))
            steps.add(Repeat(layout.steps, body, name="steps"))
        else:
            steps.add(body)
        if plan.serial_in > 1 and plan.partials is not plan.dtype:
            out = self.variable(self.dtype, "result", [*home.shape[1:]], sums.tiles)
            cast = {"src": home[0], "out": out}
            steps.add(self.execute("final cast", [(codelets.CAST, sums.tiles, cast)]))
            home = out.expand_dims(0)
        product = layout.matrix("c").view(home)
        if not layout.is_rearranged["c"]:
            return product
        ordered = spread_in_order(self.graph, layout, product.shape, f"{self.name} result in order")
        steps.add(Copy(product, ordered, name="regroup result"))
        return ordered

    def _bring_home(
        self, operands: tuple[Tensor, Tensor], transposed: tuple[bool, bool], steps: Sequence
    ) -> dict[Operand, Tensor]:
        """The operands in the product's layout, and their homes."""
        homes, pairs = {}, []
        for which, tensor, is_transposed in zip("ab", operands, transposed, strict=True):
            operand = Operand(self.layout, which, is_transposed)
            if isinstance(tensor, PlannedTensor) and tensor.layout == operand:
                homes[operand] = tensor.home
                continue
            placed = operand.add(self.graph, f"{self.name} {which} at home")
            pairs.append((tensor, placed))
            homes[operand] = placed.home
        if pairs:
            steps.add(Copy(pairs, name="regroup operands"))
        self._rearrange(homes, steps)
        return homes

    def _rearrange(self, operands: dict[Operand, Tensor], steps: Sequence) -> None:
        """Rearrange operands that are padded or not in the vertex's order."""
        plan, width = self.plan, self.dtype.vector_width
        vertices = []
        for operand, home in operands.items():
            if not self.layout.is_rearranged[operand.which]:
                continue
            is_coefficients = operand.which == ("a" if plan.swapped else "b")
            odd = bool(plan.k % width or (is_coefficients and plan.cut.outs % width))
            codelet = _rearrange_codelet("rearrange", plan, cycles.rearrange, odd=odd)
            edges = {"data": home.transpose(1, 2, 3, 4, 0, 5)}
            vertices.append((codelet, operand.tiles, edges))
        if vertices:
            steps.add(self.execute("rearrange operands", vertices))

    def _fetch(
        self, operands: dict[Operand, Tensor], steps: Sequence, what: str
    ) -> dict[str, Tensor]:
        """The part of each operand that each tile works on, [*tiles, rows, cols]."""
        pairs, slices, fetched = [], [], {}
        for operand, home in operands.items():
            if operand.matrix.steps > 1:
                source = self.variable(
                    self.dtype, f"slice of {operand.which}", [*home.shape[1:]], operand.tiles
                )
                by_step = home.transpose(1, 2, 3, 4, 0, 5)
                edges = {"src": by_step, "index": self._index_of(operand.tiles), "out": source}
                slices.append((_take_slice_codelet(self.layout), operand.tiles, edges))
            else:
                source = home[0]
            local = source
            sharing = operand.tiles.shape[-1]
            if sharing > 1:
                # Every tile that shares the part gets all shares of it.
                shape = [*operand.tiles.shape, sharing, home.shape[-1]]
                local = self.variable(self.dtype, f"part of {operand.which}", shape, operand.tiles)
                pairs.append((source.expand_dims(3).broadcast_to(*shape), local))
            rows, cols = operand.matrix.rows.each, operand.matrix.cols.each
            local = local.reshape(*operand.tiles.shape, -1)[..., : operand.matrix.numel]
            local = local.reshape(*operand.tiles.shape, rows, cols)
            fetched[operand.which] = local.transpose(*operand.order, 4, 5)
        if slices:
            steps.add(self.execute("slice operands", slices))
        if pairs:
            steps.add(Copy(pairs, name=what))
        return fetched

    def _multiply(
        self, local: dict[str, Tensor], transposed: tuple[bool, bool], steps: Sequence
    ) -> Tensor:
        """Partial sums, [*tiles, m, n]."""
        tiles, layout = self.layout.tiles, self.layout
        shape = [*tiles.shape, layout.extents["m"].each, layout.extents["n"].each]
        partials = self.variable(self.partials_type, "partials", shape, tiles)
        edges = {**local, "partials": partials}
        codelet = _product_codelet(layout, transposed=transposed)
        steps.add(self.execute("dense product", [(codelet, tiles, edges)]))
        return partials

    def _reduce(self, partials: Tensor, steps: Sequence) -> _Partials:
        """The sums over k, in the type of the result, or of the partials if more steps follow."""
        plan, layout = self.plan, self.layout
        outputs = layout.extents["m"].each * layout.extents["n"].each
        by_output = partials.reshape(*partials.shape[:4], 1, outputs)
        copies = [
            _Partials(by_output[:, :, k], layout.tiles[:, :, k, :, None], outputs)
            for k in range(layout.extents["k"].parts)
        ]
        result = plan.partials if plan.serial_in > 1 else plan.dtype
        if len(copies) > 1:
            codelet = {last: _reduce_codelet(layout, result if last else plan.partials)
                       for last in (False, True)}  # fmt: skip
            return _reduce_stages(self.graph, copies, codelet, result, self.name, steps)
        (only,) = copies
        if result == self.partials_type:
            return only
        out = self.variable(result, "cast", [*only.tensor.shape], only.tiles)
        edges = {"src": only.tensor, "out": out}
        steps.add(self.execute("cast", [(codelets.CAST, only.tiles, edges)]))
        return only._replace(tensor=out)

    def _collect(self, sums: _Partials, body: Sequence, before: Sequence) -> Tensor:
        """Collect the results of all steps: [steps of the result, *tiles, share]."""
        plan = self.plan
        self._regroup(sums, body)
        matrix = self.layout.matrix("c")
        shape = [*sums.tensor.shape]
        if matrix.steps > 1:
            home = self.variable(self.dtype, "result", [*shape[:-1], matrix.steps, shape[-1]],
                                 sums.tiles)  # fmt: skip
            edges = {"src": sums.tensor, "index": self._index_of(sums.tiles), "out": home}
            update = _write_slice_codelet(self.layout)
            body.add(self.execute("update result", [(update, sums.tiles, edges)]))
            return home.transpose(4, 0, 1, 2, 3, 5)
        if plan.serial_in > 1:
            total = self.variable(self.partials_type, "total", shape, sums.tiles)
            fill = {"out": total, "value": 0}
            before.add(self.execute("zero total", [(codelets.FILL, sums.tiles, fill)]))
            edges = {"src": sums.tensor, "total": total}
            body.add(self.execute("add to total", [(_add_codelet(self.layout), sums.tiles, edges)]))
            return total.expand_dims(0)
        return sums.tensor.expand_dims(0)

    def _index_of(self, tiles: np.ndarray) -> Tensor:
        """The step counters of some tiles."""
        index = self.index
        assert index is not None
        at = np.empty(self.layout.tiles.max() + 1, np.int64)
        at[self.layout.tiles.reshape(-1)] = index.addresses().reshape(-1)
        return Tensor(self.graph, index.dtype, tiles.shape, addresses=at[tiles])

    def _regroup(self, sums: _Partials, steps: Sequence) -> None:
        """Rearrange the result into its own groups of channels: on its tile, if not padded."""
        plan, width = self.plan, self.dtype.vector_width
        if self.layout.is_rearranged["c"]:
            odd = bool(plan.cut.outs % width)
            codelet = _rearrange_codelet("rearrange", plan, cycles.rearrange, odd=odd)
        elif plan.vertex.out_channels != 4 * width:
            codelet = _rearrange_codelet("regroup", plan, cycles.regroup, kind=plan.vertex)
        else:
            return
        vertices = [(codelet, sums.tiles, {"data": sums.tensor})]
        steps.add(self.execute(codelet.name, vertices))
