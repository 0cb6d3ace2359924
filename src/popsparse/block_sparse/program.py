"""The device program of a block-sparse product: gather blocks, transpose, multiply, reduce."""

from __future__ import annotations

from typing import Any

import numpy as np

from popsparse.block_sparse import codelets
from popsparse.block_sparse.planning import BlockSparsePlan
from popsparse.machine import (
    Copy,
    DType,
    Execute,
    Graph,
    Ragged,
    Sequence,
    Tensor,
    as_dtype,
)
from popsparse.machine.intervals import Runs


def add_blocks(
    graph: Graph, dtype: DType, home: np.ndarray, shape: tuple[int, ...], name: str
) -> Tensor:
    """A variable [blocks, *shape], each block on its tile; those of tile -1 anywhere."""
    made = graph.add_variable(dtype, [len(home), *shape], name)
    if made.numel:
        spread = np.arange(len(home)) * graph.target.tiles // max(len(home), 1)
        graph.set_tile_mapping(made, np.where(home < 0, spread, home))
    return made


def at_home(plan: BlockSparsePlan, which: str, count: int) -> np.ndarray:
    """The tile of the first piece that reads each of `count` blocks of operand "a" or "b"; -1
    where none does."""
    pieces = plan.pieces
    blocks = getattr(pieces.products, which)[pieces.chosen]
    tiles = np.repeat(pieces.tile, np.diff(pieces.first))
    found = np.full(count, -1)
    found[blocks[::-1]] = tiles[::-1]
    return found


