"""The program of forward and grad_input: distribution, propagation, reduction.

See sections 5.1 and 5.2 of docs/popsparse-formulas.md; Li, Z. et al., arXiv:2303.16999.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from popsparse.machine import (
    Codelet,
    Copy,
    Execute,
    Graph,
    In,
    Out,
    Sequence,
    Tensor,
    VertexView,
    codelets,
    rotation,
)
from popsparse.machine.facts import SUM_CODE
from popsparse.planning import tile_cycles
from popsparse.planning.parts import ceil_div
from popsparse.planning.plan import Plan
from popsparse.programs.codelets_product import ProductCodelets, transpose_codelet
from popsparse.programs.control import Propagation
from popsparse.programs.layout import (
    OperandLayout,
    PlannedTensor,
    machine_type,
    reorder,
    tile_grid,
)
from popsparse.programs.weights import SparseTensor


def rectangles(plan: Plan, order: str) -> np.ndarray:
    """x * Ny + y of every tile, the grid's dimensions in the order given."""
    parts = plan.partition
    sizes = {"g": parts.groups, "x": parts.x, "y": parts.y, "z": parts.z}
    at = dict(zip(order, np.indices([sizes[dim] for dim in order]), strict=True))
    return np.asarray(at["x"] * parts.y + at["y"])


class Rotating(NamedTuple):
    """Two buffers on every tile, for data that tiles pass to their neighbours."""

    order: str
    buffers: tuple[Tensor, Tensor]

    @classmethod
    def like(
        cls, graph: Graph, tensor: Tensor, order: str, tiles: np.ndarray, name: str
    ) -> Rotating:
        first, second = (
            graph.add_variable(tensor.dtype, tensor.shape, f"{name} {number}", tiles=tiles)
            for number in (0, 1)
        )
        return cls(order, (first, second))

    def load(self, home: Tensor, number: int, dim: str, shift: int) -> list[tuple[Tensor, Tensor]]:
        """Pairs that bring what lies at home `shift` parts away into a buffer."""
        return rotation(home, self.buffers[number], shift, self.order.index(dim))

    def move(self, number: int, dim: str, shift: int) -> list[tuple[Tensor, Tensor]]:
        """Pairs that pass a buffer on, into the other one."""
        return self.load(self.buffers[number], 1 - number, dim, shift)


def add_product(
    graph: Graph, weights: SparseTensor, operand: Tensor, program: Sequence, name: str
) -> PlannedTensor:
    """Add the pass `name`, "forward" or "grad_input", to a program; returns its result."""
    return _Product(graph, weights, name).add(operand, program)


