"""The program of a sparse product: propagation of buckets and the passes by rows.

See sections 5.1 and 5.2 of docs/popsparse-formulas.md; Li, Z. et al., arXiv:2303.16999. The order
within a dimension is free.

The loop visits the offsets (i, j) of the overflow record, and for each all Z partners. At offset
(i, j) the tiles of (x, y) see the buckets whose home is (x - i, y - j). One exchange leads from a
turn to the next, along z, then y, then x; buckets are not moved back: the next pass over a
dimension begins where the last one ended. Unused offsets in X are passed without computing. All
counters are on one tile, and every decision is a control value that it broadcasts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from popsparse.encoding.buckets import OverflowInfo
from popsparse.machine import (
    BOOL,
    UNSIGNED_INT,
    UNSIGNED_SHORT,
    Codelet,
    Copy,
    Execute,
    Graph,
    If,
    In,
    InOut,
    Out,
    Program,
    RepeatWhileTrue,
    Sequence,
    Switch,
    Tensor,
    VertexView,
    codelets,
    rotation,
)
from popsparse.planning import cycles as tile_cycles
from popsparse.planning.cycles import CONTROL_INSTRUCTIONS
from popsparse.planning.params import ceil_div
from popsparse.planning.plan import Plan
from popsparse.programs.codelets import ProductCodelets, transpose_codelet
from popsparse.programs.layout import (
    OperandLayout,
    PlannedTensor,
    SparseTensor,
    control_tile,
    execute,
    rectangles,
    reorder,
    tile_grid,
)

IDLE = 4
"""Value of the compute switch when a turn only passes buckets on."""

# Fields of the loop's state.
_X, _ROWS, _TURNS, _LEFT, _BUFFERS, _MOVE, _WORK, _FAR_X, _FAR_Y, _FAR_Z = range(10)
_MOVES = {"z": 1, "y": 2, "x": 3}
_Z_MOVE, _Y_MOVE, _X_MOVE = _MOVES.values()


class Propagation:
    """Builds the loop for one pass.

    Args:
        graph, weights: the graph, and the weights with the overflow record.
        name: name of the pass, for the profile.
        first_buffers: the buffers that hold data when the loop begins: bit 0 for the first kind of
            data, bit 1 for the second.
        toggles: for each move ("z", "y", "x") the buffers it switches, as bits.
        homing: whether to go on, without computing, until all data is back where it began;
            `last_buffer` then says which buffer holds it.
    """

    def __init__(
        self,
        graph: Graph,
        weights: SparseTensor,
        name: str,
        *,
        first_buffers: int = 0,
        toggles: Mapping[str, int] | None = None,
        homing: bool = False,
    ) -> None:
        self.plan: Plan = weights.plan
        self.weights = weights
        self.graph = graph
        self.name = name
        self.homing = homing
        toggles = toggles or dict.fromkeys(_MOVES, 1)
        self.toggles = {_MOVES[dim]: bits for dim, bits in toggles.items()}
        self.first_buffers = first_buffers
        tile = control_tile(self.plan)

        def add(dtype: Any, shape: list[int], what: str) -> Tensor:
            return graph.add_variable(dtype, shape, f"{name} {what}", tiles=tile)

        self.tile = np.array([tile])
        self.counts = add(UNSIGNED_INT, [weights.overflow.shape[0]], "counts")
        self.state = add(UNSIGNED_INT, [10], "loop state")
        self.any = add(BOOL, [], "spills")
        self.more = add(BOOL, [], "goes on")

    @property
    def first_dim(self) -> str:
        """The dimension of the first move: the loop begins at (0, 1), or at (1, 0)."""
        return "y" if self.plan.partition.y > 1 else "x"

    @property
    def last_buffer(self) -> Tensor:
        """The buffers in use after the loop."""
        return self.state[_BUFFERS]

    def _execute(self, what: str, codelet: Codelet, values: dict[str, Tensor]) -> Execute:
        edges = {key: tensor.expand_dims(0) for key, tensor in values.items()}
        return execute(self.graph, f"{self.name} {what}", codelet, self.tile, edges, what)

    def build(
        self,
        first: Program,
        compute: Mapping[int, Program],
        moves: Mapping[tuple[str, int], Program],
        last: Program | None = None,
    ) -> Sequence:
        """Build the phase: the test, the first move, and the loop.

        Args:
            first: moves the buckets of the first offset into `first_buffers`.
            compute: the step that computes, by buffers.
            moves: the exchange to the other buffers, by dimension and buffers before it.
            last: steps after the loop, if it runs at all.
        """
        cast = self._execute(
            "cast counts", _CAST, {"words": self.weights.overflow, "counts": self.counts}
        )
        begin = self._execute(
            "begin", self._begin(), {"counts": self.counts, "state": self.state, "any": self.any}
        )
        cases = {4 * _MOVES[dim] + buffers: step for (dim, buffers), step in moves.items()}
        test = self._execute(
            "loop condition", self._more(), {"state": self.state, "more": self.more}
        )
        advance = self._execute(
            "advance", self._advance(), {"counts": self.counts, "state": self.state}
        )
        toggle = self._execute(
            "toggle", self._toggle(), {"counts": self.counts, "state": self.state}
        )
        body = Sequence(
            Switch(self.state[_WORK], compute, name="by buffer"),
            advance,
            Switch(self.state[_MOVE], cases, name="by direction"),
            toggle,
        )
        loop = RepeatWhileTrue(test, self.more, body, name="loop")
        return Sequence(
            cast,
            begin,
            If(self.any, Sequence(first, loop, last or Sequence()), name="any"),
            name="propagation",
        )

    # The loop's arithmetic, on one tile.

    def _record(self, counts: np.ndarray) -> OverflowInfo:
        parts = self.plan.partition
        return OverflowInfo.from_words(counts[0], (parts.x, parts.y, parts.z))

    def _begin(self) -> Codelet:
        parts = self.plan.partition

        def begin(v: VertexView) -> None:
            info, state = self._record(v.counts), v.state[0]
            state[...] = 0
            state[_X] = 0 if parts.y > 1 else 1
            # Offsets in y to visit at this x, the current one included.
            state[_ROWS] = info.y - 1 if parts.y > 1 else 1
            state[_TURNS] = parts.z
            state[_LEFT] = info.propagation_steps
            state[_BUFFERS] = self.first_buffers
            state[_FAR_Y if parts.y > 1 else _FAR_X] = 1
            v.any[...] = state[_LEFT] > 0
            _choose_work(info, state)

        fields = {"counts": In(UNSIGNED_INT), "state": Out(UNSIGNED_INT), "any": Out(BOOL)}
        return Codelet("begin", fields, begin, CONTROL_INSTRUCTIONS)

    def _more(self) -> Codelet:
        def more(v: VertexView) -> None:
            state = v.state[0]
            v.more[...] = state[_LEFT] > 0 or (self.homing and bool(_next_move_home(state)))

        fields = {"state": In(UNSIGNED_INT), "more": Out(BOOL)}
        return Codelet("more", fields, more, CONTROL_INSTRUCTIONS)

    def _advance(self) -> Codelet:
        parts = self.plan.partition
        sizes = {_X_MOVE: (_FAR_X, parts.x), _Y_MOVE: (_FAR_Y, parts.y), _Z_MOVE: (_FAR_Z, parts.z)}

        def advance(v: VertexView) -> None:
            info, state = self._record(v.counts), v.state[0]
            move = self._next_move(info, state)
            if move == _X_MOVE and state[_LEFT]:
                state[_X] += 1
                state[_ROWS] = info.y
                state[_TURNS] = parts.z
            if move:
                far, size = sizes[move]
                state[far] = (state[far] + 1) % size
            state[_MOVE] = 4 * move + int(state[_BUFFERS])

        fields = {"counts": In(UNSIGNED_INT), "state": InOut(UNSIGNED_INT)}
        return Codelet("advance", fields, advance, CONTROL_INSTRUCTIONS)

    def _next_move(self, info: OverflowInfo, state: np.ndarray) -> int:
        """Count the finished turn, and return the next move of the buckets; 0: none."""
        if state[_LEFT] and not info.used_x[state[_X]]:
            return _X_MOVE
        if state[_LEFT]:
            state[_LEFT] -= 1
            state[_TURNS] -= 1
            if state[_LEFT] and state[_TURNS]:
                return _Z_MOVE
            if state[_LEFT]:
                state[_TURNS] = self.plan.partition.z
                state[_ROWS] -= 1
                return _Y_MOVE if state[_ROWS] else _X_MOVE
        return _next_move_home(state) if self.homing else 0

    def _toggle(self) -> Codelet:
        def toggle(v: VertexView) -> None:
            state = v.state[0]
            move = int(state[_MOVE]) // 4
            if move:
                state[_BUFFERS] ^= self.toggles[move]
            _choose_work(self._record(v.counts), state)

        fields = {"counts": In(UNSIGNED_INT), "state": InOut(UNSIGNED_INT)}
        return Codelet("toggle", fields, toggle, CONTROL_INSTRUCTIONS)


def _choose_work(info: OverflowInfo, state: np.ndarray) -> None:
    works = state[_LEFT] > 0 and info.used_x[state[_X]]
    state[_WORK] = state[_BUFFERS] if works else IDLE


def _next_move_home(state: np.ndarray) -> int:
    """The next move of the buckets on their way home; 0: they are home."""
    for far, move in ((_FAR_Z, _Z_MOVE), (_FAR_Y, _Y_MOVE), (_FAR_X, _X_MOVE)):
        if state[far]:
            return move
    return 0


def _cast(v: VertexView) -> None:
    v.counts[...] = v.words


_CAST = Codelet(
    "cast counts",
    {"words": In(UNSIGNED_SHORT), "counts": Out(UNSIGNED_INT)},
    _cast,
    CONTROL_INSTRUCTIONS,
)


class RotatingBuckets(NamedTuple):
    """Two buffers on every tile, for data that tiles pass to their neighbours."""

    order: str
    buffers: tuple[Tensor, Tensor]

    @classmethod
    def create_like(
        cls, graph: Graph, tensor: Tensor, order: str, tiles: np.ndarray, name: str
    ) -> RotatingBuckets:
        first, second = (
            graph.add_variable(tensor.dtype, tensor.shape, f"{name} {number}", tiles=tiles)
            for number in (0, 1)
        )
        return cls(order, (first, second))

    def load(self, home: Tensor, number: int, dim: str, shift: int) -> list[tuple[Tensor, Tensor]]:
        """Pairs that copy the home data of `shift` parts away into a buffer."""
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
    """Builds the program of one pass."""

    def __init__(self, graph: Graph, weights: SparseTensor, name: str) -> None:
        self.graph, self.plan, self.name = graph, weights.plan, name
        self.weights = weights
        transposed = name == "grad_input"
        self.input = OperandLayout(self.plan, "x" if transposed else "y")
        self.output = OperandLayout(self.plan, "y" if transposed else "x")
        # One order for all variables of the pass: the reduced dimension comes first.
        self.order = self.input.order
        self.tiles = tile_grid(self.plan, self.order)
        self.transposes_blocks = transposed and min(self.plan.block_dimensions) > 1
        self.codelets = ProductCodelets(self.plan, name, transposed_blocks=self.transposes_blocks)
        self.rectangles = rectangles(self.plan, self.order)

    def add(self, operand: Tensor, program: Sequence) -> PlannedTensor:
        steps = Sequence(name=self.name)
        program.add(steps)
        words = self.weights.pass_words(self.name, self.order)
        values = reorder(self.weights.values, "gxyz", self.order)
        if self.transposes_blocks:
            values = self._transpose_blocks(values, steps)
        local = self.fetch(operand, steps)
        all_partials, partials = self.add_partials(steps)
        edges = {"operand": local, "partials": partials, "rectangle": self.rectangles}
        self._distribute(words, values, edges, steps)
        self._propagate(words, values, edges, steps)
        return self.reduce(all_partials, steps)

    def _transpose_blocks(self, values: Tensor, steps: Sequence) -> Tensor:
        transposed = self.variable("transposed values", [values.shape[-1]])
        edges = {"values": values, "out": transposed}
        codelet = transpose_codelet(self.plan)
        steps.add(execute(self.graph, "transpose blocks", codelet, self.tiles, edges))
        return transposed

    def _distribute(self, words: Tensor, values: Tensor, edges: dict, steps: Sequence) -> None:
        """Every tile gets the buckets of its Z partners and adds the products of its rectangle."""
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
        buckets = {
            "words": words,
            "values": values,
            "other_words": other_words,
            "other_values": other_values,
        }
        codelet = self.codelets.distribution
        steps.add(execute(self.graph, "distribution", codelet, self.tiles, edges | buckets))

    def _propagate(self, words: Tensor, values: Tensor, edges: dict, steps: Sequence) -> None:
        parts = self.plan.partition
        if parts.x * parts.y == 1:
            return  # There is no other rectangle to propagate to.
        loop = Propagation(self.graph, self.weights, self.name)
        moving = [
            RotatingBuckets.create_like(
                self.graph, tensor, self.order, self.tiles, f"{self.name} {what}"
            )
            for tensor, what in ((words, "passing meta-info"), (values, "passing values"))
        ]
        # Each tile passes to the next: entry i of the new buffer is entry i - 1 of the old.
        first = [
            pair
            for rotating, home in zip(moving, (words, values), strict=True)
            for pair in rotating.load(home, 0, loop.first_dim, -1)
        ]
        compute, moves = {}, {}
        for buffer in (0, 1):
            words, values = (rotating.buffers[buffer] for rotating in moving)
            compute[buffer] = execute(
                self.graph,
                f"propagation {buffer}",
                self.codelets.propagation,
                self.tiles,
                {**edges, "words": words, "values": values},
                f"compute {buffer}",
            )
            for dim in "zyx":
                if getattr(parts, dim) > 1:
                    pairs = [pair for r in moving for pair in r.move(buffer, dim, -1)]
                    moves[dim, buffer] = Copy(pairs, name=f"pass on {dim} {buffer}")
        steps.add(loop.build(Copy(first, name="first offset"), compute, moves))

    def variable(self, what: str, shape: list[int], *, partials: bool = False) -> Tensor:
        dtype = self.plan.options.partials_type if partials else self.plan.dtype
        name = f"{self.name} {what}"
        return self.graph.add_variable(dtype, [*self.tiles.shape, *shape], name, tiles=self.tiles)

    def fetch(self, operand: Tensor, steps: Sequence) -> Tensor:
        """The operand's part of each tile, [*grid, channels, batch]."""
        home, regroup = self.input.bring_home(self.graph, operand, f"{self.name} operand at home")
        local, fetch = self.input.add_local(self.graph, home, f"{self.name} operand")
        steps.add(*regroup, Copy([fetch], name="fetch"))
        return local.reshape(*self.tiles.shape, *self.input.part)

    def add_partials(self, steps: Sequence) -> tuple[Tensor, Tensor]:
        """Zeroed partial sums: all, padded for the reduction, and as [*grid, channels, batch]."""
        outputs, depth = self.output.numel, self.tiles.shape[1]
        padded = depth * ceil_div(outputs, depth)
        partials = self.variable("partials", [padded], partials=True)
        fill = {"out": partials, "value": 0}
        steps.add(execute(self.graph, "zero partials", codelets.FILL, self.tiles, fill))
        shape = (*self.tiles.shape, *self.output.part)
        return partials, partials[..., :outputs].reshape(*shape)

    def reduce(self, partials: Tensor, steps: Sequence) -> PlannedTensor:
        """Sum the partials of the tiles that share an output; each tile sums a part of them."""
        depth = self.tiles.shape[1]
        share = partials.shape[-1] // depth
        result_type, partials_type = self.plan.dtype, partials.dtype
        if depth == 1 and partials_type == result_type:
            return self._result(partials)
        out = self.variable("result", [share])
        if depth == 1:
            cast = {"src": partials, "out": out}
            steps.add(execute(self.graph, "cast", codelets.CAST, self.tiles, cast))
            return self._result(out)
        compute = self.graph.add_compute_set("reduce")
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
                    target = to[..., first : first + sources.shape[1], :]
                    pairs.append((sources.transpose(0, 2, 3, 1, 4), target))
            self.graph.add_vertices(
                compute,
                codelet,
                self.tiles[:, at],
                {"own": part[:, at].expand_dims(-2), "others": to, "out": out[:, at]},
            )
        steps.add(Copy(pairs, name="exchange partials"), Execute(compute, name="reduce"))
        return self._result(out)

    def _result(self, out: Tensor) -> PlannedTensor:
        # The result has the layout of an operand of the pass that reads it: part by part, spread
        # over the tiles that share it.
        return self.output.natural(reorder(out, self.order, self.output.order))


def _reduce_codelet(plan: Plan, outputs: int, depth: int) -> Codelet:
    partials, result = plan.options.partials_type, plan.dtype
    cycles = int(tile_cycles.reduce(outputs, depth, partials, result, int(plan.target.workers)))
    return codelets.sum_codelet("reduce", cycles, outputs * (depth - 1))
