"""The device program of a dense product, serial splits carried out.

Each step in time slices the operands it needs, brings them to the tiles that multiply them, sums
the partial results in stages and writes its part of the result. Nothing is fitted: vertices cost
what `dense.cycles` says, exchanges what the machine finds.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from popsparse.dense import codelets
from popsparse.dense.codelets import Partials, reduce_stages
from popsparse.dense.layout import Layout, Matrix, Operand, OperandView, spread_in_order
from popsparse.machine import (
    INT,
    Codelet,
    Copy,
    DType,
    Execute,
    Graph,
    Repeat,
    Sequence,
    Tensor,
    as_dtype,
)
from popsparse.machine import codelets as machine_codelets
from popsparse.planning import dense_cycles as cycles


class Result(NamedTuple):
    """The product on the machine: `home` is [steps, groups, m parts, n parts, tiles, share], or
    [groups, m, n] where it was brought into order."""

    home: Tensor
    matrix: Matrix | None

    def join(self, home: np.ndarray) -> np.ndarray:
        """What `home` holds as [groups, m, n]."""
        return home if self.matrix is None else self.matrix.join(home.reshape(*home.shape[:4], -1))

    def tensor(self) -> Tensor:
        """The result as [groups, m, n], wherever its elements lie."""
        at = self.join(self.home.addresses())
        return Tensor(self.home.graph, self.home.dtype, at.shape, addresses=at)


def add_product(
    graph: Graph,
    layout: Layout,
    a: Operand | Tensor,
    b: Operand | Tensor,
    program: Sequence,
    name: str,
    *,
    turned: tuple[bool, bool] = (False, False),
) -> Result:
    """Add the product of "a" [groups, m, k] and "b" [groups, k, n] to a program.

    Args:
        a, b: made by `layout.create_operand`; any other tensor is copied to where it is wanted.
        turned: which of them are transposed.
    """
    return _Product(graph, layout, name).add((a, b), program, turned)


class _Product:
    def __init__(self, graph: Graph, layout: Layout, name: str) -> None:
        self.graph, self.layout, self.name = graph, layout, name
        self.plan = layout.plan
        self.dtype, self.partials_type = (
            as_dtype(kind.name) for kind in (self.plan.dtype, self.plan.partials)
        )
        self.index: Tensor | None = None

    def variable(self, dtype: DType, what: str, shape: list[int], tiles: np.ndarray) -> Tensor:
        return self.graph.add_variable(dtype, shape, f"{self.name} {what}", tiles=tiles)

    def execute(self, what: str, vertices: list[tuple[Codelet, np.ndarray, dict]]) -> Execute:
        compute = self.graph.add_compute_set(f"{self.name} {what}")
        for codelet, tiles, edges in vertices:
            self.graph.add_vertices(compute, codelet, tiles, edges)
        return Execute(compute, name=what)

    def add(
        self,
        given: tuple[Operand | Tensor, Operand | Tensor],
        program: Sequence,
        turned: tuple[bool, bool],
    ) -> Result:
        plan, layout = self.plan, self.layout
        steps = Sequence(name=self.name)
        program.add(steps)
        a, b = self._at_home(given, turned, steps)
        tiles = layout.tiles
        if layout.steps > 1:
            self.index = self.variable(INT, "step", [*tiles.shape], tiles)
            fill = {"out": self.index, "value": 0}
            steps.add(self.execute("first step", [(machine_codelets.FILL, tiles, fill)]))
        field = "b" if plan.swapped else "a"
        once = {one.which: one for one in (a, b) if plan.broadcast_once and one.which == field}
        local = self._fetch(list(once.values()), steps, "fetch field operand")
        body = Sequence()
        later = [one for one in (a, b) if one.which not in once]
        local |= self._fetch(later, body, "fetch")
        sums = self._reduce(self._multiply(local, (a.turned, b.turned), body), body)
        home = self._collect(sums, body, steps)
        if layout.steps > 1:
            assert self.index is not None
            count = {"value": self.index}
            body.add(self.execute("next step", [(machine_codelets.INCREMENT, tiles, count)]))
            steps.add(Repeat(layout.steps, body, name="steps"))
        else:
            steps.add(body)
        if plan.serial_in > 1 and plan.partials is not plan.dtype:
            out = self.variable(self.dtype, "result", [*home.shape[1:]], sums.tiles)
            cast = {"src": home[0], "out": out}
            steps.add(self.execute("final cast", [(machine_codelets.CAST, sums.tiles, cast)]))
            home = out.expand_dims(0)
        found = Result(home, layout.matrix("c"))
        if not layout.is_rearranged["c"]:
            return found
        view = found.tensor()
        ordered = spread_in_order(self.graph, layout, view.shape, f"{self.name} result in order")
        steps.add(Copy(view, ordered, name="regroup result"))
        return Result(ordered, None)

    def _at_home(
        self,
        given: tuple[Operand | Tensor, Operand | Tensor],
        turned: tuple[bool, bool],
        steps: Sequence,
    ) -> list[Operand]:
        """The operands where the product wants them."""
        found, pairs = [], []
        for which, one, turn in zip("ab", given, turned, strict=True):
            if isinstance(one, OperandView):
                one = one.operand if one.operand.matches(self.layout, which, turned=turn) else one
            if not isinstance(one, Operand):
                name = f"{self.name} {which} at home"
                own = Operand(self.graph, self.layout, which, name, turned=turn)
                pairs.append((one, own.tensor()))
                one = own
            found.append(one)
        if pairs:
            steps.add(Copy(pairs, name="regroup operands"))
        self._rearrange(found, steps)
        return found

    def _rearrange(self, operands: list[Operand], steps: Sequence) -> None:
        """Operands that are padded or not in the vertex's order are brought into it."""
        copy, width = int(self.plan.target.memcpy_bytes_per_cycle), self.plan.dtype.vector_width
        vertices = []
        for one in operands:
            if not self.layout.is_rearranged[one.which]:
                continue
            coefficients = one.which == ("a" if self.plan.swapped else "b")
            outs = self.plan.m if self.plan.swapped else self.plan.n
            odd = bool(self.plan.k % width or (coefficients and outs % width))

            def spent(held: int, odd: bool = odd) -> Any:
                return cycles.rearrange(held, self.plan.dtype, copy, odd=odd)

            data = one.home.transpose(1, 2, 3, 4, 0, 5)
            edges = {"data": data}
            vertices.append((codelets.in_place("rearrange", spent), one.tiles, edges))
        if vertices:
            steps.add(self.execute("rearrange operands", vertices))

    def _fetch(self, operands: list[Operand], steps: Sequence, what: str) -> dict[str, Tensor]:
        """The part of each operand that each tile works on, [*tiles, rows, cols]."""
        pairs, slices, found = [], [], {}
        for one in operands:
            home = one.home
            if one.matrix.steps > 1:
                source = self.variable(
                    self.dtype, f"slice of {one.which}", [*home.shape[1:]], one.tiles
                )
                # The step counter of a tile: its own.
                index = self._of_home(self.index, one)
                edges = {"src": home.transpose(1, 2, 3, 4, 0, 5), "index": index, "out": source}
                slices.append((codelets.take_slice(self.layout), one.tiles, edges))
            else:
                source = home[0]
            local = source
            sharing = one.tiles.shape[-1]
            if sharing > 1:
                # Every tile that shares the part gets all shares of it.
                shape = [*one.tiles.shape, sharing, one.share]
                local = self.variable(self.dtype, f"part of {one.which}", shape, one.tiles)
                pairs.append((source.expand_dims(3).broadcast_to(*shape), local))
            rows, cols = one.matrix.rows.each, one.matrix.cols.each
            local = local.reshape(*one.tiles.shape, sharing * one.share)[..., : one.matrix.numel]
            found[one.which] = self._to_grid(local.reshape(*one.tiles.shape, rows, cols), one)
        if slices:
            steps.add(self.execute("slice operands", slices))
        if pairs:
            steps.add(Copy(pairs, name=what))
        return found

    @staticmethod
    def _order(one: Operand) -> tuple[int, ...]:
        """Where the grid's dimensions [groups, m, k, n] are in those of an operand's tiles."""
        order = (0, 1, 2, 3) if one.which == "a" else (0, 3, 1, 2)
        if not one.turned:
            return order
        swapped = {1: 2, 2: 1}
        return tuple(swapped.get(axis, axis) for axis in order)

    def _to_grid(self, local: Tensor, one: Operand) -> Tensor:
        return local.transpose(*self._order(one), 4, 5)

    def _of_home(self, index: Tensor | None, one: Operand) -> Tensor:
        assert index is not None
        return index.transpose(*np.argsort(self._order(one)).tolist())

    def _multiply(
        self, local: dict[str, Tensor], turned: tuple[bool, bool], steps: Sequence
    ) -> Tensor:
        """Partial sums, [*tiles, m, n]."""
        tiles, layout = self.layout.tiles, self.layout
        shape = [*tiles.shape, layout.m.each, layout.n.each]
        partials = self.variable(self.partials_type, "partials", shape, tiles)
        edges = {**local, "partials": partials}
        codelet = codelets.multiply(layout, turned=turned)
        steps.add(self.execute("dense product", [(codelet, tiles, edges)]))
        return partials

    def _reduce(self, partials: Tensor, steps: Sequence) -> Partials:
        """The sums over k, of the type of the result; of the partials' where more steps follow."""
        plan, layout = self.plan, self.layout
        outputs = layout.m.each * layout.n.each
        whole = partials.reshape(*partials.shape[:4], 1, outputs)
        copies = [
            Partials(whole[:, :, k], layout.tiles[:, :, k, :, None], outputs)
            for k in range(layout.k.parts)
        ]
        kind = plan.partials if plan.serial_in > 1 else plan.dtype
        result = as_dtype(kind.name)
        if len(copies) > 1:
            between = codelets.reduce(layout, plan.partials)
            last = codelets.reduce(layout, kind)
            return reduce_stages(
                self.graph,
                copies,
                lambda is_last: last if is_last else between,
                result,
                self.name,
                steps,
            )
        (only,) = copies
        if result == self.partials_type:
            return only
        out = self.variable(result, "cast", [*only.tensor.shape], only.tiles)
        edges = {"src": only.tensor, "out": out}
        steps.add(self.execute("cast", [(machine_codelets.CAST, only.tiles, edges)]))
        return only._replace(tensor=out)

    def _collect(self, sums: Partials, body: Sequence, before: Sequence) -> Tensor:
        """What the steps make, together: [steps of the result, *tiles, share]."""
        plan = self.plan
        self._regroup(sums, body)
        matrix = self.layout.matrix("c")
        shape = [*sums.tensor.shape]
        if matrix.steps > 1:
            home = self.variable(self.dtype, "result", [*shape[:-1], matrix.steps, shape[-1]],
                                 sums.tiles)  # fmt: skip
            index = self.index
            assert index is not None
            # Any counter of the tile will do; the sums lie on tiles of one m and n part.
            edges = {"src": sums.tensor, "index": self._at(index, sums.tiles), "out": home}
            update = codelets.write_slice(self.layout)
            body.add(self.execute("update result", [(update, sums.tiles, edges)]))
            return home.transpose(4, 0, 1, 2, 3, 5)
        if plan.serial_in > 1:
            total = self.variable(self.partials_type, "total", shape, sums.tiles)
            fill = {"out": total, "value": 0}
            before.add(self.execute("zero total", [(machine_codelets.FILL, sums.tiles, fill)]))
            edges = {"src": sums.tensor, "total": total}
            body.add(self.execute("add to total", [(codelets.add(self.layout), sums.tiles, edges)]))
            return total.expand_dims(0)
        return sums.tensor.expand_dims(0)

    def _at(self, index: Tensor, tiles: np.ndarray) -> Tensor:
        """The step counters of some tiles."""
        at = np.empty(self.layout.tiles.max() + 1, np.int64)
        at[self.layout.tiles.reshape(-1)] = index.addresses().reshape(-1)
        return Tensor(self.graph, index.dtype, tiles.shape, addresses=at[tiles])

    def _regroup(self, sums: Partials, steps: Sequence) -> None:
        """The result in its own groups of channels: on its tile, where it is not padded."""
        plan = self.plan
        copy, width = int(plan.target.memcpy_bytes_per_cycle), plan.dtype.vector_width
        outs = plan.m if plan.swapped else plan.n
        if self.layout.is_rearranged["c"]:
            odd = bool(outs % width)
            codelet = codelets.in_place(
                "rearrange", lambda held: cycles.rearrange(held, plan.dtype, copy, odd=odd)
            )
        elif plan.vertex.out_channels != 4 * width:
            codelet = codelets.in_place(
                "regroup", lambda held: cycles.regroup(held, plan.vertex, plan.dtype, copy)
            )
        else:
            return
        vertices = [(codelet, sums.tiles, {"data": sums.tensor})]
        steps.add(self.execute(codelet.name, vertices))
