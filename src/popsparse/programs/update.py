"""The program of a pattern update.

As in Graphcore's application, the dense gradient of the weights and the pooling of its magnitudes
run on the tiles, in the step whose gradient is used; scores, values and optimizer state go to the
host, which drops the smallest weights and grows where scores are largest; meta-info, values and
optimizer state come back.

No source gives cycles for the original's pooling of a block's magnitudes; they are counted from a
worker's instructions: the instruction set adds (or takes the larger of) absolute values, one vector
at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import numpy as np

from popsparse.machine import (
    Codelet,
    Copy,
    Engine,
    Graph,
    In,
    Out,
    Sequence,
    Stream,
    Tensor,
    VertexView,
)
from popsparse.planning.dense import GradientPiece, plan_gradient
from popsparse.planning.options import Update
from popsparse.planning.params import ceil_div
from popsparse.programs.dense import Layout, add_product
from popsparse.programs.layout import SparseTensor, execute

_START = 12  # Worker: entry, pointers, its share of the blocks, exit.
_BLOCK = 8  # Its pointers, the sum over the vector's lanes, scaling, the store.
_VECTOR = 2  # A load; an absolute value added to the sums, or compared with them.


def pool_magnitudes(blocks: np.ndarray, pooling: str) -> np.ndarray:
    """Pool gradients of blocks [..., columns, rows] to scores [...], float32.

    Sums go over the rows of a block and then over its columns, as in `ops.grow`.
    """
    magnitude = np.abs(blocks).astype(np.float32)
    if pooling == "max":
        return np.asarray(magnitude.max((-1, -2)))
    scores = _sum_in_order(_sum_in_order(magnitude))
    if pooling == "avg":
        scores /= np.float32(blocks.shape[-1] * blocks.shape[-2])
    return scores


def pool_codelet(pooling: str) -> Codelet:
    """Pools [..., blocks, columns, rows] to `pooled` [..., blocks], rounded once."""

    def compute(v: VertexView) -> None:
        v.scores[...] = pool_magnitudes(v.blocks, pooling)

    def cycles(v: VertexView) -> int:
        width = v.target.vector_width(v.blocks.dtype)
        vectors = ceil_div(v.blocks.shape[-1] * v.blocks.shape[-2], width)
        share = ceil_div(v.blocks.shape[-3], v.target.workers)
        return _START + share * (_BLOCK + _VECTOR * vectors)

    fields = {"blocks": In(), "scores": Out()}
    return Codelet(f"pool magnitudes, {pooling}", fields, compute, cycles, "workers")


def _sum_in_order(values: np.ndarray) -> np.ndarray:
    """The sum over the last axis, from its first element to its last."""
    total = values[..., 0].copy()
    for i in range(1, values.shape[-1]):
        total += values[..., i]
    return total


class UpdatePrograms:
    """The programs "scores" and "rewire" of a layer.

    Args:
        graph: the graph of the layer.
        weights: the weights to update.
        gradient, inputs: dY [batch, groups * out] and X [batch, groups * in]; no gradient if growth
            does not use one, and then there are no scores.
        update: the options of the update.
        slots: the optimizer state, each like the values; created here by default.
        name: name of the layer, a prefix of the names of streams.

    Attributes:
        programs: the programs by name.

    Raises:
        ValueError: a dense gradient that does not fit the tiles in any number of pieces.
    """

    def __init__(
        self,
        graph: Graph,
        weights: SparseTensor,
        gradient: Tensor | None,
        inputs: Tensor,
        update: Update,
        slots: Iterable[Tensor] = (),
        name: str = "",
    ) -> None:
        self.graph, self.weights, self.plan, self.update = graph, weights, weights.plan, update
        self.block = self.plan.params.sparsity_params.block_dimensions
        self._is_pooled = update.pooling != "none" and self.block != (1, 1)
        self.dtype = self.plan.dtype
        self._state = [("values", weights.nz_values)]
        self._prefix = f"{name} " if name else ""
        held = list(slots) or [self._add_slot(n) for n in range(update.optimizer_slots)]
        for number, slot in enumerate(held):
            self._state.append((f"optimizer slot {number}", slot.flatten()))
        self._pieces: list[tuple[str, GradientPiece]] = []  # with the names of their data
        self._streams: dict[str, Stream] = {}
        self.host: dict[str, np.ndarray] = {}
        self.programs = {
            "scores": self._scores(gradient, inputs),
            "rewire": self._rewire(),
        }

    def _add_slot(self, number: int) -> Tensor:
        home = self.weights.values
        name, tiles = f"optimizer slot {number}", self.graph.tiles_of(home)
        slot = self.graph.add_variable(self.dtype, home.shape, name, tiles=tiles)
        self.graph.set_initial_value(slot, 0)
        self.graph.add_handle(name, slot)
        return slot

    def _scores(self, gradient: Tensor | None, inputs: Tensor) -> Sequence:
        steps = Sequence()
        if gradient is not None:
            self._score(gradient, inputs, steps)
        for name, tensor in self._state:
            stream = self._stream(name, tensor, to_device=False)
            steps.add(Copy(tensor, stream, name=f"{name} to host"))
        return steps

    def _score(self, gradient: Tensor, inputs: Tensor, steps: Sequence) -> None:
        sizes = self.plan.sizes
        by_group = [
            tensor.reshape(sizes.z, sizes.groups, channels).transpose(1, 0, 2)
            for tensor, channels in ((inputs, sizes.y), (gradient, sizes.x))
        ]
        pieces = plan_gradient(self.plan, self.update)
        for number, piece in enumerate(pieces):
            mark = f" {number}" if len(pieces) > 1 else ""
            a, b = (
                operand[:, :, first:last]
                for operand, first, last in zip(
                    by_group, (piece.y0, piece.x0), (piece.y1, piece.x1), strict=True
                )
            )
            layout, name = Layout(piece.plan, sizes.groups), f"dense gradient{mark}"
            scores = add_product(self.graph, layout, a, b, steps, name, transposed=(True, False))
            if self._is_pooled:
                scores = self._pool(scores, mark, steps)
            stream = self._stream(f"scores{mark}", scores, to_device=False)
            steps.add(Copy(scores, stream, name=f"scores to host{mark}"))
            self._pieces.append((f"scores{mark}", piece))

    def _pool(self, gradient: Tensor, mark: str, steps: Sequence) -> Tensor:
        """Scores [groups * block rows * block columns] of a gradient [groups, in, out]."""
        rows, cols = self.block
        groups, y, x = gradient.shape
        blocks = gradient.reshape(groups, y // cols, cols, x // rows, rows)
        blocks = blocks.transpose(0, 3, 1, 2, 4)
        count = groups * (x // rows) * (y // cols)
        each = ceil_div(count, self.plan.target.tiles)
        tiles = np.arange(ceil_div(count, each))
        shape = [len(tiles), each]
        spread = self.graph.add_variable(
            self.dtype, [*shape, cols, rows], f"gradient by blocks{mark}", tiles=tiles
        )
        scores = self.graph.add_variable(self.dtype, shape, f"scores{mark}", tiles=tiles)
        to = spread.reshape(len(tiles) * each, cols, rows)[:count]
        edges = {"blocks": spread, "scores": scores}
        codelet = pool_codelet(self.update.pooling)
        steps.add(
            Copy(blocks.reshape(count, cols, rows), to, name=f"gather blocks{mark}"),
            execute(self.graph, f"pool magnitudes{mark}", codelet, tiles, edges),
        )
        return scores.flatten()[:count]

    def _rewire(self) -> Sequence:
        steps = Sequence()
        words = self.weights.meta_info
        for name, tensor in [*([("meta-info", words)] if words.numel else []), *self._state]:
            stream = self._stream(f"new {name}", tensor, to_device=True)
            steps.add(Copy(stream, tensor, name=f"{name} from host"))
        return steps

    def _stream(self, name: str, tensor: Tensor, *, to_device: bool) -> Stream:
        stream = self.graph.add_stream(
            f"{self._prefix}{name}", tensor.dtype, tensor.numel, to_device=to_device
        )
        self._streams[name] = stream
        return stream

    # The host's side.

    def connect(self, engine: Engine) -> None:
        """Connect the streams to `host`, which holds their data by the stream's name."""
        for name, stream in self._streams.items():
            if stream.to_device:
                engine.connect(stream.name, partial(self._host_data, name))
            else:
                engine.connect(stream.name, partial(self.host.__setitem__, name))

    def _host_data(self, name: str) -> np.ndarray:
        """The data that the host sends over a stream; raises ValueError if there is none."""
        if name not in self.host:
            raise ValueError("the host has nothing to send: run this program with Layer.rewire")
        return self.host[name]

    def scores(self) -> np.ndarray:
        """The last scores sent to the host, [groups, block rows, block columns], float32."""
        rows, cols = self.block
        sizes = self.plan.sizes
        scores = np.empty((sizes.groups, sizes.x // rows, sizes.y // cols), np.float32)
        for name, piece in self._pieces:
            x, y = piece.x1 - piece.x0, piece.y1 - piece.y0
            scores_of_piece = self.host[name].astype(np.float32)
            if self._is_pooled:
                part = scores_of_piece.reshape(sizes.groups, x // rows, y // cols)
            else:
                blocks = scores_of_piece.reshape(sizes.groups, y // cols, cols, x // rows, rows)
                part = pool_magnitudes(blocks.transpose(0, 3, 1, 2, 4), "sum")
            at = scores[:, piece.x0 // rows : piece.x1 // rows]
            at[:, :, piece.y0 // cols : piece.y1 // cols] = part
        return scores

    def values(self) -> np.ndarray:
        """The last values sent to the host, in the order of the weights."""
        return self.host["values"]

    def slots(self) -> list[np.ndarray]:
        """The last optimizer state sent to the host, as `values`."""
        return [self.host[name] for name, _ in self._state[1:]]

    def send(self, meta_info: np.ndarray, values: list[np.ndarray]) -> None:
        """Set the data of the next "rewire": meta-info, encoded values and then optimizer state."""
        self.host["new meta-info"] = meta_info
        for (name, _), array in zip(self._state, values, strict=True):
            self.host[f"new {name}"] = array
