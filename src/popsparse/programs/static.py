"""The program of a static product.

Everything is known when the program is built: the columns each tile needs, the destination of each
partial sum. So there is no meta-info to read and no loop.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse

from popsparse.machine import (
    UNSIGNED_SHORT,
    Codelet,
    ComputeSet,
    Copy,
    Execute,
    Graph,
    In,
    InOut,
    Out,
    Ragged,
    Sequence,
    Tensor,
    VertexView,
)
from popsparse.machine.intervals import Runs, equal_runs, offsets_of, ranks
from popsparse.machine.target import KERNEL_CODE, SUM_CODE
from popsparse.planning.static_layout import Pieces, StaticPlan, work_list_words
from popsparse.programs.layout import PlannedTensor
from popsparse.static_timing import compute_cycles


def add_values(graph: Graph, plan: StaticPlan, name: str) -> Tensor:
    """Add the variable of the values in device order, [nnz x area]: on the tiles that use them, or
    spread evenly if several parts of n use them."""
    area = plan.pattern.block_size**2
    values = graph.add_variable(plan.dtype, [plan.pattern.nnz * area], name)
    if not values.numel:
        return values
    if plan.n_split == 1:
        pieces = plan.pieces(0)
        graph.map_stretches(values, pieces.tile, pieces.blocks * area)
    else:
        graph.map_linearly(values, grain=np.lcm(plan.dtype.vector_width, plan.pattern.block_size))
    return values


def dense_operand(
    graph: Graph, plan: StaticPlan, name: str, *, transposed: bool = False
) -> PlannedTensor:
    """A dense operand [1, k, n], or [1, n, k] when `transposed`; the padding of n is 0.

    Its elements lie in `home`, [k / b, padded n, b], spread evenly over the tiles.
    """
    n = plan.params.n
    home = graph.add_variable(plan.dtype, _home_shape(plan), name)
    graph.map_linearly(home, grain=plan.grain)
    if plan.n_padded != n:
        graph.set_initial_value(home, 0)
    view = _natural(home[:, :n], transposed=transposed)
    return PlannedTensor(home, view.addresses(), ("static", transposed))


def _home_shape(plan: StaticPlan) -> tuple[int, int, int]:
    return plan.pattern.grid[1], plan.n_padded, plan.pattern.block_size


def _natural(home: Tensor, *, transposed: bool) -> Tensor:
    rows, n, block = home.shape
    view = home.transpose(0, 2, 1).reshape(rows * block, n)
    return (view.transpose(1, 0) if transposed else view).expand_dims(0)


def add_product(
    graph: Graph,
    plan: StaticPlan,
    values: Tensor,
    dense: Tensor,
    program: Sequence,
    name: str,
    *,
    transposed: bool = False,
) -> Tensor:
    """Add the product to a program. `dense` is [1, k, n] and the result [1, m, n]; `transposed`
    swaps the last two dimensions of both."""
    return _Product(graph, plan, name).add(values, dense, program, transposed)


class _Product:
    """Builds the program of one product."""

    def __init__(self, graph: Graph, plan: StaticPlan, name: str) -> None:
        self.graph, self.plan, self.name = graph, plan, name
        self.block = plan.pattern.block_size
        self.area = self.block**2

    def variable(self, what: str, shape: list[int], tiles: Any) -> Tensor:
        name = f"{self.name} {what}"
        return self.graph.add_variable(self.plan.dtype, shape, name, tiles=tiles)

    def stretches(self, what: str, tiles: np.ndarray, lengths: np.ndarray) -> Tensor:
        """Add a variable of consecutive stretches, each on its tile."""
        variable = self.graph.add_variable(
            self.plan.dtype, [int(lengths.sum())], f"{self.name} {what}"
        )
        self.graph.map_stretches(variable, tiles, lengths)
        return variable

    def add(self, values: Tensor, dense: Tensor, program: Sequence, transposed: bool) -> Tensor:
        plan, steps = self.plan, Sequence(name=self.name)
        program.add(steps)
        if not (
            isinstance(dense, PlannedTensor)
            and dense.layout == ("static", transposed)
            and dense.home.shape == _home_shape(plan)
        ):
            operand = dense_operand(self.graph, plan, f"{self.name} operand", transposed=transposed)
            steps.add(Copy(dense, operand, name="regroup"))
            dense = operand
        home = dense.home
        partials = self._multiply(values, home, steps)
        height, order = plan.pattern.grid[0], plan.row_order
        out = self.graph.add_variable(
            plan.dtype, [height, plan.n_padded, self.block], f"{self.name} result"
        )
        self.graph.map_linearly(out, grain=plan.grain)
        self._reduce(partials, out, steps)
        inverse_order = np.argsort(order)
        rows = out if np.array_equal(order, np.arange(height)) else out[inverse_order]
        return _natural(rows[:, : plan.params.n], transposed=transposed)

    def _multiply(self, values: Tensor, home: Tensor, steps: Sequence) -> list[Tensor]:
        """Gather and multiply, all parts of n side by side; returns their partial sums."""
        plan = self.plan
        if not plan.pattern.nnz:
            return []
        compute = self.graph.add_compute_set("multiply")
        pairs, partials = [], []
        for part, (columns, tiles) in enumerate(zip(plan.n_parts, plan.tile_parts, strict=True)):
            pieces = plan.pieces(part)
            tile = tiles.begin + pieces.tile
            size = [columns.size, self.block]
            owner = tile[pieces.column_piece]
            local = self.variable(f"columns {part}", [len(owner), *size], owner)
            pairs.append((self._columns(home, part), local))
            used = values
            if plan.n_split > 1:
                used = self.stretches(f"values {part}", tile, pieces.blocks * self.area)
                pairs.append((values, used))
            owner = tile[pieces.row_piece]
            result = self.variable(f"partials {part}", [len(owner), *size], owner)
            partials.append(result)
            words = work_list_words(pieces.rows, pieces.blocks, self.block, plan.target.workers)
            # Vertices use `pieces` instead; this variable only takes up its memory.
            lists = self.graph.add_constant(
                UNSIGNED_SHORT, [int(words.sum())], 0, f"{self.name} work lists {part}"
            )
            self.graph.map_stretches(lists, tile, words)
            cut = columns.size * self.block
            self.graph.add_vertices(
                compute,
                self._codelet(part),
                tile,
                {
                    "values": Ragged(used, np.append(pieces.begin, pieces.end[-1]) * self.area),
                    "columns": Ragged(local.flatten(), offsets_of(pieces.columns) * cut),
                    "out": Ragged(result.flatten(), offsets_of(pieces.rows) * cut),
                },
            )
        steps.add(Copy(pairs, name="gather operands"), Execute(compute))
        return partials

    def _columns(self, home: Tensor, part: int) -> Tensor:
        """The columns that the tiles of a part of n need, [columns of all pieces, n, b]."""
        plan, n = self.plan, self.plan.n_parts[part]
        column = plan.column_order[plan.pieces(part).column]
        first = int(home[:1, :1, :1].addresses().item()) + n.begin * self.block
        starts = first + column * plan.n_padded * self.block
        lengths = np.full(len(starts), n.size * self.block)
        shape = [len(starts), n.size, self.block]
        return Tensor(self.graph, home.dtype, shape, runs=Runs(starts, lengths))

    def _codelet(self, part: int) -> Codelet:
        plan, pieces = self.plan, self.plan.pieces(part)
        n = plan.n_parts[part].size

        def compute(v: VertexView) -> None:
            blocks = v.values.values.reshape(-1, self.block, self.block)
            operand = v.columns.values.reshape(-1, n, self.block)
            v.out.values[...] = multiply_pieces(pieces, blocks, operand).reshape(-1)

        fields = {"values": In(), "columns": In(), "out": Out()}
        cycles = compute_cycles(plan, part)
        flops = 2.0 * self.area * n * pieces.blocks
        return Codelet(
            "static product",
            fields,
            compute,
            lambda v: cycles,
            "supervisor",
            flops=lambda v: flops,
            code_bytes=int(KERNEL_CODE.typical),
        )

    def _reduce(self, partials: list[Tensor], out: Tensor, steps: Sequence) -> None:
        """Bring the partial sums to the tiles that add them up, and the sums to the outputs."""
        plan, outputs, sums = self.plan, self.plan.outputs, self.plan.sums
        ones, spread = sums.ones, sums.spread
        pairs = []
        if len(ones):
            rows, parts = outputs.row[ones], outputs.part[ones]
            start = self._sources(partials, rows, parts, outputs.begin[ones], np.zeros_like(ones))
            pairs.append((self._runs(out, start, outputs.length[ones]), self._outputs(out, ones)))
        compute = self.graph.add_compute_set("reduce")
        total: Tensor | None = None
        for at_home in (True, False):
            chosen = np.flatnonzero(sums.at_home == at_home)
            if not len(chosen):
                continue
            place = sums.begin[chosen]
            result = out.flatten()
            if not at_home:
                what = "sums made elsewhere"
                result = total = self.stretches(what, sums.tile[chosen], sums.length[chosen])
                place = np.cumsum(sums.length[chosen]) - sums.length[chosen]
            pairs += self._add_up(partials, chosen, place, result, compute, at_home=at_home)
        if pairs:
            steps.add(Copy(pairs, name="exchange partials"))
        if len(sums.tile):
            state = sums.state_bytes(plan)
            words = (state[state > 0] // 2).astype(np.int64)
            # The state of the sums' vertices: this variable only takes up its memory.
            vertices = self.graph.add_constant(
                UNSIGNED_SHORT, [int(words.sum())], 0, f"{self.name} vertices of sums"
            )
            self.graph.map_stretches(vertices, np.flatnonzero(state), words)
            steps.add(Execute(compute))
        if total is not None:
            # Device order of the outputs, regardless of their pieces.
            away = ~sums.at_home
            begin, length = sums.begin[away], sums.length[away]
            order = np.argsort(begin)
            first = int(total[:1].addresses().item())
            place = first + (np.cumsum(length) - length)[order]
            moved = self._runs(out, place, length[order])
            steps.add(Copy(moved, self._outputs(out, spread), name="move sums"))

    def _runs(self, like: Tensor, start: np.ndarray, length: np.ndarray) -> Tensor:
        return Tensor(self.graph, like.dtype, [int(length.sum())], runs=Runs(start, length))

    def _outputs(self, out: Tensor, chosen: np.ndarray) -> Tensor:
        """Some stretches of the result."""
        outputs = self.plan.outputs
        first = int(out[:1, :1, :1].addresses().item())
        return self._runs(out, first + outputs.begin[chosen], outputs.length[chosen])

    def _sources(
        self,
        partials: list[Tensor],
        rows: np.ndarray,
        parts: np.ndarray,
        begin: np.ndarray,
        turn: np.ndarray,
    ) -> np.ndarray:
        """Addresses of partial sum number `turn` of outputs that begin at `begin`."""
        plan = self.plan
        start = np.zeros(len(rows), np.int64)
        for part, sums in enumerate(partials):
            here = parts == part
            if not here.any():
                continue
            order, begins = reduction_sources(plan, part)
            columns, row = plan.n_parts[part], rows[here]
            in_row = begin[here] - row * plan.n_padded * self.block
            index = order[begins[row] + turn[here]]
            first = int(sums[:1, :1, :1].addresses().item())
            start[here] = first + (index * columns.size - columns.begin) * self.block + in_row
        return start

    def _add_up(
        self,
        partials: list[Tensor],
        chosen: np.ndarray,
        place: np.ndarray,
        result: Tensor,
        compute: ComputeSet,
        *,
        at_home: bool,
    ) -> list[tuple[Tensor, Tensor]]:
        """Add vertices for some of the sums, written to `result` at `place`; returns the copies of
        their partial sums."""
        plan, sums = self.plan, self.plan.sums
        depth = sums.depth[chosen]
        part = np.repeat(np.arange(len(chosen)), depth)
        turn = ranks(depth)
        of, size = chosen[part], sums.length[chosen]
        start = self._sources(partials, sums.row[of], sums.part[of], sums.begin[of], turn)
        length, where = sums.length[of], "outputs" if at_home else "sums"
        local = self.stretches(f"partials of {where}", sums.tile[of], length)
        pairs = [(self._runs(local, start, length), local)] if local.numel else []
        cycles = sums.cycles(plan, sums.at_home == at_home)
        # At home every tile of the result has a vertex, so edges of unequal length leave no gaps.
        tiles = np.unique(plan.outputs.tile if at_home else sums.tile[chosen])
        written = Runs(place, size).addresses()

        def add(v: VertexView) -> None:
            total = add_partials(v.partials.values, place[part], length, turn, result.numel)
            v.out.values[written] = total[written]

        codelet = Codelet(
            "static reduce",
            {"partials": In(), "out": InOut() if at_home else Out()},
            add,
            lambda v: cycles[tiles],
            "supervisor",
            flops=lambda v: v.partials.lengths,
            code_bytes=int(SUM_CODE.typical),
        )
        counts = np.bincount(sums.tile[of], length, plan.target.tiles)[tiles]
        ends = np.minimum(np.append(tiles, tiles[-1] + 1) * plan.outputs.share, result.numel)
        if not at_home:
            ends = offsets_of(np.bincount(sums.tile[chosen], size, plan.target.tiles)[tiles])
        edges = {"partials": Ragged(local, offsets_of(counts)), "out": Ragged(result, ends)}
        self.graph.add_vertices(compute, codelet, tiles, edges)
        return pairs


def multiply_pieces(pieces: Pieces, values: np.ndarray, operand: np.ndarray) -> np.ndarray:
    """Multiply all pieces of one part of n, as one block-diagonal product.

    Args:
        values: [blocks, b, b] in device order.
        operand: [columns of all pieces, n, b], the gathered dense columns.

    Returns:
        [rows of all pieces, n, b] of the operand's type. Elements are summed in float32 and rounded
        once a row; float16 blocks are rounded after each block, as in the matrix units.
    """
    columns, n, block = operand.shape
    rows = len(pieces.row)
    dense = operand.astype(np.float32).transpose(0, 2, 1)
    if block > 1 and operand.dtype == np.float16:
        sums = np.zeros((rows, block, n), np.float16)
        turn = ranks(equal_runs(pieces.block_row).lengths)
        for number in range(int(turn.max(initial=-1)) + 1):
            now = turn == number
            product = values[now].astype(np.float32) @ dense[pieces.block_column[now]]
            at = pieces.block_row[now]
            sums[at] = sums[at].astype(np.float32) + product
        return sums.transpose(0, 2, 1)
    offsets = offsets_of(np.bincount(pieces.block_row, minlength=rows))
    shape = (rows * block, columns * block)
    blocks = values.astype(np.float32)
    if block == 1:
        matrix = scipy.sparse.csr_array((blocks.ravel(), pieces.block_column, offsets), shape=shape)
    else:
        matrix = scipy.sparse.bsr_array((blocks, pieces.block_column, offsets), shape=shape)
    result = np.asarray(matrix @ dense.reshape(columns * block, n)).reshape(rows, block, n)
    return result.transpose(0, 2, 1).astype(operand.dtype)


def reduction_sources(plan: StaticPlan, part: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows of `multiply_pieces` that belong to each row place of the result: their indices, by
    row place and then by piece, and the start of each row place, [m / b + 1]."""
    row = plan.pieces(part).row
    begins = offsets_of(np.bincount(row, minlength=plan.pattern.grid[0]))
    return np.argsort(row, kind="stable"), begins


def add_partials(
    values: np.ndarray, begin: np.ndarray, length: np.ndarray, turn: np.ndarray, outputs: int
) -> np.ndarray:
    """Add partial sums into their outputs, in float32.

    Args:
        values: [p], stretch after stretch.
        begin, length: range of each stretch in the outputs, int64 [stretches].
        turn: the number of earlier stretches of the same outputs: they are added in this order.
        outputs: number of outputs.
    """
    total = np.zeros(outputs, np.float32)
    first = np.cumsum(length) - length
    for number in range(int(turn.max(initial=-1)) + 1):
        now = turn == number
        to = Runs(begin[now], length[now]).addresses()
        total[to] += values[Runs(first[now], length[now]).addresses()]
    return total
