"""The vertices of grad_weight: products of dense operands at the positions a bucket holds."""

from __future__ import annotations

import numpy as np

from popsparse.machine import UNSIGNED_INT, UNSIGNED_SHORT, Codelet, In, InOut, Out, VertexView
from popsparse.planning import tile_cycles
from popsparse.planning.plan import Method, Plan
from popsparse.programs.buckets import BucketCodelets, Found
from popsparse.programs.codelets_product import chunks


class GradWeightCodelets(BucketCodelets):
    """Codelets that add dY x X^T of a tile's part of the batch to a bucket's partial gradients.

    Edges: `words` and `partials` of the bucket; `gradient` and `input`, [channels, batch], or
    [batch, channels] where the matrix units want them so. Whose rectangle the operands are says a
    scalar (`resident`: buckets travel) or the operands themselves (`visiting`: they travel).
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan, "grad_weight")
        self.batch_first = plan.method is Method.BLOCK_AMP
        edges = {"words": In(UNSIGNED_SHORT), "partials": InOut(), "gradient": In(), "input": In()}
        ids = {"x_id": In(UNSIGNED_INT), "y_id": In(UNSIGNED_INT)}
        more = (self._compute, ("rectangle",), self._flops)
        self.resident = self._codelet("grad_weight", edges, *more)
        visitors = {**edges, **ids}
        self.visiting = self._codelet(
            "grad_weight of visitors", visitors, self._compute, flops=self._flops
        )

    def _match(self, v: VertexView) -> tuple[np.ndarray, Found]:
        words = v.words.reshape(v.count, 1, -1)
        if "x_id" in v.__dict__:
            parts_y = self.plan.partition.y
            rectangle = v.x_id.astype(np.int64) * parts_y + v.y_id.astype(np.int64)
        else:
            rectangle = v.rectangle
        return self.reader.match(words, rectangle.reshape(-1))

    def _compute(self, v: VertexView) -> None:
        found = self._matched(v)
        bx, by = self.plan.block_dimensions
        partials = v.partials.reshape(v.count, -1)
        assert np.shares_memory(partials, v.partials)
        partials = partials[:, : partials.shape[1] // (bx * by) * bx * by]
        partials = partials.reshape(v.count, -1, bx, by)
        gradient = self._by_block(v, v.gradient, bx)
        inputs = self._by_block(v, v.input, by)
        for part in chunks(len(found.vertex), (bx + by) * gradient.shape[-1]):
            here = Found(*(a[part] for a in found))
            left = gradient[here.vertex, here.row].astype(np.float32)
            right = inputs[here.vertex, here.col].astype(np.float32)
            product = np.matmul(left, right.swapaxes(-1, -2))
            at = here.vertex, here.place
            partials[at] = partials[at].astype(np.float32) + product

    def _by_block(self, v: VertexView, operand: np.ndarray, edge: int) -> np.ndarray:
        """[vertices, blocks, edge, batch]."""
        operand = operand.reshape(v.count, *operand.shape[v.rank :])
        if self.batch_first:
            operand = operand.swapaxes(-1, -2)
        return operand.reshape(v.count, -1, edge, operand.shape[-1])


def rearrange_codelet(plan: Plan, dim: str) -> Codelet:
    """Brings the operand of dimension "x" or "y" from [channels, batch] to [batch, channels]."""
    blocks = getattr(plan.groups_per_tile, dim)
    edge = getattr(plan.grouping, dim)
    batch = plan.elements_per_tile.z
    workers = int(plan.target.workers)
    cycles = int(tile_cycles.rearrange_batch(blocks, edge, batch, plan.dtype, workers))

    def turn(v: VertexView) -> None:
        v.out[...] = v.operand.swapaxes(-1, -2)

    return Codelet("rearrange", {"operand": In(), "out": Out()}, turn, cycles, "supervisor")