class _Product:
    def __init__(self, graph: Graph, weights: SparseTensor, name: str) -> None:
        self.graph, self.plan, self.name = graph, weights.plan, name
        self.weights = weights
        turned = name == "grad_input"
        self.input = OperandLayout(self.plan, "x" if turned else "y")
        self.output = OperandLayout(self.plan, "y" if turned else "x")
        # One order for all variables of the pass: the dimension that is summed over first.
        self.order = self.input.order
        self.tiles = tile_grid(self.plan, self.order)
        self.turns_blocks = turned and min(self.plan.block_dimensions) > 1
        self.codelets = ProductCodelets(self.plan, name, turned_blocks=self.turns_blocks)
        self.rectangles = rectangles(self.plan, self.order)

    def add(self, operand: Tensor, program: Sequence) -> PlannedTensor:
        steps = Sequence(name=self.name)
        program.add(steps)
        words = self.weights.pass_words(self.name, self.order)
        values = self.weights.pass_values(self.order)
        if self.turns_blocks:
            values = self._turn_blocks(values, steps)
        local = self.fetch(operand, steps)
        whole, partials = self.add_partials(steps)
        edges = {"operand": local, "partials": partials, "rectangle": self.rectangles}
        self._distribute(words, values, edges, steps)
        self._propagate(words, values, edges, steps)
        return self.reduce(whole, steps)

    def _turn_blocks(self, values: Tensor, steps: Sequence) -> Tensor:
        turned = self.variable("turned values", [values.shape[-1]])
        compute = self.graph.add_compute_set("transpose blocks")
        codelet = transpose_codelet(self.plan)
        self.graph.add_vertices(compute, codelet, self.tiles, {"values": values, "out": turned})
        steps.add(Execute(compute, name="transpose blocks"))
        return turned

    def _distribute(self, words: Tensor, values: Tensor, edges: dict, steps: Sequence) -> None:
        """Every tile gets the buckets of its Z partners and adds what is its own."""
        partners = self.plan.partition.z - 1
        other_words = self.graph.add_variable(
            words.dtype,
            [*self.tiles.shape, partners, words.shape[-1]],
            f"{self.name} partners' meta-info",
            tiles=self.tiles,
        )
        other_values = self.variable("partners' values", [partners, values.shape[-1]])
        pairs = []
        for number in range(partners):
            for source, to in ((words, other_words), (values, other_values)):
                pairs += rotation(source, to[..., number, :], number + 1, self.order.index("z"))
        if pairs:
            steps.add(Copy(pairs, name="exchange buckets"))
        compute = self.graph.add_compute_set("distribution")
        self.graph.add_vertices(
            compute,
            self.codelets.distribution,
            self.tiles,
            {
                **edges,
                "words": words,
                "values": values,
                "other_words": other_words,
                "other_values": other_values,
            },
        )
        steps.add(Execute(compute, name="distribution"))

    def _propagate(self, words: Tensor, values: Tensor, edges: dict, steps: Sequence) -> None:
        parts = self.plan.partition
        if parts.x * parts.y == 1:
            return  # There is no other rectangle to propagate to.
        loop = Propagation(self.graph, self.weights, self.name)
        moving = [
            Rotating.like(self.graph, tensor, self.order, self.tiles, f"{self.name} {what}")
            for tensor, what in ((words, "passing meta-info"), (values, "passing values"))
        ]
        # What a tile had, the next one has: entry i of the new buffer is entry i - 1 of the old.
        first = [
            pair
            for rotating, home in zip(moving, (words, values), strict=True)
            for pair in rotating.load(home, 0, loop.first_dim, -1)
        ]
        compute, moves = {}, {}
        for buffer in (0, 1):
            here = self.graph.add_compute_set(f"propagation {buffer}")
            passing = {
                "words": moving[0].buffers[buffer], "values": moving[1].buffers[buffer]
            }  # fmt: skip
            self.graph.add_vertices(
                here, self.codelets.propagation, self.tiles, {**edges, **passing}
            )
            compute[buffer] = Execute(here, name=f"compute {buffer}")
            for dim in "zyx":
                if getattr(parts, dim) > 1:
                    pairs = [pair for r in moving for pair in r.move(buffer, dim, -1)]
                    moves[dim, buffer] = Copy(pairs, name=f"pass on {dim} {buffer}")
        steps.add(loop.build(Copy(first, name="first offset"), compute, moves))

    def variable(self, what: str, shape: list[int], *, partials: bool = False) -> Tensor:
        dtype = machine_type(self.plan, partials=partials)
        name = f"{self.name} {what}"
        return self.graph.add_variable(dtype, [*self.tiles.shape, *shape], name, tiles=self.tiles)

    def fetch(self, operand: Tensor, steps: Sequence) -> Tensor:
        """The operand's part of each tile, [*grid, channels, batch]."""
        home, regroup = self.input.at_home(self.graph, operand, f"{self.name} operand at home")
        local, fetch = self.input.add_local(self.graph, home, f"{self.name} operand")
        steps.add(*regroup, Copy([fetch], name="fetch"))
        return local.reshape(*self.tiles.shape, *self.input.part)

    def add_partials(self, steps: Sequence) -> tuple[Tensor, Tensor]:
        """Zeroed partial sums: whole, padded for the reduction, and as [*grid, channels, batch]."""
        outputs, depth = self.output.numel, self.tiles.shape[1]
        padded = depth * ceil_div(outputs, depth)
        partials = self.variable("partials", [padded], partials=True)
        zero = self.graph.add_compute_set("zero partials")
        fill = {"out": partials, "value": 0}
        self.graph.add_vertices(zero, codelets.FILL, self.tiles, fill)
        steps.add(Execute(zero, name="zero partials"))
        shape = (*self.tiles.shape, *self.output.part)
        return partials, partials[..., :outputs].reshape(*shape)

    def reduce(self, partials: Tensor, steps: Sequence) -> PlannedTensor:
        """Sum the partials of the tiles that share an output, each tile a part of them."""
        depth = self.tiles.shape[1]
        share = partials.shape[-1] // depth
        result_type, partials_type = machine_type(self.plan), partials.dtype
        if depth == 1 and partials_type == result_type:
            return self._result(partials)
        out = self.variable("result", [share])
        compute = self.graph.add_compute_set("reduce" if depth > 1 else "cast")
        if depth == 1:
            cast = {"src": partials, "out": out}
            self.graph.add_vertices(compute, codelets.CAST, self.tiles, cast)
            steps.add(Execute(compute, name="cast"))
            return self._result(out)
        others = self.variable("partials of others", [depth - 1, share], partials=True)
        pairs = []
        codelet = _reduce_codelet(self.plan, share, depth)
        for at in range(depth):
            part = partials[..., at * share : (at + 1) * share]
            # The tiles' own partials stay where they are.
            before, after = part[:, :at], part[:, at + 1 :]
            to = others[:, at]
            for sources, first in ((before, 0), (after, at)):
                if sources.shape[1]:
                    there = to[..., first : first + sources.shape[1], :]
                    pairs.append((sources.transpose(0, 2, 3, 1, 4), there))
            self.graph.add_vertices(
                compute,
                codelet,
                self.tiles[:, at],
                {"own": part[:, at], "others": to, "out": out[:, at]},
            )
        steps.add(Copy(pairs, name="exchange partials"), Execute(compute, name="reduce"))
        return self._result(out)

    def _result(self, out: Tensor) -> PlannedTensor:
        # The result lies as an operand of the pass that reads it: part by part, spread over the
        # tiles that share it.
        return self.output.natural(reorder(out, self.order, self.output.order))


def _reduce_codelet(plan: Plan, outputs: int, depth: int) -> Codelet:
    partials, result = plan.options.partials_type, plan.dtype
    cycles = int(tile_cycles.reduce(outputs, depth, partials, result, int(plan.target.workers)))

    def reduce(v: VertexView) -> None:
        total = v.own.astype(np.float32)
        total += v.others.sum(axis=-2, dtype=np.float32)
        v.out[...] = total

    fields = {"own": In(), "others": In(), "out": Out()}
    flops = outputs * (depth - 1)
    code = int(SUM_CODE.typical)
    return Codelet("reduce", fields, reduce, cycles, "supervisor", flops=flops, code_bytes=code)
