"""The vertices of a pattern update: pooling of gradient magnitudes.

No source gives cycles for the original's pooling of a block's magnitudes; they are counted from
what a worker has to do: the instruction set adds (or takes the larger of) absolute values of a
vector at a time.
"""

from __future__ import annotations

import numpy as np

from popsparse.machine import Codelet, In, Out, VertexView

_START = 12  # Worker: entry, pointers, its share of the blocks, exit.
_BLOCK = 8  # Its pointers, the sum over the vector's lanes, scaling, the store.
_VECTOR = 2  # A load; an absolute value added to the sums, or compared with them.


def pooled(blocks: np.ndarray, pooling: str) -> np.ndarray:
    """Gradients of blocks [..., columns, rows] to scores [...], float32.

    Sums go over the rows of a block and then over its columns, as `ops.grow` makes them.
    """
    magnitude = np.abs(blocks).astype(np.float32)
    if pooling == "max":
        return np.asarray(magnitude.max((-1, -2)))
    scores = _in_order(_in_order(magnitude))
    if pooling == "avg":
        scores /= np.float32(blocks.shape[-1] * blocks.shape[-2])
    return scores


def pool_codelet(pooling: str) -> Codelet:
    """`pooled`, from [..., blocks, columns, rows] to [..., blocks], which round once."""

    def compute(v: VertexView) -> None:
        v.scores[...] = pooled(v.blocks, pooling)

    def cycles(v: VertexView) -> int:
        width = v.target.data_path_bits // (8 * v.blocks.itemsize)
        vectors = -(-v.blocks.shape[-1] * v.blocks.shape[-2] // width)
        share = -(-v.blocks.shape[-3] // v.target.workers)
        return _START + share * (_BLOCK + _VECTOR * vectors)

    fields = {"blocks": In(), "scores": Out()}
    return Codelet(f"pool magnitudes, {pooling}", fields, compute, cycles, "workers")


def _in_order(values: np.ndarray) -> np.ndarray:
    """The sum over the last axis, from its first element to its last."""
    total = values[..., 0].copy()
    for i in range(1, values.shape[-1]):
        total += values[..., i]
    return total
