"""The program of grad_weight: either the buckets travel, or the dense operands do.

Each bucket is combined with all parts of the batch, and, if it holds sub-groups of other
rectangles, with their operands. If the buckets travel, meta-info and partial gradients go round and
return home at the end. If the operands travel, they go the other way round: a move along x changes
only the gradient of the output, a move along y only the input. See section 5.3 of
docs/popsparse-formulas.md. In the original the first round over z is a broadcast of each part; here
each part is passed on.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from popsparse.machine import (
    UNSIGNED_INT,
    Copy,
    Execute,
    Graph,
    Program,
    Sequence,
    Switch,
    Tensor,
    codelets,
)
from popsparse.programs.codelets import GradWeightCodelets, rearrange_codelet
from popsparse.programs.layout import (
    HOST_ORDER,
    OperandLayout,
    SparseTensor,
    execute,
    rectangles,
    reorder,
    tile_grid,
)
from popsparse.programs.product import Propagation, RotatingBuckets

_ORDER = "gyzx"


def add_grad_weight(
    graph: Graph, weights: SparseTensor, gradient: Tensor, inputs: Tensor, program: Sequence
) -> Tensor:
    """Add grad_weight to a program; returns the gradients, laid out like the values of buckets."""
    return _GradWeight(graph, weights).add(gradient, inputs, program)


class _GradWeight:
    """Builds the program of grad_weight."""

    def __init__(self, graph: Graph, weights: SparseTensor) -> None:
        self.graph, self.weights = graph, weights
        self.plan = weights.plan
        self.tiles = tile_grid(self.plan, _ORDER)
        self.codelets = GradWeightCodelets(self.plan)
        self.words = weights.pass_words("grad_weight", _ORDER)
        self.rectangles = rectangles(self.plan, _ORDER)
        self.steps = Sequence(name="grad_weight")

    def variable(self, what: str, shape: list[int], dtype: Any) -> Tensor:
        name = f"grad_weight {what}"
        return self.graph.add_variable(dtype, [*self.tiles.shape, *shape], name, tiles=self.tiles)

    def execute(self, name: str, codelet: Any, edges: dict) -> Execute:
        return execute(self.graph, name, codelet, self.tiles, edges)

    def add(self, gradient: Tensor, inputs: Tensor, program: Sequence) -> Tensor:
        program.add(self.steps)
        operands = self._fetch({"x": gradient, "y": inputs})
        partials_type = self.plan.options.partials_type
        values = self.plan.buckets.nz_elements
        partials = self.variable("partials", [values], partials_type)
        self.steps.add(self.execute("zero partials", codelets.FILL, {"out": partials, "value": 0}))
        if self.plan.grad_w_exchange_buckets:
            partials = self._move_buckets(partials, operands)
        else:
            self._move_operands(partials, operands)
        dtype = self.plan.dtype
        if partials_type == dtype:
            return reorder(partials, _ORDER, HOST_ORDER).flatten()
        tiles = tile_grid(self.plan, HOST_ORDER)
        out = self.graph.add_variable(
            dtype, [*tiles.shape, values], "grad_weight result", tiles=tiles
        )
        cast = {"src": partials, "out": reorder(out, HOST_ORDER, _ORDER)}
        self.steps.add(self.execute("cast", codelets.CAST, cast))
        return out.flatten()

    def _fetch(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The operands each tile works on, [*grid, channels, batch] or [*grid, batch, channels]."""
        pairs, operands, copies = [], {}, []
        name = "rearrange inputs"
        transposes = self.graph.add_compute_set(name)
        for dim, tensor in tensors.items():
            what = "gradient" if dim == "x" else "input"
            layout = OperandLayout(self.plan, dim)
            home, regroup = layout.bring_home(self.graph, tensor, f"grad_weight {what} at home")
            self.steps.add(*regroup)
            local, pair = layout.add_local(self.graph, home, f"grad_weight {what}", _ORDER)
            pairs.append(pair)
            operand = local.reshape(*self.tiles.shape, *layout.part)
            if self.codelets.batch_first:
                channels, batch = layout.part
                transposed = self.variable(f"transposed {what}", [batch, channels], local.dtype)
                copies.append((operand.transpose(0, 1, 2, 3, 5, 4), transposed))
                codelet = rearrange_codelet(self.plan, dim)
                edges = {"operand": operand, "out": transposed}
                self.graph.add_vertices(transposes, codelet, self.tiles, edges)
                operand = transposed
            operands[dim] = operand
        self.steps.add(Copy(pairs, name="fetch inputs"))
        if self.codelets.batch_first:
            structured = self.plan.options.enable_structured_rearrangements
            self.steps.add(Execute(transposes) if structured else Copy(copies, name=name))
        return operands

    @property
    def _propagates(self) -> bool:
        """Whether the plan has more than one rectangle, so that propagation is possible."""
        return self.plan.partition.x * self.plan.partition.y > 1

    # Buckets travel.

    def _move_buckets(self, partials: Tensor, operands: dict[str, Tensor]) -> Tensor:
        parts = self.plan.partition
        if parts.z == 1 and not self._propagates:
            self.steps.add(self._compute_resident("distribution", self.words, partials, operands))
            return partials
        words = RotatingBuckets.create_like(
            self.graph, self.words, _ORDER, self.tiles, "grad_weight passing meta-info"
        )
        second = self.variable("passing partials", [partials.shape[-1]], partials.dtype)
        passing = RotatingBuckets(_ORDER, (partials, second))
        compute = {
            n: self._compute_resident(
                f"compute {n}", words.buffers[n], passing.buffers[n], operands
            )
            for n in (0, 1)
        }
        moves = {
            (dim, n): Copy(words.move(n, dim, -1) + passing.move(n, dim, -1), name=f"{dim} {n}")
            for dim in "zyx"
            for n in (0, 1)
            if getattr(parts, dim) > 1
        }
        # The buckets go once round the Z partners, and home.
        distribution = Sequence(name="distribution")
        distribution.add(self._compute_resident("compute own", self.words, partials, operands))
        if parts.z > 1:
            pairs = words.load(self.words, 1, "z", -1) + passing.move(0, "z", -1)
            distribution.add(Copy(pairs, name="pass on own"))
        for turn in range(1, parts.z):
            distribution.add(compute[turn % 2], moves["z", turn % 2])
        self.steps.add(distribution)
        at = parts.z % 2 if parts.z > 1 else 0
        if self._propagates:
            loop = Propagation(
                self.graph, self.weights, "grad_weight", first_buffers=1 - at, homing=True
            )
            dim = loop.first_dim
            pairs = words.load(self.words, 1 - at, dim, -1) + passing.move(at, dim, -1)
            home = Copy(passing.buffers[1 - at], passing.buffers[at], name="copy back")
            last = Switch(loop.last_buffer, {1 - at: home}, name="which buffer")
            self.steps.add(loop.build(Copy(pairs, name="first offset"), compute, moves, last))
        return passing.buffers[at]

    def _compute_resident(
        self, name: str, words: Tensor, partials: Tensor, operands: dict[str, Tensor]
    ) -> Execute:
        edges = {
            "words": words,
            "partials": partials,
            "gradient": operands["x"],
            "input": operands["y"],
            "rectangle": self.rectangles,
        }
        return self.execute(name, self.codelets.resident, edges)

    # Operands travel.

    def _move_operands(self, partials: Tensor, operands: dict[str, Tensor]) -> None:
        parts = self.plan.partition
        moving = {
            dim: RotatingBuckets(
                _ORDER,
                (tensor, self.variable(f"passing {dim}", list(tensor.shape[4:]), tensor.dtype)),
            )
            for dim, tensor in operands.items()
        }

        # The operands go once through the parts of the batch, which changes no rectangle.
        steps = {}
        for n in range(min(2, parts.z)):
            held = {dim: rotating.buffers[n] for dim, rotating in moving.items()}
            steps[n] = self._compute_resident(f"compute {n}", self.words, partials, held)
        distribution = Sequence(name="distribution")
        passes = {
            n: Copy(moving["x"].move(n, "z", 1) + moving["y"].move(n, "z", 1), name=f"pass on {n}")
            for n in range(min(2, parts.z - 1))
        }
        for turn in range(parts.z):
            distribution.add(steps[turn % 2])
            if turn + 1 < parts.z:
                distribution.add(passes[turn % 2])
        self.steps.add(distribution)
        if self._propagates:
            self._propagate_operands(partials, moving, (parts.z - 1) % 2)

    def _propagate_operands(
        self, partials: Tensor, moving: dict[str, RotatingBuckets], at: int
    ) -> None:
        """The propagation phase, starting with the operands in buffers `at`."""
        parts = self.plan.partition
        ids, homes = {}, {}
        index = dict(zip(_ORDER, np.indices(self.tiles.shape), strict=True))
        for dim in "xy":
            homes[dim] = self.graph.add_constant(
                UNSIGNED_INT, self.tiles.shape, index[dim], f"own {dim}", tiles=self.tiles
            )
            ids[dim] = RotatingBuckets.create_like(
                self.graph, homes[dim], _ORDER, self.tiles, f"grad_weight {dim} of visitor"
            )
        # Bit 0 selects the buffers of the gradient and its x, bit 1 those of the input and its y.
        toggles = {"z": 3, "y": 2, "x": 1}
        first = "y" if parts.y > 1 else "x"
        loop = Propagation(
            self.graph,
            self.weights,
            "grad_weight",
            first_buffers=3 * at ^ toggles[first],
            toggles=toggles,
        )
        other = "x" if first == "y" else "y"
        pairs = moving[first].move(at, first, 1)
        pairs += ids[first].load(homes[first], 1 - at, first, 1)
        pairs += [(homes[other], ids[other].buffers[at])]
        compute: dict[int, Program] = {}
        moves: dict[tuple[str, int], Program] = {}
        for buffers in range(4):
            held = {"x": buffers & 1, "y": buffers >> 1}
            edges = {
                "words": self.words,
                "partials": partials,
                "gradient": moving["x"].buffers[held["x"]],
                "input": moving["y"].buffers[held["y"]],
                **{f"{dim}_id": ids[dim].buffers[held[dim]] for dim in "xy"},
            }
            compute[buffers] = self.execute(f"visit {buffers}", self.codelets.visiting, edges)
            for dim, what in (("z", "xy"), ("y", "y"), ("x", "x")):
                if getattr(parts, dim) > 1:
                    passing = [
                        pair
                        for name in what
                        for rotating in (moving[name], ids[name])
                        for pair in rotating.move(held[name], dim, 1)
                    ]
                    moves[dim, buffers] = Copy(passing, name=f"{dim} {buffers}")
        self.steps.add(loop.build(Copy(pairs, name="first offset"), compute, moves))