def natural(blocks: Tensor, rows: int, *, turned: bool = False) -> Tensor:
    """Blocks [rows * cols, height, width] as the matrix that they make; its transpose if
    `turned`."""
    count, height, width = blocks.shape
    grid = blocks.reshape(rows, count // rows, height, width).transpose(0, 2, 1, 3)
    matrix = grid.reshape(rows * height, count // rows * width)
    return matrix.transpose(1, 0) if turned else matrix


def add_product(
    graph: Graph,
    plan: BlockSparsePlan,
    a: np.ndarray,
    b: np.ndarray,
    program: Sequence,
    name: str,
    *,
    b_is_turned: bool,
) -> Tensor:
    """Add a product to a program: [results, bm, bn], in the order of the plan's products.

    Args:
        a: address of each element of the blocks [.., bm, bk] of the left operand.
        b: likewise of the right one, [.., bn, bk] where `b_is_turned`, otherwise [.., bk, bn].
    """
    return _Product(graph, plan, name).add(a, b, program, b_is_turned)


class _Product:
    def __init__(self, graph: Graph, plan: BlockSparsePlan, name: str) -> None:
        self.graph, self.plan, self.name = graph, plan, name
        self.params, self.pieces = plan.params.forward(), plan.pieces
        self.dtype = as_dtype(self.params.dtype.name)

    def stretches(self, dtype: DType, what: str, tiles: np.ndarray, each: int) -> Tensor:
        """A variable [.., each] of blocks, each on its tile."""
        shape = [len(tiles), each]
        made = self.graph.add_variable(dtype, shape, f"{self.name} {what}")
        if made.numel:
            self.graph.set_tile_mapping(made, tiles)
        return made

    def view(self, dtype: DType, addresses: np.ndarray) -> Tensor:
        return Tensor(self.graph, dtype, addresses.shape, addresses=addresses)

    def execute(self, what: str, codelet: Any, tiles: np.ndarray, edges: dict[str, Any]) -> Execute:
        compute = self.graph.add_compute_set(f"{self.name} {what}")
        self.graph.add_vertices(compute, codelet, tiles, edges)
        return Execute(compute, name=what)

    def add(self, a: np.ndarray, b: np.ndarray, program: Sequence, b_is_turned: bool) -> Tensor:
        steps = Sequence(name=self.name)
        program.add(steps)
        count, kind = len(self.pieces.products.row), as_dtype(self.params.partials_type.name)
        area = self.params.block_size[0] * self.params.block_size[2]
        out = self._results(count, area)
        partials = self.stretches(kind, "partials", self.pieces.tile, area)
        for turn in range(self.plan.options.number_of_pass):
            now = np.flatnonzero(self.pieces.turn == turn)
            if len(now):
                self._multiply(now, a, b, b_is_turned, partials, steps)
        self._reduce(partials, out, steps)
        return out.reshape(count, self.params.block_size[0], self.params.block_size[2])

    def _results(self, count: int, area: int) -> Tensor:
        """Where the result is: each block on the tile of its first piece."""
        home = np.full(count, -1)
        home[self.pieces.result[::-1]] = self.pieces.tile[::-1]
        dtype = as_dtype(self.params.out_dtype.name)
        return add_blocks(self.graph, dtype, home, (area,), f"{self.name} result")

    def _multiply(
        self,
        now: np.ndarray,
        a: np.ndarray,
        b: np.ndarray,
        b_is_turned: bool,
        partials: Tensor,
        steps: Sequence,
    ) -> None:
        pieces, products = self.pieces, self.pieces.products
        counts = np.diff(pieces.first)[now]
        where = Runs(pieces.first[now], counts).addresses()
        chosen = pieces.chosen[where]
        tile = np.repeat(pieces.tile[now], counts)
        pairs: list[tuple[Tensor, Tensor]] = []
        left = self._local("left blocks", products.a[chosen], tile, a, pairs)
        right = self._local("right blocks", products.b[chosen], tile, b, pairs)
        if pairs:
            steps.add(Copy(pairs, name="gather blocks"))
        if not b_is_turned:
            right = self._turned(right, tile, steps)
        tiles, place = np.unique(pieces.tile[now], return_inverse=True)
        held = np.append(0, np.cumsum(np.bincount(place, counts).astype(np.int64)))
        outs = np.append(0, np.cumsum(np.bincount(place)))
        size = self.params.block_size
        own = self.view(partials.dtype, partials.addresses()[now])
        edges = {
            "a": Ragged(self.view(self.dtype, left.reshape(-1)), held * size[0] * size[1]),
            "b": Ragged(self.view(self.dtype, right.reshape(-1)), held * size[1] * size[2]),
            "out": Ragged(own.flatten(), outs * size[0] * size[2]),
        }
        kinds = (self.params.dtype, self.params.partials_type)
        codelet = codelets.multiply(place, counts, size, *kinds)
        steps.add(self.execute("multiply", codelet, tiles, edges))

    def _local(
        self,
        what: str,
        blocks: np.ndarray,
        tile: np.ndarray,
        addresses: np.ndarray,
        pairs: list[tuple[Tensor, Tensor]],
    ) -> np.ndarray:
        """Where each product finds its block on its tile: [products, *block]. What is not there
        is brought, each block once a tile."""
        shape = addresses.shape[1:]
        area = int(np.prod(shape))
        keys, of = np.unique(tile * len(addresses) + blocks, return_inverse=True)
        tiles, wanted = np.divmod(keys, len(addresses))
        found = addresses[wanted]
        flat = found.reshape(-1, area)
        there = self.graph.tiles_of(self.view(self.dtype, flat))
        away = np.flatnonzero((there != tiles[:, None]).any(1))
        if len(away):
            local = self.stretches(self.dtype, what, tiles[away], area)
            pairs.append((self.view(self.dtype, flat[away]), local))
            found = found.copy()
            found[away] = local.addresses().reshape(-1, *shape)
        return found[of]

    def _turned(self, right: np.ndarray, tile: np.ndarray, steps: Sequence) -> np.ndarray:
        """Blocks [bk, bn] brought on their tile into the order of the matrix units."""
        _, bk, bn = self.params.block_size
        first = right.reshape(len(right), -1)[:, 0]
        _, at, of = np.unique(first, return_index=True, return_inverse=True)
        order = np.argsort(tile[at], kind="stable")
        at, back = at[order], np.argsort(order)
        made = self.stretches(self.dtype, "transposed blocks", tile[at], bk * bn)
        tiles, counts = np.unique(tile[at], return_counts=True)
        offsets = np.append(0, np.cumsum(counts)) * bk * bn
        edges = {
            "src": Ragged(self.view(self.dtype, right[at].reshape(-1)), offsets),
            "out": Ragged(made.flatten(), offsets),
        }
        codelet = codelets.transpose(counts, bk, bn, self.params.dtype)
        steps.add(self.execute("transpose blocks", codelet, tiles, edges))
        return made.addresses()[back[of]]

    def _reduce(self, partials: Tensor, out: Tensor, steps: Sequence) -> None:
        """Partial sums to the tiles of the results, and added there."""
        area = out.shape[1]
        home = self.graph.tiles_of(out)[:, 0] if out.numel else np.zeros(0, np.int64)
        order = np.argsort(home, kind="stable")  # results, tile by tile
        rank = np.argsort(order)
        by_result = np.argsort(rank[self.pieces.result], kind="stable")
        depth = np.bincount(self.pieces.result, minlength=len(out))[order]
        target = home[self.pieces.result[by_result]]
        addresses = partials.addresses()[by_result].reshape(-1, area)
        away = np.flatnonzero(self.pieces.tile[by_result] != target)
        if len(away):
            local = self.stretches(partials.dtype, "partials brought", target[away], area)
            pair = (self.view(partials.dtype, addresses[away]), local)
            steps.add(Copy(*pair, name="exchange partials"))
            addresses = addresses.copy()
            addresses[away] = local.addresses()
        if not out.numel:
            return
        tiles, place = np.unique(home[order], return_inverse=True)
        held = np.bincount(place, depth, minlength=len(tiles)).astype(np.int64)
        outs = np.append(0, np.cumsum(np.bincount(place)))
        edges = {
            "partials": Ragged(
                self.view(partials.dtype, addresses.reshape(-1)),
                np.append(0, np.cumsum(held)) * area,
            ),
            "out": Ragged(self.view(out.dtype, out.addresses()[order].reshape(-1)), outs * area),
        }
        kept = self._kept()
        kinds = (self.params.partials_type, self.params.out_dtype)
        kept = None if kept is None else kept[order]
        codelet = codelets.reduce(place, depth, area, *kinds, kept)
        steps.add(self.execute("reduce", codelet, tiles, edges))

    def _kept(self) -> np.ndarray | None:
        """What the mask inside of blocks leaves, bool [results, area]."""
        mask = self.params.subblock_mask
        if mask == "none":
            return None
        bm, _, bn = self.params.block_size
        rows = self.pieces.products.row % self.params.grid[0]
        row = rows[:, None, None] * bm + np.arange(bm)[:, None]
        col = self.pieces.products.col[:, None, None] * bn + np.arange(bn)
        kept = col <= row if mask == "zero_upper_triangle" else col >= row
        return kept.reshape(len(rows), -1)
